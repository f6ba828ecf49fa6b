"""The mode in which code runs on tensors without data."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode

__all__ = ["fake_mode"]


class _WithoutNumbers(FakeTensorConverter):
    """Fakes of real tensors, whose numbers nobody can ask for.

    From torch 2.14 on the fake of a real integer or float64 of no dimensions tells its number (``item()``, a
    slice up to it), as it was when that tensor was first met. What a call does for this one number would pass
    for what it always does.
    """

    def from_real_tensor(self, fake_mode: FakeTensorMode, t: Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
        fake = super().from_real_tensor(fake_mode, t, *args, **kwargs)
        fake.item_memo = None
        return fake


class _Forgetful(FakeTensorMode):
    """Knows real tensors while it is on only.

    Torch's own keeps weak references to those that it has met, such as parameters that code holds beside
    their module, and so they could not become away (:func:`..parameters.away.send_away`).
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._forget()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._forget()

    def _forget(self) -> None:
        self.fake_tensor_converter = _WithoutNumbers(copy_data=self.propagate_real_tensors)


def fake_mode() -> FakeTensorMode:
    """A mode that takes real tensors too, whose data then is as unknown as that of fake ones."""
    return _Forgetful()
