"""Two random streams: one that every mp rank replays, and one for what a stage runs.

The user's function draws from the torch generator while it is being recorded, alike on every mp rank (layer
drop, span masks). Owned modules must not disturb that stream, and what they draw must depend neither on the
schedule nor on which rank runs them: each command that draws is seeded from the state of the replicated
stream at the start of the step, the microbatch, its name and how many of that name came before. Running the
same seed again gives the same numbers.

If any command of a step draws, the replicated stream is moved on by one number at the end, as it would
have moved in one process; else it stays exactly where one process would leave it.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Sequence

import torch

from ...devices import CPU
from ...record.describe.signature import token
from ...record.state.random_state import kept

_MASK = (1 << 63) - 1


class RandomStreams:
    """The seeds of one step."""

    def __init__(self) -> None:
        self._step_seed = 0

    def begin_step(self, agree: Callable[[int], int] | None = None) -> int:
        """Takes the step's seed from the replicated stream, without moving it; returns the stream's state.

        Args:
            agree: gives the ranks of one stage one seed: what is not split must draw the same on all of them.
        """
        state = self.state_digest()
        self._step_seed = state if agree is None else agree(state)
        return state

    @staticmethod
    def state_digest() -> int:
        """A number for the state that the torch generator is in."""
        state = torch.default_generator.get_state().numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 3

    def seed(self, microbatch_index: int, key: tuple[str, int]) -> None:
        """Seeds the generators for one command: ``key`` is its label and how many such drew before."""
        _seed(self._step_seed, microbatch_index, key)

    def seeding(self, microbatch_index: int, keys: Sequence[tuple[str, int]]) -> Callable[[int], None]:
        """Seeds the generators for the i-th of several calls, now and when they are computed again."""
        step_seed = self._step_seed
        return lambda number: _seed(step_seed, microbatch_index, keys[number])

    @staticmethod
    def executing(*, seeds: bool = True) -> contextlib.AbstractContextManager[None]:
        """Within: the generators are the stage's; afterwards the replicated stream goes on as before.

        Args:
            seeds: calls run that draw, for which all generators are seeded.
        """
        return kept(numpy=seeds)

    @staticmethod
    def move_on() -> None:
        """Moves the replicated stream on by one number."""
        torch.rand((), device=CPU)


def _seed(step_seed: int, microbatch_index: int, key: tuple[str, int]) -> None:
    label, number = key
    seed = hash((step_seed, microbatch_index, token(label), number)) & _MASK
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
