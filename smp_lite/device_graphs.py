"""Graphs of this process's device: what a stream is given, noted once and run again; see :mod:`.devices`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .device_streams import queue_behind, side_stream, within
from .devices import event, home, is_host, module, synchronize
from .errors import SMPError
from .plan.collecting import without_gc

__all__ = ["CaptureSpoilt", "DeviceGraph", "can_capture", "new_pool", "unless_capturing"]

_capture = threading.Lock()
_streams: dict[torch.device, Any] = {}  # on which all captures are


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


def _stream() -> Any:
    if home() not in _streams:
        _streams[home()] = side_stream()
    return _streams[home()]


def _forget_workspaces() -> None:
    """Matrix products make others from now on.

    They keep one for each stream that they have been on. One of a capture lies in the memory of its graph and
    goes with it; some versions of torch (2.12, 2.13) give back all of a stream's as soon as one of its graphs
    goes. So each capture has its own (as in torch's ``torch/_inductor/cudagraph_trees.py``).
    """
    forget = getattr(torch._C, f"_{home().type}_clearCublasWorkspaces", None)
    if forget is not None:
        forget()


class CaptureSpoilt(SMPError):
    """The device has not ended a capture properly; torch's memory of it may count as captured for good."""


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
        """Within: what the device is given is noted, and not done.

        Raises:
            CaptureSpoilt: something within is what no capture allows, and the device has given it up.
        """
        # Not torch.cuda.graph: it gives cached memory back to the driver, which other ranks may have mapped,
        # and stays on its stream for good where a capture does not end well.
        synchronize()
        computed = event()
        # In what Python collects there may be something that a capture forbids to give back.
        with _capture, within(_stream()), without_gc():
            queue_behind(computed)
            _forget_workspaces()
            # Other threads (one that pins batches) may go on with what a capture forbids this one.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                try:
                    self._graph.capture_end()
                except RuntimeError as error:
                    raise CaptureSpoilt(
                        f"{home()} has given up the capture of a graph ({str(error).partition(chr(10))[0]}), "
                        "after which torch's memory there is not to be relied on: start the job again "
                        "without SMP_LITE_CUDA_GRAPHS=1"
                    ) from error
                finally:
                    _forget_workspaces()

    def replay(self) -> None:
        """Gives all of it to the current stream, to be done on the same memory."""
        self._graph.replay()
