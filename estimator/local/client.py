"""What takes the place of the service: the calls of its client that training jobs need, under their names.

A request is checked as a whole before its job starts. A job belongs to the Python that started it, but
once it has ended any session on the same folder can describe it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .job import LocalTrainingJob, log_files
from .record import JobRecord
from .request import check_request, client_error, is_job_name
from .store import Store

__all__ = ["LocalMPIClient"]


class LocalMPIClient:
    """The calls of the SageMaker client that training jobs need, with its names and errors."""

    def __init__(self, directory: Path, store: Store, region: str) -> None:
        self._directory = directory
        self._store = store
        self._region = region
        self._jobs: dict[str, LocalTrainingJob] = {}

    def create_training_job(self, **request: Any) -> dict[str, str]:
        """Start the job; returns at once."""
        check_request(request)
        name = request["TrainingJobName"]
        directory = self._directory / name
        job = LocalTrainingJob(request, directory, self._store, self._region)
        try:
            # The SDK has put the source code there already.
            (directory / "hosts").mkdir(parents=True)
        except FileExistsError:
            raise client_error(
                "CreateTrainingJob", "ResourceInUse", f"job {name!r} exists already in {self._directory}"
            ) from None
        self._jobs[name] = job
        job.start()
        return {"TrainingJobArn": job.record.describe()["TrainingJobArn"]}

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        return self._record("DescribeTrainingJob", TrainingJobName).describe()

    def stop_training_job(self, TrainingJobName: str) -> None:
        self._record("StopTrainingJob", TrainingJobName)
        if TrainingJobName in self._jobs:
            self._jobs[TrainingJobName].stop()

    def list_tags(self, ResourceArn: str) -> dict[str, Any]:
        return {"Tags": self._record("ListTags", ResourceArn.rpartition("/")[2]).tags}

    def log_files(self, name: str) -> list[Path]:
        """The files that the job's hosts print to; they may not exist yet."""
        return log_files(self._directory / name, self.describe_training_job(name))

    def _record(self, operation: str, name: str) -> JobRecord:
        """Of a job of this session, or of one that has ended in an earlier session on the same folder."""
        if name in self._jobs:
            return self._jobs[name].record
        record = JobRecord.load(self._directory / name) if is_job_name(name) else None
        if record is None:
            raise client_error(
                operation,
                "ValidationException",
                f"this session has started no job {name!r}, and none has ended in {self._directory}",
            )
        return record

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(f"LocalMPISession runs training jobs only: {name} is not available locally")
