"""Step functions whose microbatches differ in one thing, from the third one on; compared with plain torch.

Each is (model, x, number of the microbatch) -> output.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp

__all__ = ["MICROBATCHES", "STEPS", "assert_equal_to_plain"]

MICROBATCHES = 4
OFFSET = 1.0
FACTORS = {"of": 1.0}
SCRIPT = argparse.Namespace(factor=1.0)
NUMBER = ctypes.c_double(1.0)
EVENT = threading.Event()


def offset() -> float:
    return OFFSET


def _other_offset() -> float:
    return 3.0


class Part(nn.Module):
    """One layer whose code reads attributes, of itself and of what it is given, and globals of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = nn.Tanh()
        self.scale = 1.0
        self.length = 2

    def forward(self, x: Tensor, more: Any = 0.0) -> Tensor:
        x = x[: self.length] * getattr(x, "factor", 1.0)
        given = (
            math.sqrt(4.0) * FACTORS["of"] * SCRIPT.factor * NUMBER.value * (2.0 if EVENT.is_set() else 1.0)
        )
        return self.inner(self.layer(x)) * self.scale * given + offset() + more


class Model(nn.Module):
    """Two parts of one form, on two stages, and a number between them."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = Part()
        with smp.partition(1):
            self.second = Part()
        self.turned = False
        self.power: Any = 1.0
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.second, self.first) if self.turned else (self.first, self.second)
        x = a(x) * self.power
        if self.mask is not None:
            x = x + self.mask
        return b(x)


Step = Callable[[Any, Tensor, int], Tensor]


def _attribute(model: Any, x: Tensor, m: int) -> Tensor:
    _module(model).second.scale = 1.0 + (m > 1)
    return model(x)


def _attribute_that_shapes(model: Any, x: Tensor, m: int) -> Tensor:
    _module(model).second.length = 1 if m > 1 else 2
    return model(x)


def _global(model: Any, x: Tensor, m: int) -> Tensor:
    global OFFSET
    OFFSET = 1.0 + (m > 1)
    return model(x)


def _entry(model: Any, x: Tensor, m: int) -> Tensor:
    FACTORS["of"] = 1.0 + (m > 1)
    return model(x)


def _script_argument(model: Any, x: Tensor, m: int) -> Tensor:
    SCRIPT.factor = 1.0 + (m > 1)
    return model(x)


def _shared_number(model: Any, x: Tensor, m: int) -> Tensor:
    NUMBER.value = 1.0 + (m > 1)
    return model(x)


def _event(model: Any, x: Tensor, m: int) -> Tensor:
    if m > 1:
        EVENT.set()
    result = model(x)
    EVENT.clear()
    return result


def _function(model: Any, x: Tensor, m: int) -> Tensor:
    with mock.patch.dict(globals(), {"offset": _other_offset} if m > 1 else {}):
        return model(x)


def _function_of_torch(model: Any, x: Tensor, m: int) -> Tensor:
    own = F.linear
    with contextlib.ExitStack() as stack:
        if m > 1:
            other = mock.patch.object(F, "linear", lambda *args: own(*args) * 2.0)
            stack.enter_context(other)
        return model(x)


def _class_of_torch(model: Any, x: Tensor, m: int) -> Tensor:
    own = nn.Tanh.forward
    with contextlib.ExitStack() as stack:
        if m > 1:
            other = mock.patch.object(nn.Tanh, "forward", lambda self, x: own(self, x) * 2.0)
            stack.enter_context(other)
        return model(x)


def _function_of_python(model: Any, x: Tensor, m: int) -> Tensor:
    with contextlib.ExitStack() as stack:
        if m > 1:
            stack.enter_context(mock.patch.object(math, "sqrt", math.exp))
        return model(x)


def _number(model: Any, x: Tensor, m: int) -> Tensor:
    _module(model).power = 1.0 + (m > 1)
    return model(x)


def _type_of_number(model: Any, x: Tensor, m: int) -> Tensor:
    return model(x) * (torch.tensor([1]) + (True if m > 1 else 1)) + torch.full_like(model(x), m > 1)


def _sign_of_zero(model: Any, x: Tensor, m: int) -> Tensor:
    return model(x).detach().abs().mul(-0.0 if m > 1 else 0.0).reciprocal().sign() * model(x)


def _keyword(model: Any, x: Tensor, m: int) -> Tensor:
    return F.leaky_relu(model(x) - 1.0, negative_slope=0.5 if m > 1 else 0.25)


def _argument(model: Any, x: Tensor, m: int) -> Tensor:
    return _module(model).second(model(x), more=2.0 if m > 1 else 1.0)


def _order_of_modules(model: Any, x: Tensor, m: int) -> Tensor:
    _module(model).turned = m > 1
    return model(x)


def _order_of_arguments(model: Any, x: Tensor, m: int) -> Tensor:
    a, b = model(x), model(x.flip(1))
    return torch.sub(b, a) if m > 1 else torch.sub(a, b)


def _mask_of_other_shape(model: Any, x: Tensor, m: int) -> Tensor:
    _module(model).mask = torch.ones((2, 1, 4) if m > 1 else (1, 4))
    return model(x)


def _mask_changed_in_place(model: Any, x: Tensor, m: int) -> Tensor:
    mask = torch.full((4,), float(m))
    _module(model).mask = mask
    result = model(x)
    mask.add_(1.0)
    return result * mask


def _another_shape(model: Any, x: Tensor, m: int) -> Tensor:
    return model(x[:1] if m > 1 else x)


def _hook(model: Any, x: Tensor, m: int) -> Tensor:
    with contextlib.ExitStack() as stack:
        if m > 1:
            handle = _module(model).second.register_forward_hook(lambda module, args, result: result * 2)
            stack.callback(handle.remove)
        return model(x)


def _inner_hook(model: Any, x: Tensor, m: int) -> Tensor:
    with contextlib.ExitStack() as stack:
        if m > 1:
            handle = _module(model).second.inner.register_forward_pre_hook(lambda module, args: args[0] * 2)
            stack.callback(handle.remove)
        return model(x)


def _hook_on_all(model: Any, x: Tensor, m: int) -> Tensor:
    def doubled(module: nn.Module, args: Any, result: Any) -> Any:
        return result * 2 if type(module) is Part else None

    with contextlib.ExitStack() as stack:
        if m > 1:
            stack.callback(nn.modules.module.register_module_forward_hook(doubled).remove)
        return model(x)


def _without_gradient(model: Any, x: Tensor, m: int) -> Tensor:
    with torch.set_grad_enabled(m < 2):
        kept = model(x)
    return model(x) * kept


def _autocast(model: Any, x: Tensor, m: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=m > 1):
        return model(x).float()


def _looked_at(model: Any, x: Tensor, m: int) -> Tensor:
    result = model(x)
    if m > 1 and float(result.detach().sum()) != 0.0:
        result = result * 3.0
    return model(result)


def _changed_in_place(model: Any, x: Tensor, m: int) -> Tensor:
    result = model(x) * 2.0
    if m > 1:
        result.mul_(2.0)
    return model(result)


def _other_parameters(model: Any, x: Tensor, m: int) -> Tensor:
    second = _module(model).second
    result = model(x)
    if m < 2:
        return second(result)
    return torch.func.functional_call(second, {"layer.bias": torch.ones(4)}, (result,))


def _attribute_of_tensor(model: Any, x: Tensor, m: int) -> Tensor:
    result = model(x)
    if m > 1:
        result.factor = 3.0
    return _module(model).second(result)


def _parameter_in_place_of_a_value(model: Any, x: Tensor, m: int) -> Tensor:
    result = model(x)
    row = result[0]
    return torch.mul(result, _module(model).second.layer.bias if m > 1 else row)


def _changed_after_views(model: Any, x: Tensor, m: int) -> Tensor:
    result = model(x)
    part, turned = result[..., 1:3], result.transpose(0, 1)
    if m > 1:
        result.mul_(3.0)
    return part @ turned[:2] + part.sum()


def _checkpointed(model: Any, x: Tensor, m: int) -> Tensor:
    if m > 1:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    return model(x)


def _module(model: Any) -> Model:
    return model.module if isinstance(model, smp.DistributedModel) else model


STEPS: dict[str, Step] = {
    step.__name__.strip("_"): step
    for step in (
        _attribute,
        _attribute_that_shapes,
        _global,
        _entry,
        _script_argument,
        _shared_number,
        _event,
        _function,
        _function_of_torch,
        _class_of_torch,
        _function_of_python,
        _number,
        _type_of_number,
        _sign_of_zero,
        _keyword,
        _argument,
        _order_of_modules,
        _order_of_arguments,
        _mask_of_other_shape,
        _mask_changed_in_place,
        _another_shape,
        _hook,
        _inner_hook,
        _hook_on_all,
        _without_gradient,
        _autocast,
        _looked_at,
        _changed_in_place,
        _other_parameters,
        _attribute_of_tensor,
        _parameter_in_place_of_a_value,
        _changed_after_views,
        _checkpointed,
    )
}


@contextlib.contextmanager
def _state_kept() -> Iterator[None]:
    global OFFSET
    try:
        yield
    finally:
        OFFSET = 1.0
        FACTORS["of"] = SCRIPT.factor = NUMBER.value = 1.0
        EVENT.clear()


def _plain(step: Step, batch: Tensor, all_numbers: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    model = Model()
    outputs = []
    with _state_kept():
        for numbers in all_numbers:
            for m, x in zip(numbers, batch.chunk(MICROBATCHES), strict=True):
                output = step(model, x, m)
                output.mean().backward()
                outputs.append(output.detach())
    return outputs, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_equal_to_plain(name: str, all_numbers: Sequence[Sequence[int]]) -> None:
    """Runs steps in the open session and in plain torch: outputs and gradients are equal to the bit.

    Args:
        name: of the step function.
        all_numbers: for each step what it takes for the numbers of its microbatches.
    """
    batch = torch.randn(2 * MICROBATCHES, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    with _state_kept():
        model = smp.DistributedModel(Model(), average_grads_across_microbatches=False)
        flat = iter([m for numbers in all_numbers for m in numbers])

        @smp.step
        def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
            output = STEPS[name](model, x, next(flat))
            model.backward(output.mean())
            return output

        found: list[Any] = []
        for _ in all_numbers:
            outputs = step(model, batch)
            found += outputs.outputs if isinstance(outputs, smp.StepOutput) else outputs
    expected, expected_gradients = _plain(STEPS[name], batch, all_numbers)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    here = {id(parameter) for parameter in model.local_parameters()}
    own = [p for p in model.module.parameters() if p.grad is not None or id(p) not in here]
    assert len(own) == len(expected_gradients)
    for parameter, wanted in zip(own, expected_gradients, strict=True):
        assert id(parameter) not in here or torch.equal(parameter.grad, wanted)
