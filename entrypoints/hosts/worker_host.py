"""The part of a host that is not the first one: its ranks' output, and waiting for the end.

Its ranks are children of mpirun's daemon, which the first host has started here (`network`). They
write into this host's own channels, so their lines appear in this host's log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

from smp_lite.errors_record import ERROR_DIR_VARIABLE, read_failures

from ..mpi.mpirun import kill_ranks
from ..this_machine.channels import Channels
from ..this_machine.ending import Ending
from ..this_machine.launcher import Notice, RankReport, stop_requests
from ..this_machine.leftovers import kill_leftovers
from ..this_machine.screen import Screen
from .network import HostService
from .remote_daemon import daemon_environment

__all__ = ["run_worker_host"]

_POLL_S = 0.1


def run_worker_host(
    *,
    ranks: Sequence[int],
    first_host: str,
    daemon: str,
    environment: Mapping[str, str],
    key: bytes,
    port: int,
    limit_s: float,
    grace_s: float,
) -> Ending:
    """Serve the first host until it says that all is over.

    Args:
        ranks: of this host.
        first_host: its name.
        daemon: the path of mpirun's daemon here.
        environment: for the daemon and so for the ranks.
        key: of the job.
        port: to listen on.
        limit_s: seconds for the first host to come.
        grace_s: seconds that it has to end the job when this host has been told to stop.

    Raises:
        TimeoutError: the first host did not come, or went away without a word.
    """
    with (
        tempfile.TemporaryDirectory(prefix="smp-lite-") as directory,
        Channels(Path(directory), ranks, ()) as channels,
        stop_requests() as requests,
    ):
        full_environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **environment,
            **daemon_environment(daemon),
            ERROR_DIR_VARIABLE: directory,
        }

        def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [daemon, *arguments],
                env=full_environment,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                stderr=subprocess.STDOUT,
                process_group=0,
            )

        screen = Screen(set())
        notice = Notice(channels, len(ranks))
        asked: SimpleQueue[SimpleQueue[RankReport]] = SimpleQueue()

        def report() -> RankReport:
            """In the service's thread; the answer comes from the loop below, once all output is read. If it
            comes no more, this thread ends with the process, and the first host waits with a limit."""
            reply: SimpleQueue[RankReport] = SimpleQueue()
            asked.put(reply)
            return reply.get()

        service = HostService(key, port, start, report, notice.give)
        started, stopped_at = time.monotonic(), float("inf")
        try:
            while not service.ended():
                screen.take(channels, _POLL_S)
                if not asked.empty():
                    screen.take(channels, 0)
                    asked.get().put(RankReport(read_failures(directory), screen.last_lines))
                now = time.monotonic()
                if requests:
                    stopped_at = min(stopped_at, now)
                    notice.give()
                if now > stopped_at + (grace_s if len(requests) == 1 else 0):
                    return Ending(128 + signal.SIGTERM, None, "stopped by SIGTERM")
                if not service.joined and now > started + limit_s:
                    raise TimeoutError(f"host {first_host} did not come within {limit_s:g} s (port {port})")
            screen.take(channels, 0)
            screen.close()
        finally:
            service.close()
            kill_ranks(channels.rank_pids())
            kill_leftovers(directory)
    if service.exit_code is None:
        raise TimeoutError(f"host {first_host} went away and left no word")
    text = f"host {first_host} ended with exit code {service.exit_code}" if service.exit_code else ""
    return Ending(service.exit_code, None, text)
