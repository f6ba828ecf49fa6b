"""Which modules are replaced, by what, and with which weights; on one rank."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from smp_lite.nn.distributed import CannotShare


@pytest.fixture(autouse=True)
def _session() -> None:
    smp.init_in_memory({"partitions": 1})


def kinds(net: nn.Module) -> list[str]:
    return [type(module).__name__ for module in smp.DistributedModel(net).get_module().children()]


def test_the_innermost_context_wins() -> None:
    with smp.tensor_parallelism():
        first = nn.Linear(2, 2)
        with smp.tensor_parallelism(enabled=False):
            second = nn.Linear(2, 2)
            with smp.model_creation(tensor_parallelism=True, dtype=torch.float64):
                third = nn.Linear(2, 2)
        copied = copy.deepcopy(first)
    net = nn.Sequential(first, second, third, copied, nn.Linear(2, 2))
    assert kinds(net) == ["DistributedLinear", "Linear", "DistributedLinear", "DistributedLinear", "Linear"]
    assert net[2].weight.dtype is torch.float64
    assert nn.Module.__init__ is type(nn.Linear(1, 1)).__mro__[1].__init__  # put back


def test_a_decorator() -> None:
    @smp.tensor_parallelism(enabled=True)
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2))

    assert kinds(make()) == ["DistributedLinear"] and kinds_again(make()) == ["DistributedLinear"]


def kinds_again(net: nn.Module) -> list[str]:
    smp.reset()
    smp.init_in_memory({"partitions": 1})
    return kinds(net)


def test_a_call_marks_all_inside_and_another_takes_back() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2)), nn.Linear(2, 2))
    smp.set_tensor_parallelism(net)
    smp.set_tensor_parallelism(net[1], False)
    smp.DistributedModel(net)
    assert [type(m).__name__ for m in net[0]] == ["DistributedLinear", "DistributedEmbedding"]
    assert type(net[1]) is nn.Linear


class Outer(nn.Module):
    """Has a distributed counterpart, and something in it that has one too."""

    def __init__(self, width: int, *, scale: float = 2.0) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.factor = scale

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, torch.Tensor]:
        return {"found": self.inner(x) * self.factor * (2 if twice else 1)}


class DistributedOuter(smp.nn.DistributedModule):
    def __init__(self, width: int, scale: float, bias: bool = True) -> None:
        super().__init__()
        self.inner = smp.nn.DistributedLinear(width, width, bias)
        self.factor = scale

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        return self.inner(x) * self.factor * times


def register() -> None:
    smp.tp_register_with_module(
        Outer,
        DistributedOuter,
        lambda width, *, scale=2.0: ((width, scale), {}),
        lambda x, *, twice=False: ((x,), {"times": 2 if twice else 1}),
        lambda found: {"found": found},
    )


def test_hooks_and_the_outermost_supported_module() -> None:
    register()
    net = nn.Sequential(Outer(3, scale=5.0))
    dense = copy.deepcopy(net)
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    assert isinstance(net[0], DistributedOuter) and next(model.distributed_modules()) is net[0]
    x = torch.randn(2, 3)
    torch.testing.assert_close(net[0](x, twice=True)["found"], dense[0](x, twice=True)["found"])


def test_options_go_before_what_the_init_hook_says() -> None:
    register()
    outer = Outer(3)
    smp.set_tensor_parallelism(outer, scale=7.0, fused_softmax=True)
    smp.DistributedModel(nn.Sequential(outer))


def test_each_module_gets_the_options_that_it_knows() -> None:
    from tests.tensor.smp_api import hf_models

    net = nn.ModuleDict({"model": hf_models.MODELS["gpt2"](), "beside": nn.Linear(4, 4)})
    options = {"zero_init": True, "triton_flash_attention": True, "attention_in_fp32": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smp.set_tensor_parallelism(net, **options, fused_softmax=False)
        smp.DistributedModel(net)
    assert net["model"].transformer.seq_layers[0].attention.scores.in_fp32
    with pytest.warns(UserWarning, match="no distributed module knows the option 'atention_in_fp32'"):
        smp.set_tensor_parallelism(nn.Linear(4, 4), atention_in_fp32=True)


def test_a_module_with_a_masked_part_is_not_replaced_and_its_other_parts_are() -> None:
    register()
    net = nn.Sequential(Outer(3), Outer(3))
    smp.set_tensor_parallelism(net)
    smp.set_tensor_parallelism(net[0].inner, False)
    smp.DistributedModel(net)
    assert type(net[0]) is Outer and type(net[0].inner) is nn.Linear
    assert isinstance(net[1], DistributedOuter)


def test_shared_weights_and_modules() -> None:
    net = nn.ModuleDict({"a": nn.Embedding(4, 3), "b": nn.Linear(3, 4, bias=False), "c": nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight
    net["d"] = net["c"]
    smp.set_tensor_parallelism(net)
    with pytest.warns(UserWarning, match=r"a \(Embedding\) is not distributed: its weight is shared"):
        smp.DistributedModel(net)
    assert type(net["a"]) is nn.Embedding and type(net["b"]) is nn.Linear
    assert isinstance(net["c"], smp.nn.DistributedLinear) and net["d"] is net["c"]


def test_sizes_that_do_not_divide_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise CannotShare("width=3: cannot")

    register()
    net = nn.Sequential(Outer(3))
    smp.set_tensor_parallelism(net)
    monkeypatch.setattr(DistributedOuter, "__init__", refuse)
    with pytest.warns(UserWarning, match=r"0 \(Outer\) is not distributed: width=3: cannot"):
        smp.DistributedModel(net)
    assert isinstance(net[0].inner, smp.nn.DistributedLinear)


def test_weights_and_what_trains_go_over() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Embedding(4, 3, padding_idx=-1)).double().eval()
    net[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype is torch.float64 and torch.equal(tensor, before[name])
    assert not net[0].weight.requires_grad and net[0].bias.requires_grad
    assert not net[0].training and net[1].padding_idx == 3


def test_new_weights_are_said() -> None:
    class Other(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width)

    smp.tp_register_with_module(Other, smp.nn.DistributedLinear, lambda width: ((width, width), {}))
    net = nn.Sequential(Other(2))
    smp.set_tensor_parallelism(net)
    with pytest.warns(UserWarning, match="by a DistributedLinear with new weights"):
        smp.DistributedModel(net)


def test_a_class_that_is_registered_late() -> None:
    class Late(nn.Module):
        def __init__(self, width: int, hidden: int = 3) -> None:
            super().__init__()
            self.width = width

    class Forgetful(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()

    late, forgetful = Late(4), Forgetful(4)
    smp.tp_register_with_module(Late, smp.nn.DistributedLinear, lambda width: ((width, width), {}))
    smp.tp_register_with_module(Forgetful, smp.nn.DistributedLinear, lambda width: ((width, width), {}))
    smp.set_tensor_parallelism(late)
    smp.set_tensor_parallelism(forgetful)
    with pytest.raises(smp.SMPError, match=r"Forgetful .* no attribute 'width'"):
        smp.DistributedModel(nn.Sequential(forgetful))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert kinds(nn.Sequential(late)) == ["DistributedLinear"]


def test_a_root_is_replaced_too() -> None:
    net = nn.Linear(2, 3)
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    assert isinstance(model.get_module(), smp.nn.DistributedLinear)
    assert model.module.module is model.get_module()


def test_misuse_is_named() -> None:
    for call, kind, said in (
        (lambda: smp.set_tensor_parallelism(3), TypeError, "needs a module, got 3"),
        (lambda: smp.tp_register(3)(nn.Linear), TypeError, "dist_module must be a class"),
        (lambda: smp.tp_register_with_module(3, nn.Linear), TypeError, "the module must be a class"),
        (lambda: smp.tp_register(nn.Linear, init_hook=3)(Outer), TypeError, "init_hook must be a function"),
    ):
        with pytest.raises(kind, match=said):
            call()
    net = nn.Linear(2, 2)
    smp.DistributedModel(net)
    with pytest.raises(smp.SMPError, match=r"set_tensor_parallelism was called after smp\.DistributedModel"):
        smp.set_tensor_parallelism(net)


def test_wrong_arguments_of_an_init_hook() -> None:
    @smp.tp_register(smp.nn.DistributedLinear, init_hook=lambda: ((), {"width": 3}))
    class Wrong(nn.Module):
        pass

    net = Wrong()
    smp.set_tensor_parallelism(net)
    with pytest.raises(smp.SMPError, match=r"replaced by a DistributedLinear.*Let init_hook return"):
        smp.DistributedModel(net)


@pytest.mark.parametrize(
    "hook",
    [
        lambda layer: layer.register_forward_hook(lambda module, args, output: 2 * output),
        lambda layer: layer.register_forward_pre_hook(lambda module, args: None),
        lambda layer: layer.register_full_backward_hook(lambda module, given, made: None),
        lambda layer: layer.weight.register_hook(lambda gradient: 2 * gradient),
        lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda parameter: None),
        lambda layer: layer.register_load_state_dict_pre_hook(lambda *args: None),
        lambda layer: layer.register_state_dict_post_hook(lambda *args: None),
        lambda layer: setattr(layer, "forward", lambda x: x),
    ],
)
def test_what_a_replacement_would_lose_is_refused(hook: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    hook(net[1])
    smp.set_tensor_parallelism(net)
    with pytest.raises(ValueError, match=r"^1 \(Linear\) has (hooks|been given another forward)"):
        smp.DistributedModel(net)
