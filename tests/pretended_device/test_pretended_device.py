"""The pretended device refuses what a real one refuses, and computes what the CPU computes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed


def on_device(function: str, *, devices: int = 1, **kwargs: Any) -> Any:
    return run_distributed(f"tests.pretended_device.cases:{function}", 1, kwargs=kwargs, devices=devices)[0]


@pytest.mark.ci
def test_mixing_devices_is_an_error() -> None:
    errors, right = on_device("mixed")
    for name in ("add", "reversed", "in place", "cat", "linear", "out", "foreach"):
        assert "same device" in errors[name], name
    assert "cannot be read from the host" in errors["address"]
    assert "can't convert" in errors["numpy"]
    assert "for generator but found 'cpu'" in errors["generator"]
    assert all(right), right


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "unet", "encoder_decoder"])
def test_a_model_is_equal_to_the_cpus(name: str) -> None:
    assert on_device("differences_of_case", name=name) == []


def test_copies_views_files_and_random_numbers() -> None:
    found = on_device("moves")
    assert all(found), found


def test_a_copy_into_pinned_memory_is_late() -> None:
    found = on_device("late_copies")
    assert all(found), found


def test_streams_beside_the_computing_one() -> None:
    right, errors = on_device("streams")
    assert all(right), right
    assert "has not waited" in errors["not waited"]
    assert "was freed" in errors["freed"]


def test_storages_give_memory_back() -> None:
    right, used, freed = on_device("storages")
    assert all(right), right
    assert "has no memory" in used
    assert "was freed" in freed


def test_graphs_run_again_on_the_same_memory() -> None:
    found = on_device("graphs")
    assert all(found), found


@pytest.mark.ci
def test_several_devices() -> None:
    names, mixed, third = on_device("several", devices=2)
    assert names == ["pretended:0", "pretended:1", "pretended:1", "1"]
    assert "pretended:0 and pretended:1" in mixed
    assert "invalid device ordinal" in third


def test_torch_knows_the_device() -> None:
    assert on_device("as_torch_knows_it", devices=2) == ("pretended:0", 2, True)
