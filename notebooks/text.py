"""Text to train on, as bytes: a folder's files, or the Python standard library's own source.

The library needs no download: every machine that runs the training script has it, it is megabytes
of varied English and code, and a model of it visibly learns within a minute. The order of files is
fixed, so all processes that see one folder read the same text, and none has to send it to another.

Batches are drawn, not iterated: the step number seeds one draw for the whole job, and each
data-parallel replica takes its slice. Hence all model-parallel ranks of a replica hold the same
batch without talking, replicas hold different ones, and a run can be resumed at any step.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["get_batch", "read_text"]

_SUFFIXES = (".py", ".txt")
# Installed packages sit inside the library's folder on most systems and differ between machines.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def read_text(max_bytes: int = 4_000_000, folder: str | os.PathLike[str] | None = None) -> Tensor:
    """Reads up to ``max_bytes`` of a folder's ``.py`` and ``.txt`` files into a uint8 tensor ``[N]``.

    Args:
        max_bytes: where to stop.
        folder: read with the folders below it; None: the standard library of this interpreter.

    Raises:
        RuntimeError: there are no such files.
    """
    folder = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    text = bytearray()
    for path in _text_files(folder):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise RuntimeError(
            f"{folder} holds no text in {' or '.join(_SUFFIXES)} files: name a folder that does, or none for "
            "the library of a standard Python installation"
        )
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def get_batch(
    text: Tensor,
    step: int,
    *,
    batch_size: int,
    context: int,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draws the batch of one step for one data-parallel replica.

    Args:
        text: uint8 bytes ``[N]``.
        step: which draw; the same step gives the same batch, in any process.
        batch_size: samples for each replica.
        context: T, tokens in a sample.
        dp_rank: which replica asks.
        dp_size: how many replicas share the draw.

    Returns:
        Tokens and targets, int64, both ``[batch_size, T]``; target t is the byte after token t.

    Raises:
        ValueError: ``text`` is too short for one sample.
    """
    num_starts = len(text) - context
    if num_starts < 1:
        raise ValueError(
            f"context={context} needs a text of at least {context + 1} bytes, not {len(text)}: "
            "read more text or shorten the context"
        )
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(num_starts, (dp_size, batch_size), generator=generator)[dp_rank]
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _text_files(folder: Path) -> Iterator[Path]:
    for parent, folder_names, file_names in os.walk(folder):
        folder_names[:] = sorted(set(folder_names) - _SKIPPED_FOLDERS)
        for name in sorted(file_names):
            if name.endswith(_SUFFIXES):
                yield Path(parent, name)
