"""Cutting the arguments of a step into microbatches, and putting its results together.

Tensors are cut evenly along their batch axis, also inside lists, tuples, dicts and sets; objects with
``smp_slice(num_microbatches, microbatch, axis)`` are asked; everything else goes to every microbatch as it
is. A result keeps its structure: each tensor in it becomes a :class:`StepOutput` with one tensor for each
microbatch, everything else a plain list over microbatches. (SageMaker SMP developer guide,
"smdistributed.modelparallel.torch.step".)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from .structure import flatten, rebuild

_ONE_FOR_EACH = (
    "it holds one tensor for each microbatch. Take .reduce_mean() or .reduce_sum() of a loss, .concat() or "
    ".stack() of other results, .outputs for the list"
)


class StepOutput:
    """One tensor of a step's result, microbatch by microbatch.

    Attributes:
        outputs: one tensor for each microbatch.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> torch.Tensor:
        """Mean over microbatches, in the tensors' own shape."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> torch.Tensor:
        """Sum over microbatches, in the tensors' own shape."""
        total = self.outputs[0]
        for output in self.outputs[1:]:
            total = total + output
        return total

    def concat(self) -> torch.Tensor:
        """The microbatches one after another along dimension 0."""
        return torch.cat(self.outputs, dim=0)

    def detach(self) -> StepOutput:
        """Without gradients, microbatch by microbatch; transformers writes ``.detach().concat()``."""
        return StepOutput([output.detach() for output in self.outputs])

    def stack(self) -> torch.Tensor:
        """A new dimension 0 over microbatches."""
        return torch.stack(self.outputs, dim=0)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"StepOutput has no attribute {name!r}: {_ONE_FOR_EACH}")

    def _refuse(self, *args: Any) -> NoReturn:
        raise TypeError(f"a StepOutput is no tensor: {_ONE_FOR_EACH}")

    __float__ = __int__ = __getitem__ = _refuse

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)


class Splitter:
    """Cuts the arguments of one function.

    Args:
        function: the user's step function; its parameter names are the argument names.
        num_microbatches: how many.
        non_split_inputs: names of arguments that are never cut.
        input_split_axes: batch axis by argument name; others use 0.

    Raises:
        ValueError: a name that the function does not have.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str] = (),
        input_split_axes: Mapping[str, int] | None = None,
    ) -> None:
        self.signature = inspect.signature(function)
        self._name = getattr(function, "__name__", "the function")
        self.non_split_inputs = frozenset(non_split_inputs)
        self.input_split_axes = dict(input_split_axes or {})
        kinds = {parameter.kind for parameter in self.signature.parameters.values()}
        names = set(self.signature.parameters)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            for name in (*self.non_split_inputs, *self.input_split_axes):
                if name not in names:
                    raise ValueError(
                        f"smp.step: {function.__name__}() has no argument {name!r}; it has {sorted(names)}"
                    )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """The arguments of one call by their names.

        Raises:
            TypeError: the function does not take them.
        """
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"smp.step: {self._name}(): {error}") from None

    def split(
        self, bound: inspect.BoundArguments, num_microbatches: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """(args, kwargs) for each microbatch.

        Raises:
            ValueError: a batch is not divisible.
            TypeError: an argument is a data loader or an iterator.
        """
        pieces: dict[str, list[Any]] = {}
        for name, value in bound.arguments.items():
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                parts = {key: self._pieces(key, item, num_microbatches) for key, item in value.items()}
                pieces[name] = [
                    {key: part[m] for key, part in parts.items()} for m in range(num_microbatches)
                ]
            else:
                pieces[name] = self._pieces(name, value, num_microbatches)
        result = []
        for m in range(num_microbatches):
            bound.arguments = {name: parts[m] for name, parts in pieces.items()}
            result.append((bound.args, dict(bound.kwargs)))
        return result

    def samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Sizes along their batch axes of the tensors of one microbatch, as :meth:`split` has made it."""
        found = set()
        for name, value in self.signature.bind(*args, **kwargs).arguments.items():
            is_var = self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            for key, item in value.items() if is_var else [(name, value)]:
                leaves: list[Any] = []
                flatten(() if key in self.non_split_inputs else item, leaves)
                axis = self.input_split_axes.get(key, 0)
                found |= {
                    leaf.shape[axis]
                    for leaf in leaves
                    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)
                    if -leaf.dim() <= axis < leaf.dim()
                }
        return found

    def _pieces(self, name: str, value: Any, count: int) -> list[Any]:
        if name in self.non_split_inputs:
            return [value] * count
        return _cut(value, count, self.input_split_axes.get(name, 0), name)


def _cut(value: Any, count: int, axis: int, name: str) -> list[Any]:
    if hasattr(value, "smp_slice"):
        return [value.smp_slice(count, m, axis) for m in range(count)]
    if isinstance(value, nn.Module | nn.Parameter | str):
        return [value] * count
    if isinstance(value, torch.Tensor):
        return _cut_tensor(value, count, axis, name)
    if isinstance(value, DataLoader | Iterator):
        raise TypeError(
            f"smp.step: argument {name!r} is a {type(value).__name__}: take the batch out of it first and "
            "pass that"
        )
    if isinstance(value, Mapping):
        parts = {key: _cut(item, count, axis, f"{name}[{key!r}]") for key, item in value.items()}
        return [like(value, {key: part[m] for key, part in parts.items()}) for m in range(count)]
    if isinstance(value, list | tuple):
        cut = [_cut(item, count, axis, f"{name}[{i}]") for i, item in enumerate(value)]
        return [_sequence_like(value, [part[m] for part in cut]) for m in range(count)]
    if isinstance(value, Set) and any(isinstance(item, torch.Tensor) for item in value):
        cut = [_cut(item, count, axis, name) for item in value]
        return [type(value)(part[m] for part in cut) for m in range(count)]  # type: ignore[call-arg]
    return [value] * count


def _cut_tensor(tensor: torch.Tensor, count: int, axis: int, name: str) -> list[torch.Tensor]:
    if tensor.dim() == 0 or count == 1:
        return [tensor] * count
    if not -tensor.dim() <= axis < tensor.dim():
        raise ValueError(
            f"smp.step: argument {name!r} has shape {tuple(tensor.shape)} and no axis {axis}: "
            "set its batch axis in input_split_axes, or list it in non_split_inputs"
        )
    size = tensor.shape[axis]
    if not size:
        return [tensor.narrow(axis, 0, 0) for _ in range(count)]
    if size % count:
        raise ValueError(
            f"smp.step: argument {name!r} has {size} samples on axis {axis}, which microbatches={count} does "
            "not divide: change the batch size (drop_last=True drops a smaller last batch), or list the "
            "argument in non_split_inputs if it is no batch"
        )
    return list(tensor.split(size // count, dim=axis))


def like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind with other items under its keys."""
    if type(value) is dict:
        return items
    result = copy.copy(value)
    for key, item in items.items():
        result[key] = item  # type: ignore[index]
    return result


def _sequence_like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """Results of all microbatches in the structure of one.

    Where they differ in structure (lists of different lengths), a plain list over microbatches stands there,
    and only there.
    """
    flat: list[list[Any]] = []
    specs = []
    for output in outputs:
        leaves: list[Any] = []
        specs.append(flatten(output, leaves))
        flat.append(leaves)
    if all(spec == specs[0] and len(leaves) == len(flat[0]) for spec, leaves in zip(specs, flat)):
        merged = [_merge_leaf([leaves[i] for leaves in flat]) for i in range(len(flat[0]))]
        return rebuild(specs[0], iter(merged))
    first = outputs[0]
    if all(type(output) is type(first) for output in outputs):
        if isinstance(first, tuple | list) and all(len(output) == len(first) for output in outputs):
            return _sequence_like(first, [merge_outputs(items) for items in zip(*outputs, strict=True)])
        if isinstance(first, dict) and all(output.keys() == first.keys() for output in outputs):
            return like(first, {key: merge_outputs([output[key] for output in outputs]) for key in first})
    return list(outputs)


def _merge_leaf(parts: list[Any]) -> Any:
    if all(isinstance(part, torch.Tensor) for part in parts):
        return StepOutput(parts)
    if all(part is None for part in parts):
        return None
    return parts
