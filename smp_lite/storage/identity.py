"""Which save a file belongs to: written into every part, so that parts of different saves are told apart."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ..errors import SMPError
from .torch_files import read_note

__all__ = ["Identity", "read_identity"]

_FORMAT = 1


@dataclass(frozen=True)
class Identity:
    """One part of one save."""

    save: str
    """A random name that all ranks of the save agreed on."""
    tag: str
    partial: bool
    step: int
    """Calls of step functions in that process before the save."""
    saved_at_ns: int
    """Since the epoch, by rank 0's clock."""
    partitions: int
    mp_size: int
    """Ranks of an mp group: as many as partitions, or 1 where one process played all of them."""
    partition: str | None
    """Digest of the partition; None: no model was saved, or it was not partitioned."""
    parts: tuple[str, ...]
    """What was saved: of "model", "optimizer", "user_content"."""
    part: str = ""
    """Which of them is in this file."""
    mp_rank: int = 0
    pieces: int = 1
    """How many ranks hold one copy of sharded parameters together."""
    piece: int = 0
    """Whose of them it is."""

    def of(self, part: str, mp_rank: int = 0, piece: int = 0) -> Identity:
        """The same save's identity for one of its files."""
        return replace(self, part=part, mp_rank=mp_rank, piece=piece)

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Raises ValueError where a later version of the library wrote it."""
        content = json.loads(text)
        if content.pop("format", None) != _FORMAT:
            raise ValueError("written by another version of smp_lite")
        return cls(**{**content, "parts": tuple(content["parts"])})

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.saved_at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"save {self.save[:8]} ({self.tag!r} at step {self.step}, {when})"


def read_identity(path: Path) -> Identity | None:
    """Whose part a file is; None: no ``save_checkpoint`` of this library wrote it.

    Raises:
        SMPError: another version of the library wrote it.
        OSError: it cannot be opened.
    """
    note = read_note(path)
    if note is None or '"format"' not in note:  # smp.save notes something else
        return None
    try:
        return Identity.from_json(note)
    except (ValueError, TypeError, KeyError) as error:
        raise SMPError(f"{str(path)!r} cannot be told apart from other saves: {error}") from error
