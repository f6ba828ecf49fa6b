"""All random streams of the process: torch's (its device's too), Python's and numpy's, taken and put back."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Iterator
from typing import Any

from ...devices import generators

__all__ = ["all_states", "kept", "put_back_states", "python_state", "taken_states"]


@contextlib.contextmanager
def kept(*, numpy: bool = True) -> Iterator[None]:
    """Within: whatever is drawn is given back at the end; ``numpy``: also numpy's, which takes 0.1 ms."""
    states = taken_states(numpy=numpy)
    try:
        yield
    finally:
        put_back_states(states)


def taken_states(*, numpy: bool = True) -> tuple[Any, ...]:
    """Where all streams are, to put back here or in another process."""
    numpy_random = _numpy_random() if numpy else None
    numpy_state = numpy_random.get_state() if numpy_random else None
    return [generator.get_state() for generator in generators()], random.getstate(), numpy_state


def put_back_states(states: tuple[Any, ...]) -> None:
    """What :func:`taken_states` has taken; numpy's only where it is loaded on both sides."""
    torch_states, python_state, numpy_state = states
    for generator, state in zip(generators(), torch_states, strict=True):
        generator.set_state(state)
    random.setstate(python_state)
    if numpy_state is not None and (numpy_random := _numpy_random()):
        numpy_random.set_state(numpy_state)


def python_state() -> tuple[Any, ...]:
    """Where Python's and numpy's streams are, to compare; torch's is not in it."""
    numpy_random = _numpy_random()
    if numpy_random is None:
        return (random.getstate(),)
    name, keys, *rest = numpy_random.get_state()
    return random.getstate(), name, keys.tobytes(), *rest


def all_states() -> tuple[Any, ...]:
    """Where all streams are, to compare."""
    states = [generator.get_state() for generator in generators()]
    # Not .numpy(): inside a fake run that is a fake array's memory.
    return (*[ctypes.string_at(state.data_ptr(), state.nbytes) for state in states], *python_state())


def _numpy_random() -> Any:
    return sys.modules["numpy"].random if "numpy" in sys.modules else None
