"""Graphs of a (pretended) device in the place of a replayed step's segments: the same to the bit.

Such a graph runs the operations of its capture again, on the memory that they had; what was made in a capture
holds nonsense until the first replay. So what is left of a graph's memory outside of it, what is not copied
into it, and what Python would have done otherwise, shows in the numbers.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from smp_lite.errors import SMPError
from smp_lite.runtime.graphs.stage_graphs import GRAPHS_VARIABLE, are_wanted
from tests.harness import run_distributed
from tests.transparency.devices.graphs_on_device import CHANGES

OWN = "tests.transparency.devices.graphs_on_device"
MEMORY = {"partitions": 2, "pipeline": "interleaved"}
ZIGZAG = {"auto_partition": False, "default_partition": 0}


_ADDS_TO_OTHERS = frozenset({"reuse"})
"""Where segments add to gradients that others have begun, those run their Python."""


def run(
    function: str,
    ranks: int = 1,
    parameters: dict[str, Any] | None = None,
    /,
    *,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    return run_distributed(
        f"{OWN}:{function}",
        ranks,
        devices=1,
        parameters=parameters,
        kwargs=kwargs,
        timeout_s=120.0,
        fresh=fresh,
    )


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Losses, gradients with their strides, and parameters."""
    ours_and_theirs = [
        pair for key in ("gradients", "parameters") for pair in zip(found[key], expected[key], strict=True)
    ]
    return all(map(torch.equal, found["losses"], expected["losses"])) and all(
        ours[0] == theirs[0] and ours[2:] == theirs[2:] and torch.equal(ours[1], theirs[1])
        for ours, theirs in ours_and_theirs
    )


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("name", ["unet", "gpt", "gpt_tied", "attention_mask", "reuse", "complex64"])
def test_replayed_graphs_equal_their_python(name: str, pipeline: str) -> None:
    shape = {**MEMORY, "pipeline": pipeline}
    (expected,) = run("train_case", name=name, graphs=False, in_memory=shape)
    (found,) = run("train_case", name=name, graphs=True, in_memory=shape)
    assert same(found, expected)
    assert found["replayed"] >= 2 * 4 * 7, found[
        "said"
    ]  # in training and evaluation, of each stage and microbatch
    counts = [tuple(map(int, re.findall(r"(\d+) of (\d+) segments", text)[0])) for text in found["said"]]
    assert all(graphs >= 4 for graphs, _ in counts)  # of four microbatches and more
    assert all(graphs == of for graphs, of in counts) or name in _ADDS_TO_OTHERS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "ddp"), [("gpt_tied", 2, False), ("gpt", 4, True)])
def test_on_ranks(name: str, ranks: int, ddp: bool) -> None:
    parameters = {
        "partitions": 2,
        "microbatches": 4,
        "pipeline": "interleaved",
        "static_mode": True,
        "ddp": ddp,
        **ZIGZAG,
    }
    expected = run("train_case", ranks, parameters, name=name, graphs=False)
    found = run("train_case", ranks, parameters, name=name, graphs=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert same(ours, theirs)
        assert ours["replayed"] > 0


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_set_anew_between_steps_counts(what: str) -> None:
    (expected,) = run("train_changing", what=what, graphs=False)
    (found,) = run("train_changing", what=what, graphs=True)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    before, in_all = found[2:]
    assert before > 0
    assert (in_all > before) == (what != "hook")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("summing", "repeats its numbers"),
        ("on the host", "computes on another device (aten::arange)"),
        ("dropout", "draws random numbers"),
        ("batchnorm", "changes tensors in place"),
        ("writing", "changes tensors in place"),
        ("reading", "draws random numbers"),
        ("function", "Python code runs in its backward"),
        ("holding", "holds a tensor that is neither parameter nor buffer"),
        ("holding in a list", "holds a tensor that is neither parameter nor buffer"),
        ("place", "looks at more of a tensor than its numbers (storage_offset)"),
    ],
)
def test_what_is_no_graph_runs_as_it_is_and_is_named(kind: str, reason: str) -> None:
    ((is_same, said, replayed),) = run("reasons", kind=kind)
    assert is_same
    assert any(reason in line for line in said), said
    assert (replayed > 0) == (kind != "function")  # the other stage's


@pytest.mark.ci
def test_a_stage_without_graphs_says_why() -> None:
    for parameters, reason in [
        ({"pipeline": "zero_bubble"}, "gradients of weights may come in actions of their own"),
        ({"offload_activations": True}, "activations are offloaded"),
    ]:
        (found,) = run("train_case", name="gpt", graphs=True, in_memory={**MEMORY, **parameters})
        assert found["replayed"] == 0
        assert all(reason in text for text in found["said"]), found["said"]


@pytest.mark.ci
def test_a_capture_that_the_device_gives_up_ends_the_step_by_name() -> None:
    (errors,) = run("given_up", fresh=True)  # such a process is of no use any more
    assert errors[:2] == ["", ""]
    assert "has given up the capture of a graph" in errors[2]
    assert "start the job again without SMP_LITE_CUDA_GRAPHS=1" in errors[2]


def test_captures_have_parameters_of_their_own() -> None:
    """Autograd's node of a parameter belongs to the stream that it was made on."""
    for told in run("stood_in")[0]:
        assert all(told), told


def test_nobody_watches_the_device_while_it_captures() -> None:
    (((before, within, after), error),) = run("watched_while_capturing")
    assert error == ""
    assert 0 < before == within < after


def test_the_variable_is_0_or_1() -> None:
    assert [are_wanted({}), are_wanted({GRAPHS_VARIABLE: "0"}), are_wanted({GRAPHS_VARIABLE: "1"})] == [
        False,
        False,
        True,
    ]
    with pytest.raises(SMPError, match="SMP_LITE_CUDA_GRAPHS='yes': it must be 0 or 1"):
        are_wanted({GRAPHS_VARIABLE: "yes"})
