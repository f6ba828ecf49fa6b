"""What the modules of a model give, call by call, in numbers that two processes can compare.

Ranks that share a stage round otherwise than one process, so bytes cannot be compared. Of each tensor its
norm and two weighted sums are noted: two tensors with all three alike are alike. Calls during recording, on
tensors without data, are not noted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..record.values.structure import flatten

__all__ = ["ModuleCalls", "Outline", "outlines_differ"]


class Outline(NamedTuple):
    """Of one tensor."""

    shape: tuple[int, ...]
    norm: float
    sums: tuple[float, float]


class ModuleCalls:
    """Listens to the calls of a model's modules.

    Args:
        root: the model.

    Attributes:
        outlines: by module name, of what each call gave, in the order in which the calls ended.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(module): name for name, module in root.named_modules() if name}
        self.outlines: dict[str, list[tuple[Outline, ...]]] = {}
        self._innermost: tuple[BaseException, str] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within: calls are noted."""
        inner = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module))
            if name is None:
                return inner(module, *args, **kwargs)
            try:
                result = inner(module, *args, **kwargs)
            except BaseException as error:
                if self._innermost is None or self._innermost[0] is not error:
                    self._innermost = (error, name)
                raise
            self._note(name, result)
            return result

        nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__call__ = inner  # type: ignore[method-assign]

    def module_of(self, error: BaseException) -> str:
        """The innermost module that was running when this error, or its cause, was raised; ``""``: none."""
        if self._innermost is None:
            return ""
        raised: BaseException | None = error
        while raised is not None:
            if raised is self._innermost[0]:
                return self._innermost[1]
            raised = raised.__cause__ or raised.__context__
        return ""

    def _note(self, name: str, result: Any) -> None:
        leaves: list[Any] = []
        flatten(result, leaves)
        tensors = [leaf for leaf in leaves if type(leaf) in (torch.Tensor, nn.Parameter)]
        if tensors and not any(tensor.is_meta for tensor in tensors):
            self.outlines.setdefault(name, []).append(tuple(map(_outline, tensors)))


def _outline(tensor: torch.Tensor) -> Outline:
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        data = tensor.detach()
        data = data.to_dense() if data.layout is not torch.strided else data
        data = (torch.view_as_real(data) if data.is_complex() else data).double().reshape(-1)
        places = torch.arange(data.numel(), dtype=torch.float64, device=data.device)
        sums = (float(data @ places.cos()), float(data @ (places * places).sin()))
        return Outline(tuple(tensor.shape), float(data.norm()), sums)


def outlines_differ(one: tuple[Outline, ...], other: tuple[Outline, ...], tolerance: float) -> bool:
    """Whether two results, of the same shapes, are other numbers by more than a relative tolerance."""
    for mine, theirs in zip(one, other, strict=True):
        numbers = list(zip((mine.norm, *mine.sums), (theirs.norm, *theirs.sums), strict=True))
        if any(math.isfinite(a) != math.isfinite(b) for a, b in numbers):
            return True
        scale = max(mine.norm, theirs.norm)
        if any(math.isfinite(a) and abs(a - b) > tolerance * scale for a, b in numbers):
            return True
    return False
