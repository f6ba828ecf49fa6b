"""A store for the host's own tensors: a file that has no name.

It is written and read in a background thread, so that the stage goes on computing. The file is unlinked as
soon as it is open: nothing is left behind however the process ends. Space in it is used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...errors import SMPError

__all__ = ["FOLDER_VARIABLE", "FileStore"]

FOLDER_VARIABLE = "SMP_LITE_OFFLOAD_FOLDER"


class _Moving:
    """See :class:`~.store.Transfer`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended.

        Raises:
            SMPError: it failed.
        """
        if self._ended.is_set() and self.error is not None:
            raise SMPError(f"{self.error}") from self.error
        return self._ended.is_set()

    def followed(self) -> bool:
        """Whether it has ended: the host cannot compute ahead."""
        return self.done()

    def wait(self, seconds: float) -> bool:
        """Waits until it has ended, or so long; whether it has.

        Raises:
            SMPError: it failed.
        """
        self._ended.wait(seconds)
        return self.done()

    def end(self, error: BaseException | None = None) -> None:
        """It has ended; called once."""
        self.error = error
        self._ended.set()


class FileStore:
    """A file in ``SMP_LITE_OFFLOAD_FOLDER``, else in the folder for temporary files.

    Raises:
        SMPError: no file can be made there.
    """

    def __init__(self) -> None:
        self.folder = os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SMPError(
                f"offload_activations: no file can be made in {self.folder!r}, where activations would wait "
                f"for their backward ({error}): set {FOLDER_VARIABLE} to a folder that can be written to"
            ) from error
        self.name = f"the store in {self.folder!r}"
        self._end = 0
        self._free: dict[int, list[int]] = {}  # places in the file by size
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], _Moving] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="smp-offload", daemon=True)
        self._thread.start()
        self.bytes_written = 0

    def is_working(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def place(self, num_bytes: int) -> int:
        """Space for so many bytes."""
        with self._lock:
            free = self._free.get(num_bytes)
            if free:
                return free.pop()
            self._end += num_bytes
            return self._end - num_bytes

    def free(self, place: int, num_bytes: int) -> None:
        """The space may be used again."""
        with self._lock:
            self._free.setdefault(num_bytes, []).append(place)

    def write(self, tensor: torch.Tensor, place: int) -> _Moving:
        """Begins to write a one-dimensional tensor of bytes, which must stay until that has ended."""
        return self._begin(lambda: self._move(os.pwrite, tensor, place, "written"))

    def read(self, tensor: torch.Tensor, place: int) -> _Moving:
        """Begins to read into a one-dimensional tensor of bytes."""
        return self._begin(lambda: self._move(_read_into, tensor, place, "read"))

    def settle(self) -> None:
        """The thread holds what it moves."""

    def close(self) -> None:
        """Ends the thread, when it has done what it was told."""
        self._jobs.put(None)

    def _begin(self, job: Callable[[], None]) -> _Moving:
        transfer = _Moving()
        self._jobs.put((job, transfer))
        return transfer

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, transfer = item
            error: BaseException | None = None
            try:
                job()
            except BaseException as found:
                error = found
            del job, item
            transfer.end(error)
        with contextlib.suppress(OSError):
            self._file.close()

    def _move(self, call: Callable[..., int], tensor: torch.Tensor, place: int, what: str) -> None:
        num_bytes = tensor.numel()
        memory = memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
        done = 0
        try:
            while done < num_bytes:
                moved = call(self._file.fileno(), memory[done:], place + done)
                if moved <= 0:
                    raise OSError("the file is shorter than what was written to it")
                done += moved
        except OSError as error:
            raise SMPError(
                f"offload_activations: {num_bytes} bytes of activations could not be {what} in "
                f"{self.folder!r} ({error}): set {FOLDER_VARIABLE} to a folder with more space, or write "
                "offload_activations: False"
            ) from error
        if call is os.pwrite:
            self.bytes_written += num_bytes


def _read_into(descriptor: int, memory: Any, place: int) -> int:
    return os.preadv(descriptor, [memory], place)
