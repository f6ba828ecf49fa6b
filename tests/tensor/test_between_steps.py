"""Between steps, in hooks and closures: the numbers of one process, or an error that names the refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.tensor import between_cases
from tests.tensor.runtime_cases import batches
from tests.tensor.sdp_cases import config

CASES = "tests.tensor.between_cases"
PIECES = config(2)
CLIPPED = config(2, sdp_gradient_clipping=0.3)
OF_STATE = {"partitions": 1, "ddp": True, "shard_optimizer_state": True}
STAGES = {"pipeline_parallel_degree": 2}


def ranks(parameters: dict[str, Any], what: str, *, num_ranks: int = 2, **more: Any) -> list[Any]:
    return run_distributed(
        f"{CASES}:ranks", num_ranks, kwargs={"parameters": parameters, "what": what, **more}
    )


def check_as_in_one_process(found: list[Any], what: str, clip: float | None = None) -> None:
    expected = between_cases.plain(2, what, clip)
    for rank in found:
        assert not isinstance(rank, str), rank
        losses = [sum(each) / len(each) for each in zip(*rank["losses"], strict=True)]
        assert losses == pytest.approx(expected["losses"], rel=1e-4)
        if "data" not in what:  # the losses of each replica
            assert rank["said"] == pytest.approx(expected["said"], rel=1e-4)
        torch.testing.assert_close(rank["state"], expected["state"], rtol=1e-4, atol=1e-5)


EQUAL: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "count": [("pieces", PIECES)],
    "by dimensions": [("pieces", PIECES), ("stages", {**PIECES, **STAGES})],
    "by shape": [("pieces", PIECES)],
    "a buffer like it": [("pieces", PIECES)],
    "kept gradients": [("pieces", PIECES), ("stages", {**PIECES, **STAGES})],
    "other data, kept": [("pieces", PIECES)],
    "other data, for a while": [("pieces", PIECES)],
    "state: by element": [("pieces", PIECES), ("state", OF_STATE)],
    "hook before": [("state", OF_STATE), ("stages", {**OF_STATE, "partitions": 2})],
    "hook after": [("state", OF_STATE), ("stages", {**OF_STATE, "partitions": 2})],
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("what", "parameters"),
    [
        pytest.param(what, parameters, id=f"{what}, {name}")
        for what, several in EQUAL.items()
        for name, parameters in several
    ],
)
def test_a_script_does_what_it_does_in_one_process(what: str, parameters: dict[str, Any]) -> None:
    stages = parameters.get("pipeline_parallel_degree", parameters.get("partitions"))
    check_as_in_one_process(ranks(parameters, what, num_ranks=2 * stages), what)


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize(
    "what", ["several optimizers", "an optimizer of some", "an optimizer around one", "one"]
)
@pytest.mark.parametrize("partitions", [1, 2])
def test_clipping_is_of_the_whole_model_whoever_steps(what: str, partitions: int) -> None:
    parameters = {**CLIPPED, "pipeline_parallel_degree": partitions}
    check_as_in_one_process(ranks(parameters, what, num_ranks=2 * partitions), what, 0.3)


def test_several_optimizers_of_masters_are_not_clipped_apart() -> None:
    for text in ranks({**CLIPPED, "bf16": True}, "several optimizers"):
        assert "this optimizer does not have of 'two' and 4 others" in text, text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hook before": (PIECES, "norm of a sharded parameter"),
    "hook after": (PIECES, "norm of a sharded parameter"),
    "a norm in a closure": (PIECES, "norm of a sharded parameter"),
    "noise by shape": (PIECES, r"add_ of a piece .* of \[.*the other is of shape"),
    "a buffer by shape": (PIECES, r"add_ of a piece .* of \[.*the other is of shape"),
    "an early copy": (
        PIECES,
        r"add_ of a piece .* holds \[5\] of \[2, 5\], and the other is of shape \[2, 5\]",
    ),
    "a row": (PIECES, r"mul_ of a piece .* holds \[5\] of \[2, 5\], and the other is of shape \[5\]"),
    "state: a norm": (PIECES, "norm of a sharded parameter"),
    "state: a rate": (PIECES, "max of a sharded parameter"),
}


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "torch's own"])
def test_what_one_piece_would_pass_for_the_whole_in_is_refused(what: str, wrapped: bool) -> None:
    parameters, pattern = REFUSED[what]
    for text in ranks(parameters, what, wrapped=wrapped):
        assert isinstance(text, str) and re.search(pattern, text), text


@pytest.mark.parametrize(
    ("what", "function"), [("state: a norm", "norm"), ("state: a rate", "max")], ids=["norm", "rate"]
)
def test_state_in_pieces_is_guarded_where_parameters_are_whole(what: str, function: str) -> None:
    for text in ranks(OF_STATE, what):
        assert isinstance(text, str) and f"{function} of a sharded parameter" in text, text


def test_an_optimizer_that_does_not_clip_is_refused() -> None:
    for text in ranks(CLIPPED, "one", wrapped=False):
        assert "sdp_gradient_clipping: 0.3 asks for it" in text, text


def test_what_is_no_piece_does_not_go_with_pieces() -> None:
    for told in run_distributed(f"{CASES}:forbidden", 2, kwargs={"parameters": PIECES}):
        assert not [name for name, text in told.items() if "of a sharded parameter" not in text], told


@pytest.mark.parametrize(
    "parameters",
    [
        {"partitions": 1, "ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True},
        {"partitions": 2},
    ],
    ids=["split", "stages"],
)
def test_norms_of_copied_gradients_of_a_part_are_refused(parameters: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = between_cases.Square()
    x, y = batches(1)[0]
    torch.nn.functional.cross_entropy(net(x), y).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
    weights = torch.nn.utils.get_total_norm(list(net.parameters())).item()
    for told in run_distributed(f"{CASES}:norms_of_copies", 2, kwargs={"parameters": parameters}):
        assert told["own"] == pytest.approx(norm) and told["another's"] == pytest.approx(norm)
        assert told["another's weights"] == pytest.approx(weights)
        for name in ("leaves'", "some leaves'", "of one shape", "of fewer shapes"):
            assert isinstance(told[name], float), told
        for name in ("divided", "copied", "converted", "its own among them"):
            assert "smp.clip_grad_norm_" in str(told[name]), told
            assert "something that only has their shapes" in str(told[name])


@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("in_closure", [True, False], ids=["closure", "step"])
def test_a_step_that_fails_leaves_pieces_guarded(fails_at: int, in_closure: bool) -> None:
    kwargs = {"parameters": PIECES, "fails_at": fails_at, "in_closure": in_closure}
    for told in run_distributed(f"{CASES}:guarded_after_errors", 2, kwargs=kwargs):
        expected = ["stepped, guarded"] * 3 + ["torch's own again"]
        expected[fails_at - 1] = "failed, guarded"
        assert told == expected


@pytest.mark.parametrize(
    ("what", "parameters", "text"),
    [
        ("added", OF_STATE, "'out.weight' has come to the optimizer"),
        ("untied", PIECES, "'head.weight' is a new parameter that was made from a piece"),
    ],
    ids=["added", "untied"],
)
def test_a_parameter_that_comes_too_late_is_named(what: str, parameters: dict[str, Any], text: str) -> None:
    kwargs = {"parameters": parameters, "what": what}
    for told in run_distributed(f"{CASES}:said_of_parameters", 2, kwargs=kwargs):
        assert text in told, told
