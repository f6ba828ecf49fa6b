"""Whole tensors of one process and of several ranks, compared up to rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["Comparison", "allowed", "difference"]

_OF_DTYPE = {torch.float64: 1e-9, torch.bfloat16: 0.1, torch.float16: 0.1}


class Comparison:
    """What was compared so far.

    Attributes:
        texts: what differs.
        largest: the largest difference that is let pass, over the largest number of what was expected.
        num_compared: tensors.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.largest = 0.0
        self.num_compared = 0

    def tensors(self, what: str, expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> bool:
        """Whether they are equal up to rounding; notes it if not.

        Args:
            what: for the text.
            expected, found: of one process, and of the ranks.
            least: differences are taken relative to this number at least.
        """
        self.num_compared += 1
        if expected.shape != found.shape:
            self.texts.append(
                f"{what} has the shape {list(found.shape)} on the ranks and {list(expected.shape)} in one "
                "process"
            )
            return False
        by = difference(expected, found, least)
        if by <= allowed(expected):
            self.largest = max(self.largest, by)
            return True
        self.texts.append(f"{what} differs by {by:.2g} of its largest number: {_shown(found, expected)}")
        return False

    def all_of(
        self,
        kind: str,
        expected: Mapping[str, torch.Tensor | None],
        found: Mapping[str, torch.Tensor | None],
    ) -> list[str]:
        """Compares by name; returns the names that differ, in the order of ``expected``."""
        least = max(
            (float(t.abs().max()) for t in expected.values() if t is not None and t.numel()), default=0.0
        )
        wrong = []
        for name, tensor in expected.items():
            what = f"{kind} of {name}"
            if name not in found:
                self.texts.append(f"{what} is on no rank")
            elif (other := found[name]) is None and tensor is None:
                self.num_compared += 1
                continue
            elif other is None or tensor is None:
                has = "in one process" if other is None else "on the ranks"
                self.texts.append(f"{what} is there {has} only")
            # Some are nothing but rounding: those are compared with the largest of all.
            elif self.tensors(what, tensor, other, least / 100):
                continue
            wrong.append(name)
        for name in found.keys() - expected.keys():
            self.texts.append(f"{kind} of {name} is not in one process's model")
            wrong.append(name)
        return wrong


def allowed(tensor: torch.Tensor) -> float:
    """Largest relative difference that rounding may make."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return _OF_DTYPE.get(tensor.dtype, 1e-4)


def difference(expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> float:
    """The largest, over the largest number expected, or over ``least`` if that is larger."""
    if not expected.numel():
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = expected.to(wide), found.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return 0.0
    finite = one[one.isfinite()].abs()
    scale = max(float(finite.max()) if finite.numel() else 0.0, least)
    error = float((other - one)[~same].abs().max())
    return error / scale if scale and error == error else float("inf")


def _shown(found: torch.Tensor, expected: torch.Tensor) -> str:
    """The numbers at the place of the largest difference."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    place = int((found.to(wide) - expected.to(wide)).abs().nan_to_num(nan=float("inf")).argmax())
    return f"{found.flatten()[place].item():.6g} instead of {expected.flatten()[place].item():.6g}"
