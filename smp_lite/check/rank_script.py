"""What each rank of a check runs: the target, with a checker in its session.

python -m smp_lite.check.rank_script FOLDER STEPS script|function TARGET [ARGS ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..lifecycle import starting
from ..session import Session
from .in_ranks import RankChecker
from .model_script import train

__all__ = ["main", "words_of"]


def words_of(folder: str, num_steps: int, *, is_script: bool, target: str, args: Sequence[str]) -> list[str]:
    """The command line of a rank, after ``-m smp_lite.check.rank_script``."""
    return [folder, str(num_steps), "script" if is_script else "function", target, *args]


def main(words: Sequence[str]) -> None:
    """Runs the target."""
    folder, num_steps, kind, target, *args = words

    def attach(session: Session) -> None:
        session.checker = RankChecker(session, Path(folder), int(num_steps))

    starting.on_session(attach)
    if kind == "function":
        train(target, args, int(num_steps))
        return
    sys.argv = [target, *args]
    if sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # a script's own folder takes its place
    sys.path.insert(0, str(Path(target).resolve().parent))
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
