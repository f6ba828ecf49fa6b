"""Plain loops over a model in one partition come to what one process computes on the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor.outside_cases import DP, TP, WAYS, dense, mixed_dense, summed_dense

pytestmark = pytest.mark.sampled(3)

CASES = "tests.tensor.outside_cases"
OWN = {**TP, "prescaled_batch": False, "optimize": "memory"}


def check(
    model: str,
    way: str,
    world_size: int,
    parameters: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> list[dict[str, Any]]:
    kwargs = {
        "model_name": model,
        "way": way,
        "parameters": parameters,
        "dtype": dtype,
        "options": options,
    }
    found = run_distributed(f"{CASES}:train", world_size, kwargs=kwargs)
    expected = dense(model, way, 1 + max(rank["replica"] for rank in found), dtype)
    near = {"rtol": 1e-9, "atol": 1e-11} if dtype is torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"][rank["replica"]], rel=near["rtol"])
        # Of transformers' models the new modules have more parameters, in another order.
        for kind in ("state", "gradients", *(["moments"] if not model.startswith("hf") else [])):
            assert rank[kind].keys() == expected[kind].keys()
            for name, tensor in rank[kind].items():
                torch.testing.assert_close(tensor, expected[kind][name], **near, msg=f"{kind} of {name}")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_replicas(way: str) -> None:
    found = check("linears", way, 2, DP, bucket_cap_mb=1e-5)
    assert all(rank["overlapped"] > 0 for rank in found)


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"overlapping_allreduce": False}])
def test_options_of_reduction(options: dict[str, Any]) -> None:
    check("linears", "accumulated", 2, DP, **options)


@pytest.mark.parametrize("model", ["linears", "transformer"])
@pytest.mark.parametrize("parameters", [TP, OWN], ids=["one batch", "own batches"])
def test_tensor_parallelism(model: str, parameters: dict[str, Any]) -> None:
    check(model, "accumulated", 2, parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "parameters"), [("one forward", TP), ("accumulated", OWN), ("two forwards", OWN)]
)
def test_tensor_parallelism_with_replicas(way: str, parameters: dict[str, Any]) -> None:
    check("transformer", way, 4, parameters)


@pytest.mark.ci
def test_a_model_of_transformers() -> None:
    check("hf gpt2", "accumulated", 2, TP, torch.float32)


@pytest.mark.ci
def test_one_process() -> None:
    check("linears", "accumulated", 1, DP)


def test_bits_of_two_replicas() -> None:
    """Of two summands the order does not matter."""
    kwargs = {"model_name": "linears", "way": "two forwards", "parameters": DP, "dtype": torch.float32}
    found = run_distributed(f"{CASES}:train", 2, kwargs=kwargs)
    expected = dense("linears", "two forwards", 2, torch.float32)
    for rank in found:
        assert rank["losses"] == expected["losses"][rank["replica"]]
        for name, tensor in rank["state"].items():
            assert torch.equal(tensor, expected["state"][name]), name


def test_buffers_and_unused_parameters() -> None:
    kwargs = {"model_name": "buffers", "way": "accumulated", "parameters": DP}
    one, other = run_distributed(f"{CASES}:train", 2, kwargs=kwargs)
    assert one["state"].keys() == other["state"].keys() and "unused" not in one["gradients"]
    for name, tensor in one["state"].items():
        assert torch.equal(tensor, other["state"][name]), name
    assert one["state"]["norm.num_batches_tracked"] == 6


@pytest.mark.parametrize("parameters", [DP, TP, OWN], ids=["replicas", "one batch", "own batches"])
def test_together_with_steps(parameters: dict[str, Any]) -> None:
    found = run_distributed(f"{CASES}:mixed", 2, kwargs={"parameters": parameters})
    expected = mixed_dense(1 if parameters.get("prescaled_batch") else 2)
    for rank in found:
        for kind, tensors in expected.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(rank[kind][name], tensor, rtol=1e-9, atol=1e-11)


def test_in_every_second_backward() -> None:
    one, other = run_distributed(f"{CASES}:passes", 2)
    expected = summed_dense(2)
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(mine, theirs) == bool(number % 2)
        if number % 2:
            torch.testing.assert_close(mine, expected[number])


@pytest.mark.parametrize("prescaled", [True, False])
def test_dropout_is_alike_on_the_ranks_of_a_stage(prescaled: bool) -> None:
    """What the ranks hold alike inside of blocks, though their generators are in other states."""
    one, other = run_distributed(f"{CASES}:dropped", 2, kwargs={"prescaled": prescaled})
    assert len(one) == 4  # two calls, and a step of two microbatches
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(one[0], one[1])


def test_evaluation_waits_for_nobody() -> None:
    assert run_distributed(f"{CASES}:alone", 2) == [True, True]


# Errors -----------------------------------------------------------------------------------------------------


def test_a_rank_that_makes_one_backward_less() -> None:
    for said, after, left in run_distributed(f"{CASES}:one_backward_less", 2):
        assert "rank 0 has changed its parameters since its last backward and rank 1 has not" in said
        assert said.startswith("SMPMismatch") and not left
        assert "is not the same on rank 1 as on rank 0" in after  # one optimizer has stepped


@pytest.mark.slow
def test_a_rank_that_makes_none() -> None:
    said, _ = run_distributed(f"{CASES}:none_at_all", 2, fresh=True)
    assert said.startswith("SMPTimeout")
    assert "the end of a backward outside smp.step" in said and "rank(s) 1 did not call it" in said


@pytest.mark.parametrize("then", ["optimizer", "step", "backward"])
def test_a_backward_that_fails_on_one_rank(then: str) -> None:
    (one, *first), (other, *second) = run_distributed(f"{CASES}:failed_backward", 2, kwargs={"then": then})
    assert "a backward outside smp.step failed on rank 1" in one
    assert other == "KeyError: 'mine'"
    for stays, norm, expected in (first, second):
        assert all(stays)
        assert norm == pytest.approx(expected, rel=1e-5)


def test_what_is_refused() -> None:
    for found in run_distributed(f"{CASES}:refused", 2):
        assert not found["frozen later"] and not found["autograd.grad"]
        assert "backward(create_graph=True) with replicas" in found["graph of gradients"]
        assert "was called inside a backward outside smp.step" in found["optimizer in a hook"]
        assert "a hook changed a parameter" in found["changed in a hook"]
        assert "came in two parts in one backward" in found["in two parts"]
    for plain, in_step in run_distributed(f"{CASES}:frozen_first", 2):
        assert "'up.weight' was frozen when the model was wrapped" in plain
        assert "'up.weight' was frozen when reductions were set up" in in_step


def test_ranks_of_a_stage_that_call_with_other_things() -> None:
    one, other = run_distributed(f"{CASES}:tensor_ranks", 2)
    for found in (one, other):
        for kind in ("shape", "mode", "graph"):
            assert "other shapes, types or modes on rank 1 than on rank 0" in found[kind], kind
        assert "with other numbers on rank 1 than on rank 0" in found["numbers"]
        assert not found["fine"] and found["calls"] > 0
    assert one["random"] == other["random"]


# Replicas that would drift apart ----------------------------------------------------------------------------


def test_parameters_that_are_new() -> None:
    for called, backward, frozen, between, again in run_distributed(f"{CASES}:new_parameters", 2):
        for said in (called, backward):
            assert "the parameter 'norm.bias' was put into the model after it was wrapped" in said
        assert "the parameter 'added.weight' was put into the model after it was wrapped" in between
        assert not frozen and not again


@pytest.mark.parametrize("parameters", [DP, OWN], ids=["replicas", "own batches"])
def test_gradients_that_no_backward_has_reduced(parameters: dict[str, Any]) -> None:
    for found in run_distributed(f"{CASES}:own_gradients", 2, kwargs={"parameters": parameters}):
        for kind in ("assigned", "in a closure", "copied"):
            assert "is not what the last backward left there" in found[kind], kind
            assert "SGD.step(): the gradient of '" in found[kind], kind
        assert not found["in place"] and not found["twice"]
        # Of what is split nobody can tell.
        assert bool(found["scaled"]) == (parameters is OWN)


def test_parameters_of_no_wrapped_model() -> None:
    for found in run_distributed(f"{CASES}:outside_parameters", 2):
        assert "of shape (1, 12), is in no wrapped model" in found["criterion"]
        assert "into the module that is wrapped" in found["criterion"] and not found["copies"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_one_rank_clears(set_to_none: bool) -> None:
    kwargs = {"set_to_none": set_to_none}
    for said, again in run_distributed(f"{CASES}:cleared_on_one", 2, kwargs=kwargs):
        assert "had a gradient on rank 1 and none on rank 0" in said and not again


@pytest.mark.parametrize(("passes", "name"), [(1, "up.weight"), (5, "norm.weight"), (99, "up.weight")])
def test_parameters_that_differ_between_replicas(passes: int, name: str) -> None:
    """All of them are compared in the first passes and in every hundredth, small ones in every one."""
    for said in run_distributed(f"{CASES}:drifted", 2, kwargs={"passes": passes, "name": name}):
        assert f"the parameter {name!r} is not the same on rank 1 as on rank 0" in said


def test_no_sync() -> None:
    for said, has in run_distributed(f"{CASES}:without_no_sync", 2):
        assert "DistributedModel has no no_sync(): leave it out" in said and not has


def test_a_norm_of_the_gradients_of_one_rank() -> None:
    for said in run_distributed(f"{CASES}:norm_by_hand", 2):
        assert "norm of a parameter of a split layer, or of its gradient" in said
