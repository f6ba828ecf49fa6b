"""The user's source line behind a call, for warnings and errors."""

from __future__ import annotations

import sys
import warnings

import torch

from ...source_files import folders_of

HOOKS_WITHOUT_EFFECT = (
    "saved-tensor hooks (offloading) around modules of several stages do nothing: use them inside a module "
    "that lies on one stage"
)
CHECKPOINT_BETWEEN_MODULES = (
    "torch.utils.checkpoint around calls of several stages: each module that is called in it is computed "
    "again for itself, and what is computed between them is kept"
)

_OURS = (*folders_of(__file__, 2), *folders_of(torch.__file__))
_warned: set[tuple[str, str, int]] = set()


def user_line() -> tuple[str, int]:
    """(file, line) of the innermost frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def warn_once_at_user_line(message: str) -> None:
    """Warns once for each source line of the user's."""
    file, line = user_line()
    key = (message, file, line)
    if key not in _warned:
        _warned.add(key)
        warnings.warn_explicit(f"{message} ({file}:{line})", UserWarning, file, line)
