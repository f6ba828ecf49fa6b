"""Two random streams: one that every mp rank replays, and one for what a stage runs.

The user's function draws from the torch generator while it is being recorded, alike on every mp rank
(layer drop, span masks). Owned modules must not disturb that stream, and what they draw must depend
neither on the schedule nor on which rank runs them: each command that draws is seeded from the state of
the replicated stream at the start of the step, the microbatch, and the command's number. Running the same
seed again gives the same numbers.

If any command of a step draws, the replicated stream is moved on by one number at the end, as it would
have moved in one process; else it stays exactly where one process would leave it.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator

import torch

_MASK = (1 << 63) - 1


class RandomStreams:
    """The seeds of one step."""

    def __init__(self) -> None:
        self._step_seed = 0

    def begin_step(self) -> int:
        """Takes the step's seed from the replicated stream, without moving it; returns it."""
        self._step_seed = self.state_digest()
        return self._step_seed

    @staticmethod
    def state_digest() -> int:
        """A number for the state that the torch generator is in."""
        state = torch.default_generator.get_state().numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 3

    def seed(self, microbatch_index: int, command_index: int) -> None:
        """Seeds the generators for one command."""
        seed = hash((self._step_seed, microbatch_index, command_index)) & _MASK
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)

    @contextlib.contextmanager
    def executing(self) -> Iterator[None]:
        """Within: the generators are the stage's; afterwards the replicated stream goes on as before."""
        torch_state = torch.default_generator.get_state()
        python_state = random.getstate()
        numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
        numpy_state = numpy_random.get_state() if numpy_random else None
        try:
            yield
        finally:
            torch.default_generator.set_state(torch_state)
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)

    @staticmethod
    def move_on() -> None:
        """Moves the replicated stream on by one number."""
        torch.rand(())
