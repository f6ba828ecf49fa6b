"""Every operation of the device: by the CPU's kernel, on CPU tensors over the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import graphs, lateness
from .memory import NAME, Storages, is_ours, on_device, on_host, place, take_form
from .order import before_reading, catch_up, touch
from .random_numbers import generators_of

# Of these the second argument, the indices, may be on the CPU, as on CUDA.
_INDEXING = frozenset(["aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"])

# What comes of them depends on numbers in memory: item(), equal(), nonzero().
_ASKS_THE_HOST = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])

_library: torch.library.Library | None = None


def register() -> None:
    """All operations that the CPU has a kernel for, and by a fallback those without one."""
    global _library
    library = _library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not _is_the_cpus(name):
            continue
        short = name.removeprefix("aten::")
        packet, _, overload = short.partition(".")
        try:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue  # not for Python
        library.impl(short, _SPECIAL.get(short, _kernel_of(op)), "PrivateUse1")
    for short, kernel in _SPECIAL.items():
        if not _is_the_cpus(f"aten::{short}"):
            library.impl(short, kernel, "PrivateUse1")


def _is_the_cpus(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CPU") and (not has(name, "CompositeImplicitAutograd") or has(name, "Autograd"))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def check_together(name: str, tensors: list[torch.Tensor]) -> torch.device | None:
    """The device of the operands.

    Raises:
        RuntimeError: they are on several.
    """
    ours = [tensor.device for tensor in tensors if is_ours(tensor)]
    if not ours:
        return None
    for tensor in tensors:
        if tensor.device == ours[0] or (tensor.device.type == "cpu" and not tensor.dim()):
            continue
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {ours[0]} and "
            f"{tensor.device}! (when {name} was called)"
        )
    return ours[0]


class _Call:
    """One operation's arguments on the CPU, and its results on the device again."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.known: Storages = {}
        self.hosts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_ours(value):
                return value
            if id(value) not in self.hosts:
                self.hosts[id(value)] = value, on_host(value, self.known)
            return self.hosts[id(value)][1]
        if isinstance(value, (list, tuple)):
            return type(value)([self.to_host(each) for each in value])
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    def to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for tensor, host in self.hosts.values():
                if host is value:
                    return tensor
            return on_device(value, self.device.index or 0, self.known) if self.device else value
        if isinstance(value, (list, tuple)):
            return type(value)([self.to_device(each) for each in value])
        return value


def run_on_host(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation, by the CPU's kernel."""
    catch_up()
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),  # the CPU's has no say
    ):
        name = op._schema.name
        checked = (args[0], *args[2:]) if name in _INDEXING and is_ours(args[0]) else args
        device = check_together(name, list(_tensors((*checked, *kwargs.values()))))
        if (asked := kwargs.get("device")) is not None:
            device = asked if asked.type == NAME else None
        if device is not None and _ASKS_THE_HOST.intersection(op.tags):
            before_reading()
        call = _Call(device)
        if graphs.is_capturing() and op._schema.is_mutable:
            graphs.before(list(_tensors((*args, *kwargs.values()))))
        host_args = call.to_host(args)
        host_kwargs = {key: call.to_host(value) for key, value in kwargs.items()}
        if _reads(op):
            for tensor, _ in call.hosts.values():
                lateness.check_waited(tensor)
        if torch.Tag.nondeterministic_seeded in op.tags and device is not None:
            with generators_of(op, device, host_args, host_kwargs) as host_kwargs:
                result = op(*host_args, **host_kwargs)
        elif any(type(value) in (bool, int, float) for value in _meant_as_tensors(op, host_args)):
            # Torch hands on a number that it has wrapped in a tensor as that number.
            result = op.overloadpacket(*host_args, **host_kwargs)
        else:
            result = op(*host_args, **host_kwargs)
        if op._schema.is_mutable:
            for tensor, host in call.hosts.values():
                take_form(tensor, host, call.known)
                touch(tensor.untyped_storage(), tensor.device.index or 0)
        found = call.to_device(result)
        if graphs.is_capturing() and device is not None:
            graphs.note(lambda again, named: op(*again, **named), args, kwargs, found)
        return found


@functools.cache
def _tensors_by_place(op: Any) -> list[bool]:
    return [str(argument.type) == "Tensor" for argument in op._schema.arguments]


def _meant_as_tensors(op: Any, args: Sequence[Any]) -> Iterator[Any]:
    return (value for value, is_tensor in zip(args, _tensors_by_place(op), strict=False) if is_tensor)


@functools.cache
def _reads(op: Any) -> bool:
    """Whether it looks at what is in memory; not at where the memory is, or how large, only."""
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns)
    name = op._schema.name.removeprefix("aten::")
    return not is_view and not name.startswith(("new_", "empty")) and not name.endswith("_like")


def _kernel_of(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run_on_host(op, args, kwargs)

    return kernel


# What is about more than one device -------------------------------------------------------------------------


def _copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        if graphs.is_capturing() and (is_ours(self) or is_ours(src)):
            _note_copy(self, src)
        known: Storages = {}
        if not is_ours(self) and not non_blocking:
            before_reading()
        target = on_host(self, known) if is_ours(self) else self
        source = on_host(src, known) if is_ours(src) else src
        if not (non_blocking and lateness.copies_late(self, src)):
            catch_up()
            for tensor in filter(is_ours, (self, src)):
                lateness.check_waited(tensor)
            target.copy_(source)
            if is_ours(self):
                touch(self.untyped_storage(), self.device.index or 0)
        return self


def _note_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if not (is_ours(target) and is_ours(source)):
        graphs.refuse_host("a copy from or to the host")
    graphs.before([target])
    graphs.note(lambda again, _: again[0].copy_(again[1]), (target, source), {}, None)


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy_(dst, self, non_blocking)


def _to_copy(self: torch.Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
    catch_up()
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        options.pop("pin_memory", None)
        if device is not None and device.type != NAME and not non_blocking:
            before_reading()
        if is_ours(self):
            lateness.check_waited(self)
        source = on_host(self, {}) if is_ours(self) else self
        copy = torch.ops.aten._to_copy.default(source, **options)
        target = self.device if device is None else device
        found = on_device(copy, target.index or 0, {}) if target.type == NAME else copy
        if graphs.is_capturing() and (is_ours(self) or is_ours(found)):
            if not (is_ours(self) and is_ours(found)):
                graphs.refuse_host("a copy from or to the host")
            op = torch.ops.aten._to_copy.default
            graphs.note(lambda again, _: op(*again, **options), (self,), {}, found)
        return found


def _resize_(self: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        known: Storages = {}
        old = on_host(self, known)
        format_ = torch.contiguous_format if memory_format is None else memory_format
        host = torch.empty(size, dtype=self.dtype, memory_format=format_, device="cpu")
        if host.numel() * host.element_size() <= self.untyped_storage().nbytes():
            host = old.as_strided(host.shape, host.stride())
        else:
            row = torch.empty(0, dtype=self.dtype, device="cpu").set_(old.untyped_storage())
            flat = host.as_strided((host.numel(),), (1,))
            kept = min(row.numel(), flat.numel())
            flat[:kept].copy_(row[:kept])
        take_form(self, host, known)
        return self


def _set_(self: torch.Tensor, source: Any, *form: Any) -> torch.Tensor:
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        if isinstance(source, torch.Tensor):
            offset, size, stride = form or (source.storage_offset(), source.shape, source.stride())
            return place(self, source.untyped_storage(), offset, size, stride or source.stride())
        if form:
            offset, size, stride = form[0], form[1], form[2] if len(form) > 2 else ()
            if not stride:
                stride = torch.empty(size, device="meta").stride()
        else:
            offset, size, stride = 0, (source.nbytes() // self.element_size(),), (1,)
        return place(self, source, offset, size, stride)


def _set_nothing(self: torch.Tensor) -> torch.Tensor:
    return _set_(self, torch.empty(0, dtype=self.dtype, device=self.device).untyped_storage(), 0, (0,), (1,))


def _convolution(*args: Any) -> Any:
    return run_on_host(torch.ops.aten.convolution.default, args, {})


def _convolution_backward(grad: Any, input: Any, weight: Any, *args: Any) -> Any:
    *form, mask = args
    bias_sizes = [weight.shape[1] * form[-1] if form[3] else weight.shape[0]] if mask[2] else None
    op = torch.ops.aten.convolution_backward.default
    return run_on_host(op, (grad, input, weight, bias_sizes, *form, mask), {})


_SPECIAL: dict[str, Callable[..., Any]] = {
    "copy_": _copy_,
    "_copy_from": _copy_from,
    "_to_copy": _to_copy,
    "_copy_from_and_resize": _copy_from,
    "resize_": _resize_,
    "set_.source_Storage": _set_,
    "set_.source_Storage_storage_offset": _set_,
    "set_.source_Tensor": _set_,
    "set_": _set_nothing,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
