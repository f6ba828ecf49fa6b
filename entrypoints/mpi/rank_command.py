"""The command of a rank, and how its words come whole through mpirun.

mpirun cuts its command line at a lone colon, behind which it expects another program. So where the
script's arguments have one, all words travel as one JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["decode_words", "rank_command"]

_ENCODED = "--encoded"


def rank_command(python: str, words: Sequence[str]) -> tuple[str, ...]:
    """What mpirun starts so that a rank runs `words`: `script args...` or `-m module args...`."""
    passed = (_ENCODED, json.dumps(words)) if ":" in words else words
    return (python, "-P", "-m", "smp_lite.entrypoints.rank_main", *passed)


def decode_words(argv: Sequence[str]) -> list[str]:
    """The words of a rank's command, from the arguments that it was started with."""
    return list(json.loads(argv[1]) if argv[0] == _ENCODED else argv)
