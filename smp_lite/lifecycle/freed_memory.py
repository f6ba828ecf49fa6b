"""What a training process frees it will need again in the next step, so it keeps it.

glibc's ``malloc`` gives large blocks back to the system when they are freed, and takes others, page by page,
when the next microbatch wants as much: in a step of a GPT of d 512 on a CPU that was a tenth of the time.
PyTorch has an allocator that keeps memory for GPUs, and none for CPUs.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_freed_memory"]

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**31 - 1
"""As much stays at the end of the heap; no larger number can be said."""
_LARGE_BYTES = 64 << 20
"""From here on a block has pages of its own, and goes back: else the heap would be cut into pieces."""


def keep_freed_memory() -> None:
    """Tells malloc, unless the user has told it something (``MALLOC_...``), or it is another malloc."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    if "malloc" in os.environ.get("LD_PRELOAD", "") or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no glibc
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
