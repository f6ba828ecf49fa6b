"""One training job on this machine: a `train` process for each host, watched by a thread.

The job ends with the Python that started it. Its `train` processes hold on to a pipe from here, so
they end, and their ranks with them, even where this Python is killed.

What the service would do is done here: the input is brought, the outputs are kept whatever the
ending, `MaxRuntimeInSeconds` is honoured, and a stop is SIGTERM now and SIGKILL 120 seconds later.
"""

from __future__ import annotations

import json
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

from .local_files import collect_outputs, host_names, prepare_tree, translate_paths
from .local_store import Store

__all__ = ["ENDED", "LocalTrainingJob"]

ENDED = ("Completed", "Failed", "Stopped")

_POLL_S = 0.05
_KILL_AFTER_S = 120.0
"""Between SIGTERM and SIGKILL, as documented for StopTrainingJob."""
_PEER_FAILED_S = 5.0
"""How long the other hosts may take to end by themselves when one has failed."""
_REASON_CHARACTERS = 1024


class LocalTrainingJob:
    """A job from its request on.

    Args:
        request: of CreateTrainingJob.
        directory: for everything of this job; exists.
        store: for its data.
        region: told to the script.
    """

    def __init__(self, request: Mapping[str, Any], directory: Path, store: Store, region: str) -> None:
        self.name: str = request["TrainingJobName"]
        self._request = request
        self._directory = directory
        self._store = store
        self._region = region
        self._hosts = host_names(request)
        self._trees = [directory / "hosts" / host for host in self._hosts]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stop_asked = threading.Event()
        self._lock = threading.Lock()
        self._description: dict[str, Any] = {
            **request,
            "TrainingJobArn": f"arn:aws:sagemaker:{region}:000000000000:training-job/{self.name}",
            "CreationTime": _now(),
            "SecondaryStatusTransitions": [],
        }
        self._set_status("InProgress", "Starting")
        self._thread = threading.Thread(target=self._run, name=f"job {self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the job to end; returns at once."""
        if self.describe()["TrainingJobStatus"] not in ENDED:
            self._set_status("Stopping", "Stopping")
            self._stop_asked.set()

    def end_now(self) -> None:
        """End the job's processes without a time of grace, and wait until they are gone."""
        self._stop_asked.set()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()  # which train takes for: whoever started me has gone
        self._thread.join()

    def describe(self) -> dict[str, Any]:
        """As DescribeTrainingJob."""
        with self._lock:
            return json.loads(json.dumps(self._description), object_hook=_with_times)

    def log_files(self) -> list[Path]:
        """One for each host; they may not exist yet."""
        return [self._directory / "logs" / f"{host}.log" for host in self._hosts]

    # The thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            status, secondary, reason = self._train()
        except ValueError as error:
            status, secondary, reason = "Failed", "Failed", f"ClientError: {error}"
        except Exception:
            status, secondary, reason = "Failed", "Failed", f"InternalServerError: {traceback.format_exc()}"
        try:
            self._set_status("InProgress", "Uploading")
            model = collect_outputs(self._request, self._trees, self._directory / "output", self._store)
            self._update(ModelArtifacts={"S3ModelArtifacts": model})
        except (ValueError, OSError) as error:
            if status == "Completed":
                status, secondary = "Failed", "Failed"
            reason = f"{reason}\n" if reason else ""
            reason += f"ClientError: the outputs stay in {self._directory / 'output'}: {error}"
        if reason:
            self._update(FailureReason=_shortened(reason))
        self._update(TrainingEndTime=_now())
        self._set_status(status, secondary)

    def _train(self) -> tuple[str, str, str]:
        """Run the job; returns its status, secondary status and the reason of a failure."""
        self._set_status("InProgress", "Downloading")
        for host, tree in zip(self._hosts, self._trees):
            prepare_tree(self._request, host, tree, self._store)
        (self._directory / "logs").mkdir()
        meeting = self._directory / "hosts" / "meeting"
        meeting.mkdir()
        self._set_status("InProgress", "Training")
        self._update(TrainingStartTime=_now())
        started = time.monotonic()
        try:
            for host, tree, log in zip(self._hosts, self._trees, self.log_files()):
                with log.open("wb") as file:
                    self._processes.append(self._start(host, tree, meeting, file))
            timed_out = self._wait(started + self._request["StoppingCondition"]["MaxRuntimeInSeconds"])
        finally:
            self._kill()
            self._update(TrainingTimeInSeconds=round(time.monotonic() - started))
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
            "TRAINING_JOB_ARN": self._description["TrainingJobArn"],
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
        while any(process.poll() is None for process in self._processes):
            now = time.monotonic()
            if failed_at is None and any(process.returncode for process in self._processes):
                failed_at = now
            timed_out = timed_out or (now > deadline and not self._stop_asked.is_set())
            failed = failed_at is not None and now > failed_at + _PEER_FAILED_S
            if signalled_at is None and (timed_out or failed or self._stop_asked.is_set()):
                signalled_at = now
                self._signal(signal.SIGTERM)
            if signalled_at is not None and now > signalled_at + _KILL_AFTER_S:
                return timed_out
            time.sleep(_POLL_S)
        return timed_out

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(_PEER_FAILED_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _failure(self, codes: list[int]) -> str:
        """The reason that the service would give: what the first failing host left, and its exit code."""
        failed = [(tree, code) for tree, code in zip(self._trees, codes) if code]
        files = [(tree / "output" / "failure", code) for tree, code in failed]
        told = [(path, code) for path, code in files if path.is_file()]
        path, code = min(told, key=lambda item: item[0].stat().st_mtime_ns) if told else files[0]
        text = path.read_text("utf-8", errors="replace") if told else "the host left no failure file"
        return f"AlgorithmError: {text.rstrip()}\nexit code: {code}"

    # The description --------------------------------------------------------------------------------------

    def _set_status(self, status: str, secondary: str) -> None:
        with self._lock:
            transitions = self._description["SecondaryStatusTransitions"]
            if transitions:
                transitions[-1].setdefault("EndTime", _now())
            transitions.append({"Status": secondary, "StartTime": _now(), "StatusMessage": secondary})
        self._update(TrainingJobStatus=status, SecondaryStatus=secondary)

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._description |= {**changes, "LastModifiedTime": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _with_times(item: dict[str, Any]) -> dict[str, Any]:
    return {
        name: datetime.fromisoformat(value) if name.endswith("Time") and isinstance(value, str) else value
        for name, value in item.items()
    }


def _shortened(reason: str) -> str:
    """`reason` as the service cuts it, but in the middle: the cause is at the start, the end shows where."""
    if len(reason) <= _REASON_CHARACTERS:
        return reason
    half = _REASON_CHARACTERS // 2 - 3
    return f"{reason[:half]}\n...\n{reason[-half:]}"
