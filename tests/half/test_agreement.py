"""Each rank has its own part of the gradients, and all decide alike: what is clipped, left out, refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.half import reference
from tests.half.cases import net
from tests.harness import run_distributed
from tests.tensor.runtime_cases import batches

CASES = "tests.half.agreement_cases"
PIPELINE = {"partitions": 2, "microbatches": 2}
REPLICAS = {"partitions": 1, "ddp": True, "microbatches": 2}
BOTH = {**PIPELINE, "ddp": True}


def on_ranks(function: str, ranks: int, parameters: dict[str, Any], **options: Any) -> list[Any]:
    return run_distributed(f"{CASES}:{function}", ranks, kwargs={"parameters": parameters, **options})


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, PIPELINE),
    "shards": (2, {**REPLICAS, "shard_optimizer_state": True}),
    "both": (4, {**BOTH, "shard_optimizer_state": True}),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_of_two_optimizers_clips_by_the_norm_of_all_that_it_steps(layout: str) -> None:
    """Every rank has the same batch, so one replica has the gradients of all."""
    ranks, parameters = LAYOUTS[layout]
    model = net().bfloat16()
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    groups = ([m for m in masters if m.dim() > 1], [m for m in masters if m.dim() < 2])
    optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
    expected = []
    for x, y in batches(2):
        model.zero_grad()
        reference.microbatch_gradients(model, torch.bfloat16, x, y, 2, 1.0)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        expected += [float(torch.nn.utils.clip_grad_norm_(group, 0.01)) for group in groups]
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    for norms in on_ranks("two_optimizers", ranks, {**parameters, "bf16": True}):
        assert norms == pytest.approx(expected, rel=1e-6)


def _norms(frozen: tuple[str, ...]) -> list[float]:
    """Of plain torch."""
    model = net().half()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    norms = []
    for x, y in batches(2):
        reference.microbatch_gradients(model, torch.float16, x, y, 2, 64.0)
        for changes in (False, True):
            if changes and model.embed.weight.grad is not None:
                model.embed.weight.grad.zero_()
            gradients = [p.grad.float() / 64 for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
    return norms


@pytest.mark.parametrize("frozen", [(), ("embed", "blocks")])
def test_gradients_that_change_on_one_stage_after_clipping_count(frozen: tuple[str, ...]) -> None:
    """The other ranks have seen no change, or have no gradients at all, and come along all the same."""
    for norms in on_ranks("changed_after_clipping", 2, {**PIPELINE, "fp16": True}, frozen=frozen):
        assert norms == pytest.approx(_norms(frozen), rel=1e-6)


def test_a_scaler_skips_on_all_ranks_what_one_replica_alone_has_made_infinite() -> None:
    for found in on_ranks("one_overflows", 2, REPLICAS):
        assert found == [(16.0, True), (8.0, False), (8.0, True)]


def test_a_sparse_gradient_in_fp16_is_named_on_all_ranks() -> None:
    first, last = on_ranks("sparse", 2, {**PIPELINE, "microbatches": 1, "fp16": True})
    for mine, others in zip(first[:2], last[:2], strict=True):
        assert mine.startswith("SMPError: the gradient of a parameter of shape [5, 4] is sparse")
        assert "failed on rank 0: the gradient of a parameter of shape [5, 4] is sparse" in others
    assert first[2] == last[2] == ""


@pytest.mark.ci
def test_a_scaler_divides_pieces_on_every_stage() -> None:
    pieces = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 0}
    sharded, whole = (
        run_distributed("tests.half.cases:scaled", 4, kwargs={"parameters": {**BOTH, **keys}})
        for keys in ({"sharded_data_parallel_degree": 2, **pieces}, {})
    )
    for mine, theirs in zip(sharded, whole, strict=True):
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        torch.testing.assert_close(mine["state"], theirs["state"])
