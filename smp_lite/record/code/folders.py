"""Whose a source file is: the folders of packages, as files in them may be called."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["folders_of"]


def folders_of(file: str, levels: int = 0) -> tuple[str, ...]:
    """What the names of all files begin with that lie in a package, and of no others.

    Where the way there goes through a link (an environment that is linked to), code is called by the name
    that it was imported by, and what was asked for resolved by the other one.

    Args:
        file: of the package.
        levels: how many folders it lies below the package's own.
    """
    ways = dict.fromkeys((Path(file).absolute(), Path(file).resolve()))
    return tuple([f"{way.parents[levels]}{os.sep}" for way in ways])
