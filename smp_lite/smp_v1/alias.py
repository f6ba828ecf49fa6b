"""The package ``smdistributed`` that scripts of SMP v1 import, and where it comes onto their path.

It lies in a folder of its own, ``smp_lite/on_path``, and is nothing that pip makes importable: that one can
import ``smdistributed`` changes what transformers and SageMaker's toolkit believe to run under. So it is put
on the path of the ranks that a launcher of ours starts, and an interpreter that nobody has started knows
nothing of it. Where the original is installed it is refused: two libraries under one name, of which the path
decides, would train by one and save by the other.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ALIAS_FOLDER", "add_alias", "refuse_original"]

ALIAS_FOLDER = str(Path(__file__).parent.with_name("on_path"))
"""What is put on the path."""

_PACKAGE = "smdistributed.modelparallel"


def add_alias() -> None:
    """Makes the package importable in this process, behind everything else.

    Raises:
        ValueError: another one is importable.
    """
    refuse_original(sys.path)
    if ALIAS_FOLDER not in sys.path:
        sys.path.append(ALIAS_FOLDER)
        importlib.invalidate_caches()


def refuse_original(path: Sequence[str]) -> None:
    """Raises ValueError where a folder of the path holds the package, other than ours."""
    for place in path:
        folder = Path(place or os.getcwd(), *_PACKAGE.split("."))
        if folder.is_dir() and not folder.is_relative_to(ALIAS_FOLDER):
            raise ValueError(
                f"{_PACKAGE} is installed in {place or os.getcwd()!r} and is not smp_lite's. Two libraries "
                "of one name are not mixed: uninstall it, or use an environment without it"
            )
