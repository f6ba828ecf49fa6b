"""Errors of hooks, which autograd meets in the device's own thread.

Torch winds up its guards of the device while Python's error is still pending, and the guard of a backend in
Python is a method of Python: one that returns beside a pending error ends the process. So the method puts the
error aside (:func:`put_aside`), autograd goes on without knowing it, and the backward raises it again.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["install", "put_aside"]

_aside: list[BaseException] = []
_fetched = (ctypes.c_void_p * 3)()  # type, value, traceback
_places = [ctypes.byref(_fetched, i * ctypes.sizeof(ctypes.c_void_p)) for i in range(3)]
_fetch: Any = ctypes.pythonapi.PyErr_Fetch
_fetch.restype = None
_FIRST, _SECOND, _THIRD = _places


def put_aside() -> None:
    """Nothing else of Python may run before it: calls fail as long as the error is pending."""
    _fetch(_FIRST, _SECOND, _THIRD)
    if _fetched[1]:
        error = ctypes.cast(_fetched[1], ctypes.py_object).value
        if isinstance(error, BaseException):
            _aside.append(error)
    _fetched[:] = 0, 0, 0


class _Engine(type(torch.autograd.Variable._execution_engine)):  # type: ignore[misc]
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        _aside.clear()
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:  # "returned NULL without setting an exception"
            if not _aside:
                raise
            raise _aside.pop(0) from None


def install() -> None:
    """Gives this process's autograd the way back for such errors."""
    torch.autograd.Variable._execution_engine = _Engine()  # type: ignore[assignment]
