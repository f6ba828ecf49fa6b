"""The same comparisons with every rank on a (pretended) device: to the bit as plain torch there.

Such a device refuses an operation on tensors of several devices, so what the library leaves in the wrong
place fails; and copies into pinned memory come late, so what does not wait for them reads nonsense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_distributed
from tests.models import CASES
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.training import scaling
from tests.transparency.training.norms import MANUAL

# On a device torch has another kernel for LSTM; a loss is made on the CPU; autocast is the CPU's.
NOT_OF_A_DEVICE = {"lstm", "step_loss", "autocast_part"}
NAMES = [
    name
    for name, case in CASES.items()
    if case.available and not case.random_in_blocks and name not in NOT_OF_A_DEVICE
]
ZIGZAG = {"auto_partition": False, "default_partition": 0}
OWN = "tests.transparency.devices.on_device"


def run(function: str, ranks: int = 2, *, devices: int = 1, **options: Any) -> list[Any]:
    """As `run_distributed`; a function without a module is one of `on_device`."""
    function = function if ":" in function else f"{OWN}:{function}"
    return run_distributed(function, ranks, devices=devices, timeout_s=120.0, **options)


def check(name: str, ranks: int, placement: str = "zigzag", wire: str = "mpi", **config: Any) -> None:
    config = {"partitions": ranks, "microbatches": NUM_MICROBATCHES, **config}
    config |= ZIGZAG if placement == "zigzag" else {}
    found = run(
        "tests.transparency.ranks:compare_case",
        ranks,
        kwargs={"name": name, "placement": placement, "wire": wire},
        parameters=config,
    )
    assert [wrong for wrong, _ in found] == [[]] * ranks


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_in_memory(name: str) -> None:
    config = {"partitions": 2, "pipeline": "interleaved", **ZIGZAG}
    assert run("train_in_memory", 1, kwargs={"name": name, "config": config}) == [[]]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(name: str) -> None:
    check(name, 2, pipeline="interleaved")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["gpt_tied", "unet"])
def test_zero_bubble(name: str) -> None:
    check(name, 2, pipeline="zero_bubble")


@pytest.mark.pretended
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_tied", "data_loop", "complex64"])
def test_ranks_whose_devices_have_other_numbers(name: str) -> None:
    """Without backwards, which the pretended device has on its first number only."""
    config = {"partitions": 2, "microbatches": NUM_MICROBATCHES, **ZIGZAG}
    for wrong, device in run("evaluate", kwargs={"name": name}, parameters=config, devices=2):
        assert (wrong, device[:-1]) == ([], "pretended:")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_tied", "encoder_decoder", "reuse"])
@pytest.mark.parametrize(("placement", "pipeline"), [("auto", "simple"), ("zigzag", "zero_bubble")])
def test_four_ranks(name: str, placement: str, pipeline: str) -> None:
    check(name, 4, placement, pipeline=pipeline)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["gpt_tied", "complex64", "data_loop"])
def test_over_process_groups(name: str) -> None:
    check(name, 2, wire="c10d", ddp=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "batchnorm", "unused", "data_branch", "complex64"])
@pytest.mark.parametrize("how", [{"ddp": True}, {"horovod": True}], ids=["ddp", "horovod"])
def test_replicas(name: str, how: dict[str, Any]) -> None:
    config = {"partitions": 2, "microbatches": NUM_MICROBATCHES, **how}
    found = run("tests.transparency.ranks:compare_replicas", 4, kwargs={"name": name}, parameters=config)
    assert [wrong for _, wrong, _ in found] == [[]] * 4


@pytest.mark.slow
def test_replicas_over_process_groups_with_views_of_buckets() -> None:
    kwargs = {"name": "gpt", "wire": "c10d", "gradient_as_bucket_view": True, "bucket_cap_mb": 0.002}
    config = {"partitions": 2, "microbatches": NUM_MICROBATCHES, "ddp": True}
    found = run("tests.transparency.ranks:compare_replicas", 4, kwargs=kwargs, parameters=config)
    assert [wrong for _, wrong, _ in found] == [[]] * 4


@pytest.mark.slow
def test_activation_checkpointing_and_virtual_stages() -> None:
    shapes = [
        {"virtual_stages": 2, "checkpointed": True},
        {"virtual_stages": "v", "pipeline": "zero_bubble_v"},
    ]
    for name in ("tied", "dropout in blocks"):
        kwargs = {"name": name, "all_parameters": [{"partitions": 2, **shape} for shape in shapes]}
        for rank in run("tests.transparency.schedules.virtual_stages:train", kwargs=kwargs):
            assert [wrong for wrong, _ in rank] == [[], []], name


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["dropout", "both"])
def test_random_numbers(name: str) -> None:
    """They are the same whoever runs the blocks; those of the device are a stream of their own."""
    function = "tests.transparency.values.test_random_numbers:drawn_losses_on_ranks"
    config = {"partitions": 2, "microbatches": NUM_MICROBATCHES, **ZIGZAG}
    found = run(function, kwargs={"name": name}, parameters={**config, "pipeline": "simple"})
    again = run(function, kwargs={"name": name}, parameters={**config, "pipeline": "interleaved"})
    assert found == again
    assert found[0] == found[1]
    assert len({loss for step in found[0] for loss in step}) > 1


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("variant", ["torch's scaler", "unscaled and clipped first"])
def test_gradient_scaler(variant: str) -> None:
    parameters = {"partitions": 2, "microbatches": NUM_MICROBATCHES, **MANUAL}
    function = "tests.transparency.training.scaling:compare_on_ranks"
    assert run(function, kwargs=scaling.VARIANTS[variant], parameters=parameters) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
def test_delayed_initialization_and_tensor_parallel_layers(layout: str) -> None:
    """A model that gets its memory late is that of the CPU's generator, and on the device."""
    size, parameters = {
        "pipeline": (2, {"partitions": 2, "microbatches": 2, "ddp": True}),
        "tensor": (2, {"partitions": 1, "tensor_parallel_degree": 2, "microbatches": 2, "ddp": True}),
    }[layout]
    runs = [
        run(
            "tests.deferred.cases:train",
            size,
            kwargs={"parameters": parameters, "delay": delay, "kind": "gpt2"},
        )
        for delay in (False, True)
    ]
    for plain, delayed in zip(*runs, strict=True):
        assert plain["losses"] == delayed["losses"]
        assert plain["state"].keys() == delayed["state"].keys()
        assert all(torch.equal(value, delayed["state"][key]) for key, value in plain["state"].items())
        assert delayed["left"] == 0


# The decision -----------------------------------------------------------------------------------------------

TWO = {"partitions": 2, "microbatches": 2}


@pytest.mark.pretended
@pytest.mark.parametrize(
    ("devices", "variable", "expected"),
    [
        (2, None, ["pretended:0", "pretended:1"]),
        (1, None, ["pretended:0", "pretended:0"]),
        (2, "pretended", ["pretended:0", "pretended:1"]),
        (2, "pretended:1", ["pretended:1", "pretended:1"]),
        (2, "cpu", ["cpu", "cpu"]),
    ],
)
def test_each_rank_has_a_device(devices: int, variable: str | None, expected: list[str]) -> None:
    found = run("devices_of", kwargs={"variable": variable}, parameters=TWO, devices=devices)
    assert [device for device, _, _ in found] == expected
    if variable != "cpu":
        assert [f"pretended:{current}" for _, current, _ in found] == expected


@pytest.mark.pretended
@pytest.mark.parametrize("variable", ["cuda", "pretended:2", "nonsense", ""])
def test_a_device_that_is_not_there_is_refused(variable: str) -> None:
    for _, _, error in run("devices_of", kwargs={"variable": variable}, parameters=TWO, devices=2):
        assert f"SMP_LITE_DEVICE={variable!r}" in error
        assert "2 device(s) of type 'pretended'" in error
        assert "'cpu'" in error


def test_what_another_rank_describes_is_on_this_ranks_device() -> None:
    for found, ours in run("form_of_another_rank", parameters=TWO, devices=2):
        assert found == ours


@pytest.mark.ci
@pytest.mark.pretended
def test_a_script_that_names_another_device_is_told_so() -> None:
    (same,) = run("named_device", 1, kwargs={"number": 0}, parameters={"partitions": 1}, devices=2)
    assert same == "nothing was raised"
    (other,) = run("named_device", 1, kwargs={"number": 1}, parameters={"partitions": 1}, devices=2)
    assert "current device to pretended:1" in other
    assert "this rank's is pretended:0" in other
    assert "SMP_LITE_DEVICE" in other


# Placement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "meta", "device"])
def test_all_that_a_rank_holds_is_on_its_device(where: str) -> None:
    assert run("places", kwargs={"where": where}, parameters=TWO) == [[], []]


@pytest.mark.parametrize("before", [True, False])
def test_the_device_never_holds_more_than_the_part_and_a_module(before: bool) -> None:
    for most, own, layer in run("peak", kwargs={"optimizer_made_before": before}, parameters=TWO):
        assert own <= most <= own + layer + 4 * 64 * 4  # and the batch


def test_inputs_are_on_the_device() -> None:
    for seen in run("inputs", parameters=TWO):
        assert seen["devices"] == seen["expected"]
        assert seen["kept"] == "cpu"


@pytest.mark.ci
def test_states_go_out_and_come_back(tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": NUM_MICROBATCHES}
    for right in run("states", kwargs={"folder": str(tmp_path)}, parameters=config):
        assert all(right), right


def test_a_plain_loop_over_one_partition() -> None:
    config = {"partitions": 1, "microbatches": 1, "ddp": True}
    assert run("outside", parameters=config) == [[], []]


@pytest.mark.parametrize(
    "parameters",
    [
        {"partitions": 2},
        {"partitions": 1, "ddp": True},
        {"partitions": 1, "ddp": True, "shard_optimizer_state": True},
    ],
)
def test_torchs_default_device_may_be_the_device(parameters: dict[str, Any], tmp_path: Path) -> None:
    """The library's own tensors of the host stay there."""
    parameters = {"microbatches": NUM_MICROBATCHES, **parameters}
    found = run("default_device", 2, parameters=parameters, kwargs={"folder": str(tmp_path)})
    assert found == [[], []]
