"""The tables of a module's parameters and buffers while a step is recorded.

Python code finds a parameter or a buffer in the dicts ``module._parameters`` and ``module._buffers``. During
recording both are replaced by dicts that know more: the first holds placed values and notices when somebody
puts another tensor in (``torch.func.functional_call``); the second notices reads and changes of buffers,
since a call that was recorded and has not run yet may change a buffer, or may still need its present value.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, Protocol

import torch
from torch import nn

from ...errors import SMPError

__all__ = ["BufferListener", "BufferTable", "ParameterTable", "owner_of", "plain_parameters", "plain_table"]

Tensors = dict[str, "torch.Tensor | None"]


class ParameterTable(dict[str, Any]):
    """Placed parameters of one module.

    Args:
        placed: by their own names.
        owner: identifies the module.
        changed: gets ``owner`` while the table holds anything but ``placed``.
    """

    def __init__(self, placed: Tensors, owner: int, changed: set[int]) -> None:
        super().__init__(placed)
        self.placed = dict(placed)
        self._owner, self._changed = owner, changed

    def reset(self, placed: Tensors) -> None:
        """Other placed values, as if the table were new."""
        self.placed = dict(placed)
        super().clear()
        super().update(placed)
        self._changed.discard(self._owner)

    def _look(self) -> None:
        same = self.keys() == self.placed.keys() and all(self[k] is v for k, v in self.placed.items())
        (self._changed.discard if same else self._changed.add)(self._owner)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._look()

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._look()

    def pop(self, *args: Any) -> Any:
        value = super().pop(*args)
        self._look()
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self._look()

    def setdefault(self, key: str, default: Any = None) -> Any:
        value = super().setdefault(key, default)
        self._look()
        return value

    def clear(self) -> None:
        super().clear()
        self._look()


class BufferListener(Protocol):
    """Who hears of buffers."""

    def buffer_read(self, module: nn.Module, name: str, value: Any) -> Any:
        """A buffer is about to be seen by Python code; returns what it shall see."""

    def buffer_set(self, module: nn.Module, name: str, value: Any) -> None:
        """A buffer is about to be bound anew, or deleted."""


class BufferTable(dict[str, Any]):
    """The buffers of one module; they stay in the module's own dict, ``real``."""

    def __init__(self, module: nn.Module, real: Tensors, listener: BufferListener) -> None:
        super().__init__()
        self.real = real
        self._module, self._listener = module, listener

    def _read(self, key: str) -> Any:
        return self._listener.buffer_read(self._module, key, self.real[key])

    def __getitem__(self, key: str) -> Any:
        return self._read(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._listener.buffer_set(self._module, key, value)
        self.real[key] = value

    def __delitem__(self, key: str) -> None:
        self._listener.buffer_set(self._module, key, None)
        del self.real[key]

    def __contains__(self, key: object) -> bool:
        return key in self.real

    def __iter__(self) -> Iterator[str]:
        return iter(self.real)

    def __len__(self) -> int:
        return len(self.real)

    def get(self, key: str, default: Any = None) -> Any:
        return self._read(key) if key in self.real else default

    def keys(self) -> KeysView[str]:
        return self.real.keys()

    def values(self) -> ValuesView[Any]:
        return {key: self._read(key) for key in self.real}.values()

    def items(self) -> ItemsView[str, Any]:
        return {key: self._read(key) for key in self.real}.items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self.real and default:
            return default[0]
        value = self._read(key)
        del self[key]
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def plain_table(table: dict[str, Any]) -> dict[str, Any]:
    """What a table holds, without anybody hearing of it."""
    return table.real if type(table) is BufferTable else table


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The part of a module that has the parameter or buffer of that name, and its name there."""
    prefix, _, own = name.rpartition(".")
    return module.get_submodule(prefix), own


def plain_parameters(module: nn.Module) -> dict[str, Any]:
    """The module's own table of parameters; never while it is swapped.

    Raises:
        SMPError: the module has none in Python, as those of ``torch.jit.trace``.
    """
    table = module.__dict__.get("_parameters")
    if table is None:
        name = getattr(module, "original_name", type(module).__name__)
        names = ", ".join(own for own, _ in module.named_parameters()) or "no parameters"
        raise SMPError(
            f"a part of the model, {name} with {names}, was made by torch.jit.trace, and a step cannot take "
            "its parameters to a stage: leave that part as it was before, or give it to torch.jit.script"
        )
    return table  # type: ignore[no-any-return]
