"""`DistributedModel` in one process that plays all stages: its methods, state and hooks.

What differs from rank to rank (local parameters, gathering) is tested in `tests/launch`.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as states

import smp_lite as smp
from tests.api_support import (
    Net,
    batch,
    build,
    in_memory,
    plain_train,
    same,
    train,
    wrap,
)

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")
SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(autouse=True)
def _session() -> None:
    in_memory()


def other_state() -> dict[str, Any]:
    """The state dict of a net with other weights and buffers."""
    net = build(seed=8)
    plain_train(net, *batch(9))
    return net.state_dict()


def test_partitioned_turns_true_in_the_first_step() -> None:
    model, _ = wrap(build(), SGD)
    assert not model.partitioned
    with pytest.raises(smp.SMPError, match="not partitioned yet"):
        _ = model.partition
    train(model, *batch())
    assert model.partitioned


def test_with_one_partition_the_model_is_partitioned_at_once() -> None:
    smp.reset()
    in_memory(1)
    model, _ = wrap(build(), SGD)
    assert model.partitioned


def test_the_wrapper_lists_all_parameters_before_and_after_partition() -> None:
    net = build()
    names = [name for name, _ in net.named_parameters()]
    model, _ = wrap(net, SGD)
    for _ in range(2):
        assert [id(p) for p in model.parameters()] == [id(p) for p in net.parameters()]
        assert [name for name, _ in model.local_named_parameters()] == names
        assert [id(p) for p in model.local_parameters()] == [id(p) for p in net.parameters()]
        assert [n for n, _ in model.local_named_buffers()] == [n for n, _ in net.named_buffers()]
        assert [id(b) for b in model.local_buffers()] == [id(b) for b in net.buffers()]
        assert [n for n, _ in model.local_named_modules()] == [n for n, _ in net.named_modules()]
        assert [id(m) for m in model.local_modules()] == [id(m) for m in net.modules()]
        train(model, *batch())


def test_module_and_get_module_are_the_users_own() -> None:
    net = build()
    model, _ = wrap(net, SGD)
    assert model.module is net
    assert model.get_module() is net


def test_train_eval_to_and_cpu_return_the_model() -> None:
    model, _ = wrap(build(), SGD)
    assert model.eval() is model
    assert not model.module.first.training
    assert model.train() is model
    assert model.to("cpu") is model
    assert model.to(torch.device("cpu")) is model
    assert model.cpu() is model


def test_to_converts_before_partition_only_and_refuses_other_devices() -> None:
    model, _ = wrap(build(), SGD)
    with pytest.raises(smp.SMPError, match="this job runs on cpu"):
        model.to("cuda:0")
    assert model.to(torch.float64) is model
    x, target = batch()
    train(model, x.double(), target.double())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    with pytest.raises(smp.SMPError, match="after partition"):
        model.to(torch.float32)


def test_state_dict_has_the_plain_modules_keys_and_values_on_cpu() -> None:
    net, plain = build(), build()
    model, _ = wrap(net, SGD)
    assert same(model.state_dict(), plain.state_dict())
    train(model, *batch())
    plain_train(plain, *batch())
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert same(state, plain.state_dict())
    assert same(model.state_dict(gather_to_rank0=True), state)
    assert same(model.local_state_dict(), {**state, "_smp_is_partial": True})
    Net().load_state_dict(state)


def test_a_state_dict_is_a_copy() -> None:
    model, _ = wrap(build(), SGD)
    state = model.state_dict()
    before = copy.deepcopy(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(state, before)


def test_state_dict_refuses_torchs_own_options_by_name() -> None:
    model, _ = wrap(build(), SGD)
    with pytest.raises(TypeError, match="prefix"):
        model.state_dict(prefix="net.")


@pytest.mark.parametrize("steps", [0, 1])
def test_torchs_own_functions_for_states_are_refused_with_what_to_call(steps: int) -> None:
    model, optimizer = wrap(build(), SGD)
    for _ in range(steps):
        train(model, *batch())
    says = r"cannot read or set the state of a DistributedModel: use model\.state_dict\(\)"
    for function, *rest in (
        (states.get_model_state_dict,),
        (states.get_optimizer_state_dict, optimizer),
        (states.get_state_dict, optimizer),
        (states.set_model_state_dict, model.state_dict()),
        (partial(states.set_optimizer_state_dict, optim_state_dict=optimizer.state_dict()), optimizer),
    ):
        with pytest.raises(smp.SMPError, match=says):
            function(model, *rest)


@pytest.mark.parametrize("marked", [None, False, True])
@pytest.mark.parametrize("partitioned", [False, True])
def test_a_whole_state_dict_loads_before_and_after_partition(partitioned: bool, marked: bool | None) -> None:
    model, _ = wrap(build(), SGD)
    if partitioned:
        train(model, *batch(5))
    model.zero_grad()
    state = other_state()
    model.load_state_dict({**state, **({} if marked is None else {"_smp_is_partial": marked})})
    plain = Net()
    plain.load_state_dict(state)
    losses = train(model, *batch())
    assert same(losses.stack(), plain_train(plain, *batch()))
    assert same(model.state_dict(), plain.state_dict())


def test_what_is_loaded_before_partition_is_what_it_was_at_that_time() -> None:
    model, _ = wrap(build(), SGD)
    source = build(seed=8)
    model.load_state_dict(source.state_dict())
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    train(model, *batch())
    assert same(dict(model.module.named_parameters()), dict(build(seed=8).named_parameters()))


@pytest.mark.parametrize("partitioned", [False, True])
def test_strict_loading_names_what_does_not_match(partitioned: bool) -> None:
    model, _ = wrap(build(), SGD)
    if partitioned:
        train(model, *batch())
    state = other_state()
    missing = state.pop("first.0.weight")
    with pytest.raises(smp.SMPError, match=r"missing keys \['first\.0\.weight'\], unknown keys \[\]"):
        model.load_state_dict(state)
    extra = {**state, "first.0.weight": missing, "head.bias": missing}
    with pytest.raises(smp.SMPError, match=r"missing keys \[\], unknown keys \['head\.bias'\]"):
        model.load_state_dict(extra)
    found = model.load_state_dict({**state, "head.bias": missing}, strict=False)
    assert found.missing_keys == ["first.0.weight"]
    assert found.unexpected_keys == ["head.bias"]
    assert same(model.state_dict()["last.1.weight"], state["last.1.weight"])


def test_a_wrong_shape_is_an_error_at_the_call() -> None:
    model, _ = wrap(build(), SGD)
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.0\.weight"):
        model.load_state_dict({**other_state(), "first.0.weight": torch.zeros(3, 3)})


def test_hooks_get_model_and_optimizer_once_and_in_their_places() -> None:
    model, optimizer = wrap(build(), SGD)
    calls: list[tuple[str, Any, Any, bool, bool]] = []

    def hook(name: str) -> Any:
        def called(model: Any, optimizer: Any) -> None:
            has_gradient = next(model.local_parameters()).grad is not None
            calls.append((name, model, optimizer, model.partitioned, has_gradient))

        return called

    model.register_post_step_hook(hook("step"))
    model.register_post_partition_hook(hook("partition"))
    model.register_post_partition_hook(hook("removed")).remove()
    model.register_post_step_hook(hook("removed")).remove()
    assert calls == []
    for _ in range(2):
        train(model, *batch())
    assert calls == [
        ("partition", model, optimizer, True, False),
        ("step", model, optimizer, True, True),
    ]


def test_removing_a_hook_twice_does_nothing() -> None:
    model, _ = wrap(build(), SGD)
    handle = model.register_post_step_hook(lambda model, optimizer: None)
    handle.remove()
    handle.remove()


def test_a_loaded_state_wins_over_a_post_partition_hook_that_changes_weights() -> None:
    model, _ = wrap(build(), SGD)

    def reset(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.zero_()

    model.register_post_partition_hook(reset)
    state = other_state()
    kept = {key: value for key, value in state.items() if key.startswith("first")}
    model.load_state_dict(kept, strict=False)
    train(model, *batch())
    parameters = dict(model.module.named_parameters())
    assert same(parameters["first.0.weight"].data, state["first.0.weight"])
    assert not parameters["last.1.weight"].any()


def test_a_buffer_with_two_names_and_a_module_with_two_names_are_saved_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.again, self.end = self.first, nn.Linear(4, 1)
            self.first.register_buffer("scale", torch.tensor([2.0]))
            self.last.register_buffer("scale", self.first.scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.end(self.again(self.last(self.first(x)) * self.last.scale))

    net = Twice()
    model, _ = wrap(net, SGD)
    keys = list(net.state_dict())
    train(model, *batch())
    assert list(model.state_dict()) == keys
    assert "again.weight" in keys
    assert "last.scale" in keys


def test_join_and_a_comm_hook_without_ddp_are_refused() -> None:
    model, _ = wrap(build(), SGD)
    with pytest.raises(smp.SMPError, match=r"join\(\) is not supported"):
        model.join().__enter__()
    with pytest.raises(smp.SMPError, match="needs ddp: True"):
        model.register_comm_hook(None, lambda state, bucket: None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"trace_device": "tpu"}, "trace_device must be 'cpu' or 'gpu', got 'tpu'"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be a positive integer"),
    ],
)
def test_wrong_options_name_themselves(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        smp.DistributedModel(build(), **options)


def test_gradients_are_a_sum_over_microbatches_on_request() -> None:
    net = build()
    model = smp.DistributedModel(net, average_grads_across_microbatches=False)
    train(model, *batch())
    plain = build()
    plain_train(plain, *batch())
    for mine, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad * 2)


def test_any_number_of_hops_ends_at_the_users_module() -> None:
    """Scripts of several versions of SMP write ``model.module.module.transformer``."""
    net = build()
    names = list(net.state_dict())
    model = smp.DistributedModel(net)
    assert model.module.module.module.module is net
    assert model.get_module() is net
    train(model, *batch())
    assert model.module.module is net
    assert list(model.state_dict()) == list(net.state_dict()) == names
    smp.reset()
    with pytest.raises(AttributeError, match="module"):
        _ = net.module


def test_who_walks_to_the_innermost_module_comes_to_an_end() -> None:
    """transformers does in every save_pretrained, by recursion."""
    net = build()
    found: Any = smp.DistributedModel(net)
    while hasattr(found, "module"):
        found = found.module
    assert found is net
    assert getattr(net, "module", None) is None
    twin, other = copy.deepcopy(net), build()
    for instance in (twin, other):
        with pytest.raises(AttributeError, match="module"):
            _ = instance.module
    other.module = "its own"
    assert other.module == "its own"


def test_a_class_of_torch_is_left_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner = nn.Sequential()
    inner.module = nn.Linear(1, 1)
    model = smp.DistributedModel(net)
    assert model.module.module is net
    assert isinstance(inner.module, nn.Linear)
    smp.reset()
    assert "module" not in vars(nn.Sequential)


def test_a_module_of_that_name_is_the_users() -> None:
    net = nn.Module()
    net.module = build()
    model = smp.DistributedModel(net)
    assert model.module.module is net.module


def test_nothing_is_distributed_over_tensor_parallel_ranks() -> None:
    net = build()
    model = smp.DistributedModel(net)
    parameter = next(net.parameters())
    assert list(model.distributed_modules()) == []
    assert model.is_distributed_parameter(parameter) is False
    assert model.is_scaled_batch_parameter(parameter) is False
    assert dict(model.default_reducer_named_parameters()) == dict(net.named_parameters())
    assert list(model.scaled_batch_reducer_named_parameters()) == []


def test_what_transformers_asks_of_the_state() -> None:
    assert list(smp.state.module_manager.translate_functions) == []
    assert smp.state.cfg.prescaled_batch is False


def test_step_outputs_are_detached_microbatch_by_microbatch() -> None:
    output = smp.StepOutput([torch.ones(2, requires_grad=True) * m for m in range(2)])
    detached = output.detach()
    assert isinstance(detached, smp.StepOutput)
    assert not any(part.requires_grad for part in detached.outputs)
    assert torch.equal(detached.concat().cpu(), torch.tensor([0.0, 0.0, 1.0, 1.0]))
