"""What torch's own allocator gave and took back, as its profiler saw it: bytes inside kernels included."""

from __future__ import annotations

from itertools import accumulate

import torch

__all__ = ["memory_profile", "most_and_left"]


def memory_profile() -> torch.profiler.profile:
    """Notes every allocation and release on the CPU within a ``with`` block."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def most_and_left(profile: torch.profiler.profile) -> tuple[int, int]:
    """The most bytes that were allocated and not yet released, and those still allocated at the end.

    Memory that was there before counts as nothing, and so does its release.
    """
    events = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    changes = [num_bytes for _, num_bytes in sorted(events, key=lambda event: event[0])]
    alive = list(accumulate(changes, initial=0))
    return max(alive), alive[-1]
