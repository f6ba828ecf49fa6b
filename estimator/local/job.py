"""One training job on this machine: a `train` process for each host, watched by a thread.

The job ends with the Python that started it. Its `train` processes hold on to a pipe from here, so
they end, and their ranks with them, even where this Python is killed.

What the service would do is done here: the input is brought, the outputs are kept whatever the
ending, `MaxRuntimeInSeconds` is honoured, and a stop is SIGTERM now and SIGKILL 120 seconds later.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from .files import collect_outputs, host_names, model_address, prepare_tree
from .metrics import final_metrics
from .paths import translate_paths
from .record import JobRecord
from .request import without_effect
from .store import DownloadStopped, Store

__all__ = ["LocalTrainingJob", "log_files"]

_POLL_S = 0.05
_KILL_AFTER_S = 120.0
"""Between SIGTERM and SIGKILL, as documented for StopTrainingJob."""
_PEER_FAILED_S = 5.0
"""How long the other hosts may take to end by themselves when one has failed."""
_REASON_CHARACTERS = 1024
_LAST_LINES = 10


class LocalTrainingJob:
    """A job from its request on.

    Args:
        request: of CreateTrainingJob.
        directory: for everything of this job; there from `start` on.
        store: for its data.
        region: told to the script.

    Raises:
        ValueError: the outputs have no place to go to.
    """

    def __init__(self, request: Mapping[str, Any], directory: Path, store: Store, region: str) -> None:
        self.name: str = request["TrainingJobName"]
        self._request = request
        self._directory = directory
        self._stop_asked = threading.Event()
        self._store = store.until(self._stop_asked.is_set)
        self._region = region
        self._arn = f"arn:aws:sagemaker:{region}:000000000000:training-job/{self.name}"
        self._hosts = host_names(request)
        self._trees = [directory / "hosts" / host for host in self._hosts]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._killed: list[int] = []
        self._end_asked = threading.Event()
        self.record = JobRecord.of_request(request, arn=self._arn, model=model_address(request, store))
        self._thread = threading.Thread(target=self._run, name=f"job {self.name}", daemon=True)

    def start(self) -> None:
        _running[self] = os.getpid()
        self._thread.start()

    def stop(self) -> None:
        """Ask the job to end; returns at once."""
        if not self._stop_asked.is_set() and self.record.move("Stopping", "Stopping"):
            self._stop_asked.set()

    def end_now(self) -> None:
        """End the job's processes without a time of grace, and wait until they are gone."""
        self._end_asked.set()
        self.stop()
        self._thread.join()

    # The thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_to_the_end()
        finally:
            _running.pop(self, None)

    def _run_to_the_end(self) -> None:
        try:
            status, secondary, reason = self._train()
        except ValueError as error:
            status, secondary, reason = "Failed", "Failed", f"ClientError: {error}"
        except Exception:
            status, secondary, reason = "Failed", "Failed", f"InternalServerError: {traceback.format_exc()}"
        self.record.move("InProgress", "Uploading")
        # Before the log has lines of ours about the outputs.
        definitions = self._request["AlgorithmSpecification"].get("MetricDefinitions", ())
        if metrics := final_metrics(definitions, log_files(self._directory, self._request)):
            self.record.update(FinalMetricDataList=metrics)
        try:
            collect_outputs(self._request, self._trees, self._directory / "output", self._store, self._say)
        except Exception as error:
            if status == "Completed":
                status, secondary = "Failed", "Failed"
            reason = f"{reason}\n" if reason else ""
            reason += f"ClientError: the outputs stay in {self._directory / 'output'}: {error}"
        if reason:
            self.record.update(FailureReason=_shortened(reason))
        self.record.update(TrainingEndTime=datetime.now(UTC))
        self.record.end(status, secondary, self._directory)

    def _train(self) -> tuple[str, str, str]:
        """Run the job; returns its status, secondary status and the reason of a failure."""
        self.record.move("InProgress", "Downloading")
        try:
            for host, tree in zip(self._hosts, self._trees):
                prepare_tree(self._request, host, tree, self._store)
        except DownloadStopped:
            pass
        if self._stop_asked.is_set():
            return "Stopped", "Stopped", ""
        (self._directory / "logs").mkdir()
        meeting = self._directory / "hosts" / "meeting"
        meeting.mkdir()
        self.record.move("InProgress", "Training")
        self.record.update(TrainingStartTime=datetime.now(UTC))
        started = time.monotonic()
        try:
            for host, tree, log in zip(self._hosts, self._trees, log_files(self._directory, self._request)):
                with log.open("wb") as file:
                    if host == self._hosts[0] and (names := without_effect(self._request)):
                        file.write(_line(f"without effect in local mode: {', '.join(names)}"))
                        file.flush()
                    self._processes.append(self._start(host, tree, meeting, file))
            timed_out = self._wait(started + self._request["StoppingCondition"]["MaxRuntimeInSeconds"])
        finally:
            self._kill()
            self.record.update(TrainingTimeInSeconds=round(time.monotonic() - started))
        if timed_out:
            limit = self._request["StoppingCondition"]["MaxRuntimeInSeconds"]
            return "Stopped", "MaxRuntimeExceeded", f"MaxRuntimeExceeded: the job ran for over {limit} s"
        if self._stop_asked.is_set():
            return "Stopped", "Stopped", ""
        codes = [process.returncode for process in self._processes]
        if not any(codes):
            return "Completed", "Completed", ""
        return "Failed", "Failed", self._failure(codes)

    def _start(self, host: str, tree: Path, meeting: Path, log: BinaryIO) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
        given = self._request.get("Environment", {})
        environment = {
            **inherited,
            "AWS_REGION": self._region,
            "TRAINING_JOB_NAME": self.name,
            "TRAINING_JOB_ARN": self._arn,
            **{name: translate_paths(value, tree) for name, value in given.items()},
        }
        command = (sys.executable, "-P", "-m", "smp_lite.entrypoints.train")
        arguments = ("--root", str(tree), "--one-machine", str(meeting))
        return subprocess.Popen(
            [*command, *arguments],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def _wait(self, deadline: float) -> bool:
        """Stay until all hosts have ended; returns whether that was because the time was over."""
        timed_out = False
        signalled_at: float | None = None
        failed_at: float | None = None
        while not self._end_asked.is_set():
            codes = [process.poll() for process in self._processes]
            if None not in codes:
                break
            now = time.monotonic()
            if failed_at is None and any(codes):
                failed_at = now
                self._killed = [index for index, code in enumerate(codes) if code is not None and code < 0]
            timed_out = timed_out or (now > deadline and not self._stop_asked.is_set())
            failed = failed_at is not None and now > failed_at + _PEER_FAILED_S
            if signalled_at is None and (timed_out or failed or self._stop_asked.is_set()):
                signalled_at = now
                self._signal(signal.SIGTERM)
            if signalled_at is not None and now > signalled_at + _KILL_AFTER_S:
                break
            time.sleep(_POLL_S)
        return timed_out

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _kill(self) -> None:
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            assert process.stdin is not None
            process.stdin.close()  # which train takes for: whoever started me has gone
        for process in running:
            try:
                process.wait(_PEER_FAILED_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()

    def _failure(self, codes: list[int]) -> str:
        """The reason that the service would give: what the first failing host left, and its exit code; a
        signal counts as in a shell."""
        failed = [index for index, code in enumerate(codes) if code]
        files = {index: self._trees[index] / "output" / "failure" for index in failed}
        told = [index for index in failed if files[index].is_file()]
        if told:
            first = min(told, key=lambda index: files[index].stat().st_mtime_ns)
            text = files[first].read_text("utf-8", errors="replace").rstrip()
        else:
            first = failed[0]
            text = (
                f"host {self._hosts[first]} left no failure file; it printed last:\n{self._last_lines(first)}"
            )
        if self._killed:  # it could not tell, and what the others tell of comes from that
            first = self._killed[0]
            name = signal.Signals(-codes[first]).name
            text = f"host {self._hosts[first]} failed first: killed by {name}\n\n{text}"
        code = codes[first]
        return f"AlgorithmError: {text}\nexit code: {code if code > 0 else 128 - code}"

    def _say(self, text: str) -> None:
        """A line in the log of the first host, if that can be written."""
        with contextlib.suppress(OSError), log_files(self._directory, self._request)[0].open("ab") as file:
            file.write(_line(text))

    def _last_lines(self, index: int) -> str:
        """What the host printed last."""
        log = log_files(self._directory, self._request)[index]
        return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-_LAST_LINES:])


_running: dict[LocalTrainingJob, int] = {}
"""The process that started each of them."""


@atexit.register
def _end_running_jobs() -> None:
    # A child that was forked meanwhile ends without them: they are its parent's.
    for job in [job for job, process in _running.items() if process == os.getpid()]:
        print(
            f"job {job.name} is stopped: a local job ends with the Python that started it; "
            "to wait for it, call estimator.latest_training_job.wait()",
            file=sys.stderr,
        )
        job.end_now()


def log_files(directory: Path, request: Mapping[str, Any]) -> list[Path]:
    """One for each host of the job in `directory`; they may not exist yet."""
    return [directory / "logs" / f"{host}.log" for host in host_names(request)]


def _line(text: str) -> bytes:
    """Of ours, for a log; the name of a file may hold what is no text."""
    return f"smp-lite: {text}\n".encode(errors="backslashreplace")


def _shortened(reason: str) -> str:
    """`reason` as the service cuts it, but in the middle: the cause is at the start, the end shows where."""
    if len(reason) <= _REASON_CHARACTERS:
        return reason
    half = _REASON_CHARACTERS // 2 - 3
    return f"{reason[:half]}\n...\n{reason[-half:]}"
