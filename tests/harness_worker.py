"""One rank of a `tests.harness.WorldPool`: takes a call, makes it, sends back what it returned.

Between calls everything that one test could leave behind for the next is put back: the library's
session, the environment, the random streams and torch's defaults.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from smp_lite.config import PARAMETERS_VARIABLE
from smp_lite.errors_record import FailureRecord


def serve(directory: Path) -> None:
    """Take calls until the test process closes the connection."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    log = os.open(directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(str(directory / "socket"))
    connection = Connection(peer.detach())
    connection.send_bytes(pickle.dumps((rank, os.getpid())))
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_reply(job, rank))


def _reply(job: bytes, rank: int) -> bytes:
    """A pickled 1-tuple of the result, or the pickled record of the failure."""
    environment = dict(os.environ)
    try:
        function, kwargs, parameters, keeps_session, fails = pickle.loads(job)
        _seed()
        reply = pickle.dumps((_call(function, kwargs, parameters),))
        if not keeps_session:
            _reset(environment)
    except BaseException:
        failure = FailureRecord(rank, time.time_ns(), 1, traceback.format_exc())
        if fails:
            _reset(environment)
        return pickle.dumps(failure)
    return reply


def _call(function: str, kwargs: dict[str, Any], parameters: Mapping[str, Any] | None) -> Any:
    if parameters is None:
        os.environ.pop(PARAMETERS_VARIABLE, None)
    else:
        os.environ[PARAMETERS_VARIABLE] = json.dumps(parameters)
    if "SMP_LITE_TESTS_EVERYTHING" in os.environ:
        from tests.default_device import put_all_there

        put_all_there()
    elif "SMP_LITE_PRETENDED_DEVICES" in os.environ:
        from tests.pretended_device.backend import install
        from tests.pretended_device.sharing import offer

        install()
        offer()
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**kwargs)


def _seed() -> None:
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(0)
        if torch.cuda.is_available():  # the same operations give the same bits
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _reset(environment: dict[str, str]) -> None:
    # Only what was imported can have left something behind.
    if (starting := sys.modules.get("smp_lite.lifecycle.starting")) is not None:
        starting.reset()
    if (order := sys.modules.get("tests.pretended_device.order")) is not None:
        order.forget()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
