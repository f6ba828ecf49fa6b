"""The device's random numbers: a stream of its own for each device, drawn by the CPU's generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

GENERATORS: list[torch.Generator] = []
"""One for each device."""

_takes_any = False


def take_any_generator() -> None:
    """Those of the CPU as well, for scripts that make theirs as they do for the CPU: torch has no others."""
    global _takes_any
    _takes_any = True


@contextlib.contextmanager
def generators_of(
    op: Any, device: torch.device, args: Any, kwargs: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The keyword arguments with which the operation draws from the device's stream.

    Raises:
        RuntimeError: a generator of the CPU was given.
    """
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
    if given and _takes_any:
        yield kwargs
        return
    if any(each is not own for each in given for own in GENERATORS):
        raise RuntimeError(f"Expected a '{device.type}' device type for generator but found 'cpu'")
    own = GENERATORS[device.index or 0]
    names = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    if "generator" in names:
        yield {**kwargs, "generator": own}
        return
    # The kernel draws from the CPU's stream.
    cpus = torch.default_generator.get_state()
    torch.default_generator.set_state(own.get_state())
    try:
        yield kwargs
    finally:
        own.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(cpus)
