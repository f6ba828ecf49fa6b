"""The tensor without memory, and what an operation on it does: it is noted, on meta tensors of its form.

It says that it is on the CPU and takes part in everything: in-place changes, views, ``nn.Parameter``,
``copy.deepcopy``, ``.half()``, inside a context and after it. Where a constructor needs numbers (``.item()``,
``if``, a mask as an index), what they depend on is made then and there and forgotten again; where it writes
into a tensor that is there, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..errors import SMPError
from .draws import advance, draws, draws_blindly, noted_state
from .log import Constant, Memory, Place, Write
from .replay import plainly, value_of

__all__ = ["DeferredTensor", "constant", "from_source", "is_deferred", "run"]

_DATA = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])
_REFUSED = ("aten::resize_", "aten::resize_as_", "aten::set_")
contexts: list[bool] = []
"""Of those in which a model is built now, whether they are enabled."""
OWN = frozenset(["smp_memory", "smp_twin", "smp_hold", "_is_param"])
"""Attributes that make it what it is; others are the script's."""


class DeferredTensor(torch.Tensor):
    """A tensor that has no memory yet.

    Attributes:
        smp_memory: what it will lie in.
        smp_twin: a meta tensor of its form.
        smp_hold: says that there is a tensor in that memory.
    """

    smp_memory: Memory
    smp_hold: object
    smp_twin: torch.Tensor

    @staticmethod
    def __new__(cls, memory: Memory, twin: torch.Tensor) -> DeferredTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, twin.shape, twin.stride(), twin.storage_offset(), dtype=twin.dtype, device="cpu"
        )
        made.smp_memory, made.smp_twin, made.smp_hold = memory, twin, memory.hold()
        return made

    def __init__(self, memory: Memory, twin: torch.Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})

    @property
    def smp_place(self) -> Place:
        """Where it lies."""
        return Place.of(self.smp_memory, self.smp_twin)

    def smp_value(self) -> torch.Tensor:
        """Its elements, made now, in memory of their own."""
        return value_of(self.smp_place)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """As of torch: the same memory, without gradients."""
        return _wrapped(self.smp_memory, self.smp_twin)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DeferredTensor):
            value = constant(value)
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        self.smp_memory, self.smp_twin, self.smp_hold = (
            value.smp_memory,
            _alias(value.smp_twin),
            value.smp_hold,
        )

    # What reads numbers without an operation.

    def numpy(self, *, force: bool = False) -> Any:  # type: ignore[override]
        """Its elements, which nobody can change there."""
        found = self.smp_value().numpy(force=force)
        found.flags.writeable = False
        return found

    def __array__(self, dtype: Any = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def tolist(self) -> Any:  # type: ignore[override]
        return self.smp_value().tolist()

    def data_ptr(self) -> int:  # type: ignore[override]
        raise self._no_memory("data_ptr()")

    def storage(self) -> Any:  # type: ignore[override]
        raise self._no_memory("storage()")

    def untyped_storage(self) -> Any:  # type: ignore[override]
        raise self._no_memory("untyped_storage()")

    def share_memory_(self) -> Any:
        raise self._no_memory("share_memory_()")

    def __dlpack__(self, **asked: Any) -> Any:  # type: ignore[override]
        raise self._no_memory("DLPack")

    def _no_memory(self, asked: str) -> SMPError:
        return SMPError(
            f"{asked} of a tensor of shape {list(self.shape)} whose initialization is delayed: it has no "
            "memory before the model is partitioned. Build it outside smp.delay_param_initialization"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
        return f"Deferred{kind}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        with torch.no_grad():
            copied = self.data.clone(memory_format=torch.preserve_format)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
            copied.__dict__.update(copy.deepcopy(script_attributes(self), memo))
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """It is saved as the tensor that it stands for."""
        real: torch.Tensor = self.smp_value()
        if isinstance(self, nn.Parameter):
            real = nn.Parameter(real, self.requires_grad)
        else:
            real.requires_grad_(self.requires_grad)
        return real.__reduce_ex__(protocol)


def is_deferred(tensor: Any) -> bool:
    """Whether it has no memory yet."""
    return type(tensor) is DeferredTensor


def script_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What a script has set on a tensor."""
    return {key: value for key, value in tensor.__dict__.items() if key not in OWN}


def constant(tensor: torch.Tensor) -> DeferredTensor:
    """A tensor that is there, as one that is not: nobody may change it until it is used."""
    return from_source(tensor.shape, tensor.dtype, Constant(tensor).copy, tensor.stride())


def from_source(
    shape: Any, dtype: torch.dtype, bring: Callable[[], torch.Tensor], stride: Any = None
) -> DeferredTensor:
    """A tensor that ``bring`` brings when it is needed, each time: memory of its own, of that form."""
    with plainly():
        if stride is None:
            twin = torch.empty(tuple(shape), dtype=dtype, device="meta")
        else:
            twin = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
    memory = Memory(twin.untyped_storage().nbytes())
    Write(bring, (), {}, [], [(0, Place.of(memory, twin))]).note()
    return DeferredTensor(memory, twin)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation, with some deferred tensor or, while a model is built, without any tensor."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    deferred = [tensor for tensor in tensors if is_deferred(tensor)]
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return _elsewhere(func, args, kwargs, torch.device(device))
    if any(func._schema.name == name for name in _REFUSED) and not _rebinds(func, args):
        raise SMPError(
            f"{func._schema.name} of a tensor whose initialization is delayed is not supported: build that "
            "module outside smp.delay_param_initialization (enabled=False inside of it)"
        )
    written = _written(func, args, kwargs)
    mixed = len(deferred) < len(tensors) and not written and not contexts
    needs_data = (
        mixed  # a model that is built copies such tensors, and one that is used computes
        or bool(_DATA.intersection(func.tags))
        or any(not is_deferred(tensor) for tensor in written)
        or any(tensor.layout is not torch.strided for tensor in tensors)
    )
    if needs_data:
        return _for_real(func, args, kwargs, written)
    metas = [_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    meta_args, meta_kwargs = tree_unflatten(metas, spec)
    if "device" in meta_kwargs or not deferred:
        meta_kwargs["device"] = torch.device("meta")
    versions = [leaf.smp_place if is_deferred(leaf) else None for leaf in leaves]  # as they lie before
    twin_kwargs = {key: None if key == "generator" else value for key, value in meta_kwargs.items()}
    try:
        with plainly():
            result = func(*meta_args, **twin_kwargs)
    except (NotImplementedError, RuntimeError):
        # Either numbers decide what comes out, or the call is wrong. Meta tensors raise the same for both, so
        # it runs for real: then it works, or torch's own error for real tensors comes.
        return _for_real(func, args, kwargs, written)
    results, result_spec = tree_flatten(result)
    out = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
    if not deferred and all(leaf.numel() == 0 for leaf in out):
        with plainly():
            return func(*args, **kwargs)  # there is nothing to delay
    kept = [
        versions[i] if is_deferred(leaf) else Constant(leaf) if isinstance(leaf, torch.Tensor) else leaf
        for i, leaf in enumerate(leaves)
    ]
    kept_args, kept_kwargs = tree_unflatten(kept, spec)
    names = {id(tensor) for tensor in written}
    places = [
        (place, id(leaf) in names)
        for leaf, place in zip(leaves, versions, strict=True)
        if isinstance(place, Place)
    ]
    write = Write(func, kept_args, kept_kwargs, places, [])
    if draws(func):
        _draw(write, func, args, kwargs, meta_args, meta_kwargs)
    found = _results(results, leaves, metas, write)
    if write.made or any(writes for _, writes in places):
        write.note()
    if torch.Tag.inplace_view in func.tags:
        _follow(func, args, kwargs)
    return tree_unflatten(found, result_spec)


def _results(results: list[Any], leaves: list[Any], metas: list[Any], write: Write) -> list[Any]:
    """What the operation returns, made of what it returned for the twins."""
    same = {id(meta): leaf for meta, leaf in zip(metas, leaves, strict=True) if is_deferred(leaf)}
    memories = {
        leaf.smp_twin.untyped_storage()._cdata: leaf.smp_memory for leaf in leaves if is_deferred(leaf)
    }
    found: list[Any] = []
    for number, twin in enumerate(results):
        if not isinstance(twin, torch.Tensor):
            found.append(twin)
        elif id(twin) in same:
            found.append(same[id(twin)])
        else:
            storage = twin.untyped_storage()
            memory = memories.get(storage._cdata)
            if memory is None:
                memory = memories[storage._cdata] = Memory(storage.nbytes())
                write.made.append((number, Place.of(memory, twin)))
            found.append(DeferredTensor(memory, twin))
    return found


def _draw(
    write: Write,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meta_args: tuple[Any, ...],
    meta_kwargs: dict[str, Any],
) -> None:
    """Notes the generator's state, and moves it on."""
    generator = next((a for a in [*args, *kwargs.values()] if isinstance(a, torch.Generator)), None)
    if generator is not None and kwargs.get("generator") is not generator:
        raise SMPError(f"{func._schema.name}: under delayed initialization give generator= by its name")
    write.generator = generator
    with plainly():
        write.state = noted_state(generator)
    write.kwargs = {key: value for key, value in write.kwargs.items() if key != "generator"}
    with plainly():
        if draws_blindly(func):
            advance(
                func, meta_args, {**meta_kwargs, **({"device": "cpu"} if "device" in meta_kwargs else {})}
            )
        else:
            func(*_values(args), **_values(kwargs))


def _for_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
    """Makes what it is given, and runs it: numbers are needed, or a tensor that is there is written to."""
    if any(is_deferred(tensor) for tensor in written):
        raise SMPError(
            f"{func._schema.name} changes a tensor whose initialization is delayed, in a way that depends on "
            "numbers: build that module outside smp.delay_param_initialization (enabled=False inside of it)"
        )
    with plainly():
        return func(*_values(args, looked_at=True), **_values(kwargs, looked_at=True))


def _elsewhere(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """The result is on another device."""
    if device.type != "meta":
        raise SMPError(
            f"{func._schema.name} on {device}: under delayed initialization tensors are made on the CPU; the "
            "library moves parameters itself, so leave the device out"
        )
    with plainly():
        return func(*_twins(args), **_twins(kwargs))


def _rebinds(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is ``set_`` of another deferred tensor, as torch's parametrizations do."""
    if str(func) != "aten.set_.source_Tensor" or not is_deferred(args[1]) or args[0].dtype != args[1].dtype:
        return False
    args[0].smp_memory, args[0].smp_hold = args[1].smp_memory, args[1].smp_hold
    return True


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The form of the tensor itself has changed, as its twin's has."""
    with no_dispatch(), torch.no_grad():
        func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    schema = func._schema
    if not schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, list | tuple) else (value,)
            found += [each for each in values if isinstance(each, torch.Tensor)]
    return found


def _wrapped(memory: Memory, twin: torch.Tensor) -> DeferredTensor:
    return DeferredTensor(memory, _alias(twin))


def _alias(twin: torch.Tensor) -> torch.Tensor:
    with plainly():
        return twin.detach()


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    if is_deferred(tensor):
        return tensor.smp_twin  # type: ignore[attr-defined]
    with plainly():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _twins(tree: Any) -> Any:
    return tree_map(lambda each: each.smp_twin if is_deferred(each) else each, tree)


def _values(tree: Any, *, looked_at: bool = False) -> Any:
    return tree_map(
        lambda each: value_of(each.smp_place, looked_at=looked_at) if is_deferred(each) else each, tree
    )
