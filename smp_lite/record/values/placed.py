"""A placed value: a tensor that lives on one stage and is only described everywhere.

:class:`PlacedTensor` has shape, strides, dtype, device and ``requires_grad``, and no data. Container code
handles it like any tensor; whatever torch function is applied to it goes to the recorder that made it.
A decision on its data (``.item()``, ``if x:``) makes the ranks compute and share that number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

from ...devices import here
from ...errors import SMPError
from .meant import meant
from .torch_functions import is_metadata


class TensorMeta(NamedTuple):
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        # Reading what a tensor is must not look like a call of the user's to the recorder.
        with torch._C.DisableTorchFunction():
            return cls(
                tuple(tensor.shape),
                tuple(tensor.stride()) if tensor.layout is torch.strided else (),
                tensor.dtype,
                tensor.device,
                tensor.requires_grad,
            )

    def __repr__(self) -> str:
        """The same on all ranks, which compare it: their devices differ by their numbers."""
        return (
            f"TensorMeta({self.shape}, {self.stride}, {self.dtype}, {self.device.type}, {self.requires_grad})"
        )

    def __reduce__(self) -> Any:
        """Of another rank, it is this rank's device that a tensor will be on."""
        return _received, (*self[:3], self.device.type, self.requires_grad)

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


def _received(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, kind: str, requires_grad: bool
) -> TensorMeta:
    return TensorMeta(shape, stride, dtype, here(kind), requires_grad)


class Listener(Protocol):
    """Who made a placed tensor and hears of every torch function that is applied to it."""

    def torch_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def gradient_of(self, placed: PlacedTensor) -> torch.Tensor | None: ...

    def viewed(self, tensor: torch.Tensor, views: list[Any]) -> None: ...

    def attributes_of(self, full: str) -> dict[str, Any]: ...


_make_wrapper = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


class PlacedTensor(torch.Tensor):
    """A tensor of one stage, seen from every rank. Made by the recorder only."""

    __module__ = "torch"  # by which opt_einsum and others choose the library that computes with it
    smp_recorder: Listener | None = None
    smp_value: int
    smp_stage: int
    smp_meta: TensorMeta
    smp_parameter: str | None = None  # its name, if it stands for one
    smp_aliases: list[Any] | None = None  # who shares its memory, itself too: see ..commands.binding
    smp_microbatch: int = -1
    smp_data: torch.Tensor | None = None  # set after the step, if somebody still holds the value
    smp_is_late: bool = False  # the data stays on its stage until somebody asks

    @staticmethod
    def __new__(cls, meta: TensorMeta) -> PlacedTensor:
        return _make_wrapper(  # type: ignore[no-any-return]
            cls,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )

    def __init__(self, meta: TensorMeta) -> None:
        self.smp_meta = meta

    @classmethod
    def of_value(
        cls, meta: TensorMeta, recorder: Listener, stage_index: int, serial: int, value: int
    ) -> PlacedTensor:
        """One for a value of a microbatch; in one go, since every recorded call makes one."""
        shape, stride, dtype, device, requires_grad = meta
        placed: PlacedTensor = _make_wrapper(
            cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        placed.__dict__ = {
            "smp_meta": meta,
            "smp_recorder": recorder,
            "smp_stage": stage_index,
            "smp_microbatch": serial,
            "smp_value": value,
            "smp_aliases": None,
        }
        return placed

    def __getattr__(self, name: str) -> Any:
        """What the user's code has set on the parameter that it stands for."""
        if not name.startswith("smp_") and self.smp_parameter is not None and self.smp_recorder is not None:
            found = self.smp_recorder.attributes_of(self.smp_parameter)
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.called(meant(func), args, kwargs or {})

    @classmethod
    def called(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function that has a placed tensor among its arguments."""
        name = getattr(func, "__name__", "")
        if name in ("__repr__", "__str__", "__format__") and args[0].smp_recorder is None:
            return describe(args[0])
        if name == "__get__" and (found := _own_property(func, args[0])) is not _NONE_OF_OURS:
            return found
        if is_metadata(func, name):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        recorder = first.smp_recorder if type(first) is PlacedTensor else None
        if recorder is None:
            recorder = _recorder_of(args, kwargs)
        if recorder is None:
            raise RuntimeError(
                f"{name}() was called on a value that was made inside an smp.step and has no data here: "
                "return it from the step function, then it is valid on every rank of the mp group"
            )
        return recorder.torch_function(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").rstrip("_")
            raise SMPError(
                f"torch.distributed's {name}() inside an smp.step, on a value that lives on one stage: torch "
                f"{torch.__version__} tells nobody of this call before it runs. Call another one there "
                "(all_reduce, all_gather), or this one on a result when the step has returned"
            )
        raise RuntimeError(
            f"{func} was called on a tensor of another stage in a way that cannot be recorded. "
            "Move the call into a module that is placed on one stage, or return the tensor from the step."
        )


NUM_OWN = 6
"""How many attributes a placed value has that stands for no parameter, and that nobody has given any."""
_NONE_OF_OURS = object()
_OF_GRAPH_OR_MEMORY = ("_base", "_version", "output_nr")
_OWN_ATTRIBUTES = frozenset(PlacedTensor.__annotations__)


def _own_property(func: Any, placed: PlacedTensor) -> Any:
    """What a placed tensor knows better than torch."""
    name = getattr(func.__self__, "__name__", "")
    if name == "is_leaf":
        return _is_leaf(placed)
    if name == "grad" and placed.smp_recorder is not None:
        return placed.smp_recorder.gradient_of(placed)
    if name == "grad_fn" and placed.smp_recorder is not None:
        return None if _is_leaf(placed) else _Node()
    if name in _OF_GRAPH_OR_MEMORY:
        raise SMPError(
            f"{name} was asked of a value of a step, which is made later, on the rank of its stage: what it "
            "will be is not known before"
        )
    return _NONE_OF_OURS


def _is_leaf(placed: PlacedTensor) -> bool:
    return placed.smp_parameter is not None or not placed.smp_meta.requires_grad


class _Node:
    """Stands for the node of autograd's graph that a placed tensor will come from."""

    def __getattr__(self, name: str) -> Any:
        raise SMPError(
            f"grad_fn.{name} was asked of a value of a step, whose autograd graph is made later, where the "
            "value is made: use register_hook() of the value"
        )


def has_attributes(tensor: torch.Tensor) -> bool:
    """Whether Python code has set attributes on a tensor, which another tensor would not have."""
    if type(tensor) is PlacedTensor:
        if tensor.smp_parameter is not None and tensor.smp_recorder is not None:
            return bool(tensor.smp_recorder.attributes_of(tensor.smp_parameter))
        return not tensor.__dict__.keys() <= _OWN_ATTRIBUTES
    return type(tensor) is torch.Tensor and bool(tensor.__dict__)


def describe(placed: PlacedTensor) -> str:
    meta = placed.smp_meta
    return f"PlacedTensor(stage={placed.smp_stage}, shape={meta.shape}, dtype={meta.dtype})"


def holds_placed(items: Iterable[Any]) -> bool:
    """Whether one of them is a placed tensor, or a list or tuple with one in it."""
    return any(
        type(item) is PlacedTensor or (isinstance(item, list | tuple) and holds_placed(item))
        for item in items
    )


def _recorder_of(args: Any, kwargs: Any) -> Listener | None:
    """The recorder of the first live placed value among nested arguments."""
    pending = [args, tuple(kwargs.values())]
    while pending:
        item = pending.pop()
        if type(item) is PlacedTensor:
            if item.smp_recorder is not None:
                return item.smp_recorder
        elif isinstance(item, tuple | list):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
    return None
