"""Graphs of this process's device: what a stream is given, noted once and run again; see :mod:`.devices`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from .devices import home, is_host, module

__all__ = ["DeviceGraph", "can_capture", "new_pool", "unless_capturing"]

_capture = threading.Lock()


def can_capture() -> bool:
    """Whether the device has graphs."""
    return not is_host(home()) and hasattr(module(home()), "CUDAGraph")


def new_pool() -> Any:
    """Memory that graphs have together of which one goes on with what the other has computed."""
    return module(home()).graph_pool_handle()


@contextlib.contextmanager
def unless_capturing() -> Iterator[bool]:
    """Within, where it gives True: no capture is on in this process, and none begins.

    For other threads, since a capture may forbid them too to ask the device for anything.
    """
    is_free = _capture.acquire(blocking=False)
    try:
        yield is_free
    finally:
        if is_free:
            _capture.release()


class DeviceGraph:
    """Made on the current stream's device.

    Args:
        pool: memory of its own kind, for what is made while it is captured.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = module(home()).CUDAGraph()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Within: what the device is given is noted, and not done."""
        # Other threads (one that pins batches) may go on with what a capture does not allow in this one.
        graph = module(home()).graph(self._graph, pool=self._pool, capture_error_mode="thread_local")
        with _capture, graph:
            yield

    def replay(self) -> None:
        """Gives all of it to the current stream, to be done on the same memory."""
        self._graph.replay()
