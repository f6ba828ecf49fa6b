"""Code that takes a part of a parameter for the whole is refused; ranks with own batches stay together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed
from tests.tensor.smp_api.test_modules import parameters_of

CASES = "tests.tensor.smp_api.split_reads_cases"

REFUSED = {
    "a penalty": "pow of the parameter 'up.weight'",
    "a penalty of some": "norm of the parameter 'up.weight'",
    "a list of weights": "stack of the parameter 'up.weight'",
    "detached": "detach of the parameter 'up.weight'",
    "its data": "data of the parameter 'up.weight'",
    "without gradients": "mul of the parameter 'up.weight'",
    "a size in the step": "numel of the parameter 'up.weight'",
    "a shape in the forward": "shape of the parameter 'up.weight'",
    "its state in the forward": "detach of the parameter 'up.weight'",
    "its bytes in the forward": "nbytes of the parameter 'up.weight'",
    "a gradient by torch.func": "pow of the parameter 'up.weight'",
    "a weight of another layer": "linear of the parameter 'up.weight'",
}


@pytest.mark.ci
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("prescaled", [True, False])
def test_reads_of_split_parameters_are_refused(prescaled: bool, partitions: int) -> None:
    parameters = parameters_of(2, prescaled, "memory", partitions)
    # Over stages the model is traced first, where shapes that do not fit are torch's own error, and
    # torch.func finds values of another stage.
    elsewhere = ("a weight of another layer", "a gradient by torch.func")
    names = [name for name in REFUSED if partitions == 1 or name not in elsewhere]
    kwargs: dict[str, Any] = {"parameters": parameters, "names": names}
    for told in run_distributed(f"{CASES}:refused", 2 * partitions, kwargs=kwargs):
        for name, text in told.items():
            assert REFUSED[name] in text and "split_reads_cases.py:" in text, (name, text)


@pytest.mark.ci
@pytest.mark.parametrize("prescaled", [True, False])
def test_so_are_those_of_forwards_in_plain_loops(prescaled: bool) -> None:
    names = [name for name in REFUSED if "forward" in name or "another" in name or "func" in name]
    kwargs: dict[str, Any] = {"parameters": parameters_of(2, prescaled, "memory"), "names": names}
    for told in run_distributed(f"{CASES}:refused_in_a_plain_loop", 2, kwargs=kwargs):
        for name, text in told.items():
            assert REFUSED[name] in text and "in a module's forward" in text, (name, text)


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_is_right_on_parts_runs(partitions: int) -> None:
    kwargs = {"parameters": parameters_of(2, True, "memory", partitions)}
    found = run_distributed(f"{CASES}:right_on_parts", 2 * partitions, kwargs=kwargs)
    assert found == ["ran"] * len(found)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_ranks_with_their_own_batches_must_be_in_the_same_layer(optimize: str) -> None:
    for told in run_distributed(
        f"{CASES}:apart", 2, kwargs={"parameters": parameters_of(2, False, optimize)}
    ):
        branched, shortened, alike = told
        assert "SMPMismatch" in branched and "in another split layer with one of shape [2, 6, 8]" in branched
        assert "is in embed (DistributedEmbedding) with an input of shape" in shortened
        assert alike == "ran"


def test_parts_of_an_unwrapped_module_are_not_saved_unsaid() -> None:
    for unwrapped, whole in run_distributed(
        f"{CASES}:saved", 2, kwargs={"parameters": parameters_of(2, True, "memory")}
    ):
        assert any("one rank's part of up.weight" in text for text in unwrapped) and whole == []
