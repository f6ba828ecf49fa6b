"""Every name of SMP v1 is there, and is what the table says it is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from smp_lite.smp_v1.names import NAMES, find, under


def found(path: str) -> Any:
    """What a path below ``smp`` leads to; attributes of instances are looked up on one."""
    value: Any = smp
    for part in path.split("."):
        value = getattr(value, part)
    return value


def instances() -> dict[str, Any]:
    smp.init_in_memory({"partitions": 2})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    return {
        "DistributedModel": model,
        "DistributedOptimizer": smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
        "StepOutput": smp.StepOutput([torch.ones(1)]),
    }


OF_INSTANCES = [
    path for path in NAMES if path.split(".")[0] in ("DistributedModel", "DistributedOptimizer", "StepOutput")
]
ELSEWHERE = [path for path in NAMES if path not in OF_INSTANCES and not path.startswith("test.")]


@pytest.mark.parametrize("path", [path for path in ELSEWHERE if NAMES[path].status != "refused"])
def test_a_name_that_runs_is_there(path: str) -> None:
    smp.init_in_memory({"partitions": 1})
    assert found(path) is not None


@pytest.mark.parametrize("path", [path for path in ELSEWHERE if NAMES[path].status == "refused"])
def test_a_missing_name_imports_and_refuses_when_it_is_used(path: str) -> None:
    smp.init_in_memory({"partitions": 1})
    name = NAMES[path]
    if name.kind == "attribute":
        with pytest.raises(smp.SMPError, match=f"{path} belongs to .*not supported yet"):
            found(path)
        owner, _, attribute = path.rpartition(".")
        assert not hasattr(found(owner), attribute)
        return
    value = found(path)
    assert value is found(path)
    assert inspect.isclass(value) == (name.kind == "class")
    with pytest.raises(smp.SMPError) as raised:
        value(1, key=2)
    assert str(raised.value) == f"smp.{path} belongs to {name.says}"
    if name.kind == "class":
        assert not isinstance(nn.Linear(1, 1), value)
        with pytest.raises(smp.SMPError):
            type("Derived", (value,), {})()


@pytest.mark.parametrize("path", [path for path in OF_INSTANCES if "." in path])
def test_methods_are_there_or_refuse(path: str) -> None:
    owner, attribute = path.split(".")
    instance = instances()[owner]
    name = NAMES[path]
    if "sharded_data_parallel_degree" in name.says:
        with pytest.raises(smp.SMPError, match="sharded_data_parallel_degree above 1"):
            getattr(instance, attribute)
    elif name.says == "with fp16: True":
        with pytest.raises(smp.SMPError, match="belongs to fp16: True in the parameters"):
            getattr(instance, attribute)
    elif name.status == "runs":
        getattr(instance, attribute)
    elif name.kind == "attribute":
        assert not hasattr(instance, attribute)
        with pytest.raises(smp.SMPError, match="not supported yet"):
            getattr(instance, attribute)
    else:
        with pytest.raises(smp.SMPError), _entered(getattr(instance, attribute)()):
            pass


def _entered(value: Any) -> Any:
    return value


def test_nothing_public_is_missing_in_the_table() -> None:
    own = {"SMPError", "SMPMismatch", "SMPTimeout", "amp", "clip_grad_norm_", "gathered", "init_in_memory"}
    own |= {"batches", "parallelize", "progress", "reset", "set_watchdog", "should_stop"}  # our own
    assert set(smp.__all__) - own <= NAMES.keys()


def test_a_name_that_nobody_knows_is_an_attribute_error() -> None:
    for owner in (smp, smp.nn, smp.patches, smp.nn.huggingface, smp.nn.huggingface.gpt2):
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = owner.no_such_name


def test_paths_are_found_by_what_they_begin_with() -> None:
    assert find("state.cfg.fp16") is NAMES["state.cfg"]
    assert find("nn.huggingface.gpt2") is None
    assert find("nonsense") is None
    assert set(under("patches.checkpoint")) == {"checkpoint", "checkpoint_sequential"}


# What means something without tensor parallelism ----------------------------------------------------------


def test_model_creation_sets_the_dtype_inside_alone() -> None:
    with smp.model_creation(
        tensor_parallelism=False, dtype=torch.float64, fused_softmax=True, zero_init=True
    ):
        assert nn.Linear(1, 1).weight.dtype is torch.float64
    assert nn.Linear(1, 1).weight.dtype is torch.float32
    with pytest.raises(RuntimeError, match="inside"), smp.model_creation(dtype=torch.bfloat16):
        raise RuntimeError("inside")
    assert torch.get_default_dtype() is torch.float32


def test_tensor_parallelism_at_degree_one_replaces_too() -> None:
    smp.init_in_memory({"partitions": 1})
    with smp.model_creation(tensor_parallelism=True, fused_softmax=False):
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with smp.tensor_parallelism():
        net.append(nn.Linear(2, 2))
    smp.set_tensor_parallelism(net[2], False)
    model = smp.DistributedModel(net)
    assert [type(module) for module in model.get_module()] == [smp.nn.DistributedLinear, nn.ReLU, nn.Linear]


def test_what_switches_it_off_passes() -> None:
    with smp.tensor_parallelism(enabled=False), smp.delay_param_initialization(enabled=False):
        smp.set_tensor_parallelism(nn.Linear(1, 1), False)


def test_an_option_that_nobody_knows_is_said() -> None:
    is_said = pytest.warns(UserWarning, match="'fused_sofmax'; did you mean 'fused_softmax'")
    with is_said, smp.model_creation(fused_sofmax=True):
        pass


def test_a_dtype_is_a_floating_one() -> None:
    with pytest.raises(TypeError, match="dtype must be a floating"), smp.model_creation(dtype=torch.int8):
        pass


def test_small_helpers() -> None:
    smp.init_in_memory({"partitions": 1})
    assert smp.utils.rmsg("loaded") == "[rank 0: pp 0, tp 0, dp 0] loaded"
    assert smp.utils.get_distribution_axis(nn.Linear(1, 1).weight) is None
