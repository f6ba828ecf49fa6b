"""Random numbers that torch functions draw in the step function and in container code.

Plain torch draws them from the process's generator, in the order of the lines. Here the function runs later
and on one rank, so it is given the state that the generator has where it stands, and the generator of every
rank moves on as if it had run: the function is run on stand-ins of the same shapes, since how many numbers
it takes depends on those. Whether that is so is tried once, with stand-ins of two kinds; a function for
which it is not (``torch.poisson``) runs for real where it stands, and the ranks take over its owner's
generator.

What modules draw that are called whole is another matter: see :mod:`smp_lite.runtime.stage.random_streams`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...devices import generators, home
from ..values.calls import Arguments
from ..values.placed import PlacedTensor, TensorMeta

__all__ = ["Draw", "Draws", "States", "at_states", "default_states"]

States = list[tuple[torch.Generator, torch.Tensor]]
"""Generators, and the state of each before a function draws."""


class Draw:
    """One function that draws, with what it takes to draw again.

    Attributes:
        states: of the generators before it.
    """

    def __init__(self, func: Callable[..., Any], arguments: Arguments) -> None:
        self.func = func
        self.spec = arguments.spec
        self.leaves = [_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments.leaves]
        others = [leaf for leaf in arguments.leaves if isinstance(leaf, torch.Generator)]
        self.generators = [*generators(), *others]
        self.states: States = []

    def note(self) -> None:
        """The generators are where the function stands."""
        self.states = [(generator, generator.get_state()) for generator in self.generators]

    def advance(self, fill: float | None = 0.5) -> None:
        """Moves the generators on as the function would. May raise whatever it raises on stand-ins."""
        leaves = [_stand_in(leaf, fill) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves]
        arguments = Arguments(leaves, self.spec)
        args, kwargs = arguments.build(arguments.tensors)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self.func(*args, **kwargs)


class Draws:
    """The draws of one recorder's steps."""

    def __init__(self) -> None:
        self._by_shape: dict[Any, bool] = {}
        self._expected: list[torch.Tensor] | None = None
        self.drew_otherwise = False

    def begin_step(self) -> None:
        self.drew_otherwise = False
        self._expected = default_states()

    def take(self, func: Callable[..., Any], arguments: Arguments, key: Any) -> tuple[Draw, bool]:
        """The draw of a function that stands here, and whether the generators have moved on by it."""
        self.look()
        draw = Draw(func, arguments)
        draw.note()
        if key not in self._by_shape:
            self._by_shape[key] = self._try(draw)
        moved = self._by_shape[key]
        if moved:
            draw.advance()
        self._expected = default_states()
        return draw, moved

    def look(self) -> None:
        """Notices draws of other kinds since the last one taken."""
        if self._expected is not None and any(
            not torch.equal(expected, state)
            for expected, state in zip(self._expected, default_states(), strict=True)
        ):
            self.drew_otherwise = True

    def take_over(self, states: Sequence[torch.Tensor], draw: Draw) -> None:
        """The generators go on from where the owner's went."""
        for (generator, _), state in zip(draw.states, states, strict=True):
            generator.set_state(state)
        self._expected = default_states()

    @staticmethod
    def _try(draw: Draw) -> bool:
        """Whether the numbers taken depend on shapes only."""
        found = []
        try:
            for fill in (0.5, None):
                with at_states(draw.states):
                    draw.advance(fill)
                    found.append([generator.get_state() for generator, _ in draw.states])
        except Exception:
            # Stand-ins will not do: running it for real shows why.
            return False
        return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@contextlib.contextmanager
def at_states(states: States) -> Iterator[None]:
    """Within: the generators are at these states; afterwards where they were."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    for generator, state in states:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def default_states() -> list[torch.Tensor]:
    """Of torch's default generators: the CPU's, and the device's."""
    return [generator.get_state() for generator in generators()]


def _meta(tensor: torch.Tensor) -> TensorMeta:
    meta = tensor.smp_meta if type(tensor) is PlacedTensor else TensorMeta.of(tensor)
    # What has no memory here (an away tensor) draws from the generator of where it lives.
    return meta._replace(device=home()) if meta.device.type == "meta" else meta


def _stand_in(meta: TensorMeta, fill: float | None) -> torch.Tensor:
    """A real tensor of that form; its values are between 0 and 1, or 0 or 1, as probabilities are."""
    if meta.stride or not meta.shape:
        tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    else:
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
    if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        return tensor.fill_(1)
    if fill is not None:
        return tensor.fill_(fill)
    length = max(meta.num_bytes // meta.dtype.itemsize, 1)
    values = torch.linspace(0.05, 0.95, length, device=meta.device)
    return tensor.copy_(values[: tensor.numel()].view(meta.shape)) if tensor.numel() else tensor
