"""Training with stages of several ranks equals training the dense model in one process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness import run_distributed
from tests.tensor.runtime_cases import BATCH, WIDTH, Net, batches, scaled

pytestmark = pytest.mark.sampled(3)

BASE = {"microbatches": 2, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}


def dense(
    num_replicas: int = 1, *, tied: bool = False, optimizer: str = "AdamW", clip: float | None = None
) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net(tied=tied)
    optim = getattr(torch.optim, optimizer)(net.parameters(), lr=0.05)
    losses: list[list[float]] = [[] for _ in range(num_replicas)]
    norms = []
    data = [batches(3, replica) for replica in range(num_replicas)]
    for step in range(3):
        optim.zero_grad()
        for replica in range(num_replicas):
            x, y = data[replica][step]
            loss = F.cross_entropy(net(x), y)
            (loss / num_replicas).backward()
            losses[replica].append(loss.item())
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), clip)))
        optim.step()
    return {
        "losses": losses,
        "norms": norms,
        "parameters": dict(net.named_parameters()),
        "gradients": {name: parameter.grad for name, parameter in net.named_parameters()},
        "state": net.state_dict(),
        "optimizer": optim.state_dict(),
    }


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    seen = set()
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"][rank["replica"]], rel=1e-6)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for name, parameter in rank["parameters"].items():
            seen.add(name)
            torch.testing.assert_close(parameter, expected["parameters"][name], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                rank["gradients"][name], expected["gradients"][name], rtol=1e-4, atol=1e-6
            )
        assert list(rank["state"]) == list(expected["state"])
        for name, tensor in rank["state"].items():
            torch.testing.assert_close(tensor, expected["state"][name], rtol=1e-5, atol=1e-6)
        states = rank["optimizer"]["state"]
        assert states.keys() == expected["optimizer"]["state"].keys()
        for number, entries in states.items():
            for key, value in entries.items():
                torch.testing.assert_close(
                    value, expected["optimizer"]["state"][number][key], rtol=1e-4, atol=1e-6
                )
    assert seen == set(expected["parameters"])


GRID = [
    (4, {"partitions": 2}),
    (2, {"partitions": 1}),
    (4, {"partitions": 1}),
    (4, {"partitions": 2, "placement_strategy": "spread", "pipeline": "simple"}),
    (4, {"partitions": 2, "placement_strategy": "PTD", "optimize": "speed"}),
    (4, {"partitions": 2, "virtual_stages": 2}),
    (4, {"partitions": 1, "tensor_parallel_degree": 4}),
    (8, {"partitions": 2}),
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("world_size", "parameters"), GRID)
def test_training_equals_the_dense_model(world_size: int, parameters: dict[str, Any]) -> None:
    parameters = {**BASE, **parameters}
    found = run_distributed("tests.tensor.runtime_cases:train", world_size, kwargs={"parameters": parameters})
    mp_size = parameters["partitions"] * parameters["tensor_parallel_degree"]
    check(found, dense(world_size // mp_size))


@pytest.mark.ci
def test_tied_weights_and_a_limit_on_the_norm() -> None:
    kwargs = {"parameters": {**BASE, "partitions": 2}, "tied": True, "clip": 0.5, "optimizer": "SGD"}
    found = run_distributed("tests.tensor.runtime_cases:train", 4, kwargs=kwargs)
    check(found, dense(tied=True, clip=0.5, optimizer="SGD"))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("has_joined", [False, True])
@pytest.mark.parametrize(("partitions", "pp_rank", "tp_rank"), [(2, 0, 1), (2, 1, 0), (1, 0, 1)])
def test_a_failure_in_one_rank_of_a_stage_ends_the_step_on_all(
    partitions: int, pp_rank: int, tp_rank: int, has_joined: bool
) -> None:
    kwargs = {
        "parameters": {**BASE, "partitions": partitions},
        "pp_rank": pp_rank,
        "tp_rank": tp_rank,
        "has_joined": has_joined,
    }
    found = run_distributed("tests.tensor.runtime_cases:fails_in_one_rank", 2 * partitions, kwargs=kwargs)
    texts = {text for text, _, _ in found}
    assert len(texts) == 1
    assert "ArithmeticError: the cause" in texts.pop()
    assert all(took < 20 for _, took, _ in found)  # far below the watchdog's limit
    assert all(loss == pytest.approx(dense()["losses"][0][0], rel=1e-6) for _, _, loss in found)


@pytest.mark.parametrize("partitions", [1, 2])
def test_ranks_of_a_stage_that_share_a_batch_must_bring_the_same(partitions: int) -> None:
    parameters = {**BASE, "partitions": partitions}
    for text in run_distributed(
        "tests.tensor.runtime_cases:other_batch", 2 * partitions, kwargs={"parameters": parameters}
    ):
        assert "the batch of a step differs: x, float32[8, 8], has other numbers on rank 1" in text
        assert "seed and shard data by smp.rdp_rank(), never by smp.rank()" in text


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_layer_that_is_used_otherwise_than_it_is_made_for_is_noticed(partitions: int) -> None:
    parameters = {**BASE, "partitions": partitions}
    kwargs = {"parameters": parameters}
    found = run_distributed("tests.tensor.runtime_cases:used_wrongly", 2 * partitions, kwargs=kwargs)
    texts = [text for text in found if text]
    assert len(texts) >= 2  # the ranks of the stages where it shows
    assert all("must be the same on all, since the parameter is not split" in text for text in texts)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_dense_models_state_goes_on_split(partitions: int) -> None:
    torch.manual_seed(0)
    net = Net()
    optim = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses, states = [], []
    for x, y in batches(5):
        states.append(copy.deepcopy((net.state_dict(), optim.state_dict())))
        optim.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optim.step()
        losses.append(loss.item())
    state, optimizer_state = states[3]
    kwargs = {
        "parameters": {**BASE, "partitions": partitions},
        "state": state,
        "optimizer_state": optimizer_state,
    }
    for found in run_distributed("tests.tensor.runtime_cases:loads", 2 * partitions, kwargs=kwargs):
        assert found == pytest.approx(losses[3:], rel=1e-6)


def test_what_split_parameters_do_not_allow_is_refused() -> None:
    parameters = {**BASE, "partitions": 1}
    for found in run_distributed("tests.tensor.runtime_cases:refused", 2, kwargs={"parameters": parameters}):
        for kind in ("Adafactor", "FusedLAMB", *(["Muon"] if hasattr(torch.optim, "Muon") else [])):
            assert f"{kind} with split or sharded parameters" in found[kind]
        assert "split over tensor-parallel ranks" in found["gathered"]


def test_the_timeline_shows_collectives_inside_the_actions(tmp_path: Path) -> None:
    parameters = {**BASE, "partitions": 2}
    kwargs = {"parameters": parameters, "directory": str(tmp_path)}
    run_distributed("tests.tensor.runtime_cases:traced", 4, kwargs=kwargs)
    for rank in range(4):
        events = [e for e in json.loads((tmp_path / f"rank{rank}.json").read_text()) if e["ph"] == "X"]
        actions = [e for e in events if e["cat"] in ("forward", "backward")]
        sums = [e for e in events if e["name"] == "all_reduce over tp" and e["args"]["step"] == 1]
        peer = rank ^ 1
        assert all(e["args"]["ranks"] == sorted([rank, peer]) for e in sums)
        # Of each pair of layers one in forward and one in backward, for both microbatches.
        assert sum(e["args"]["elements"] == BATCH // 2 * WIDTH for e in sums) % 4 == 0
        inside = [
            e
            for e in sums
            if any(a["ts"] <= e["ts"] and e["ts"] + e["dur"] <= a["ts"] + a["dur"] + 1 for a in actions)
        ]
        assert len(inside) == len(sums) > 0


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_are_summed_over_ranks_add_up_over_steps(passes: int, as_views: bool) -> None:
    net = scaled(None)
    expected = []
    data = [batches(4, replica) for replica in range(2)]
    for step in range(4):
        for replica in range(2):
            x, y = data[replica][step]
            (F.cross_entropy(net(x), y) / 2).backward()
        expected.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    kwargs = {"parameters": {**BASE, "partitions": 1}, "passes": passes, "as_views": as_views}
    for found in run_distributed("tests.tensor.runtime_cases:accumulates", 4, kwargs=kwargs):
        assert len(found) == (4 if passes == 1 else 2)  # more than that is refused
        for step in range(passes - 1, len(found), passes):  # where they have been reduced
            for name, gradient in expected[step].items():
                torch.testing.assert_close(found[step][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_partial_checkpoint_goes_on(tmp_path: Path, partitions: int) -> None:
    kwargs = {"parameters": {**BASE, "partitions": partitions}, "path": str(tmp_path), "resumes": False}
    case = "tests.tensor.runtime_cases:partial_checkpoint"
    whole = run_distributed(case, 2 * partitions, kwargs=kwargs)
    resumed = run_distributed(case, 2 * partitions, kwargs={**kwargs, "resumes": True})
    assert [losses[2:] for losses in whole] == resumed


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hook", "blocks.0.up has hooks, which would see one rank's part"),
        ("from_dense", "the Linear has hooks, which would see one rank's part"),
        ("spectral norm", "blocks.0.up computes its weight from others"),
        ("own batches", "blocks.0.up is split over ranks that bring batches of their own"),
        ("penalty", "a number that the step function returns is"),
    ],
)
def test_a_part_never_passes_for_the_whole(kind: str, text: str) -> None:
    parameters = {**BASE, "partitions": 1, "prescaled_batch": kind != "own batches"}
    kwargs = {"parameters": parameters, "kind": kind}
    for told in run_distributed("tests.tensor.runtime_cases:other_numbers", 2, kwargs=kwargs):
        assert text in told
