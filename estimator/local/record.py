"""What DescribeTrainingJob tells of a job on this machine: while it runs, and to later sessions.

The answer has the members of the service's answer, with its times as `datetime`. What the user put into
the request (hyperparameters, environment) stays as it is. An ended job leaves its record in its folder,
where a later session on the same folder finds it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .service_model import described_members

__all__ = ["ENDED", "JobRecord"]

ENDED = ("Completed", "Failed", "Stopped")

_FILE = "record.json"
_TIMES = ("CreationTime", "TrainingStartTime", "TrainingEndTime", "LastModifiedTime")
_TIMES_OF_TRANSITION = ("StartTime", "EndTime")


class JobRecord:
    """A job's description, which its thread changes and others read.

    Args:
        description: as DescribeTrainingJob gives it.
        tags: of the job, as ListTags gives them.
    """

    def __init__(self, description: Mapping[str, Any], tags: list[dict[str, str]]) -> None:
        self.tags = tags
        self._description = dict(description)
        self._lock = threading.Lock()

    @classmethod
    def of_request(cls, request: Mapping[str, Any], *, arn: str, model: str) -> JobRecord:
        """The record of a job that starts now.

        Args:
            request: of CreateTrainingJob.
            arn: of the job.
            model: where model.tar.gz will be.
        """
        now = datetime.now(UTC)
        described = {
            name: copy.deepcopy(value) for name, value in request.items() if name in described_members()
        }
        output = {"KmsKeyId": "", **request["OutputDataConfig"]}
        first = {"Status": "Starting", "StartTime": now, "StatusMessage": "Starting"}
        description = {
            "EnableNetworkIsolation": False,
            "EnableInterContainerTrafficEncryption": False,
            "EnableManagedSpotTraining": False,
            **described,
            "OutputDataConfig": output,
            "ModelArtifacts": {"S3ModelArtifacts": model},
            "TrainingJobArn": arn,
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": "Starting",
            "SecondaryStatusTransitions": [first],
            "CreationTime": now,
            "LastModifiedTime": now,
        }
        return cls(description, list(request.get("Tags", ())))

    @classmethod
    def load(cls, directory: Path) -> JobRecord | None:
        """The record of an ended job, from the job's folder; None where there is none."""
        try:
            content = json.loads((directory / _FILE).read_text("utf-8"))
        except FileNotFoundError:
            return None
        description = content["description"]
        _change(description, _TIMES, datetime.fromisoformat)
        for transition in description["SecondaryStatusTransitions"]:
            _change(transition, _TIMES_OF_TRANSITION, datetime.fromisoformat)
        for metric in description.get("FinalMetricDataList", ()):
            _change(metric, ("Timestamp",), datetime.fromisoformat)
        return cls(description, content["tags"])

    def describe(self) -> dict[str, Any]:
        """A copy of the description."""
        with self._lock:
            return copy.deepcopy(self._description)

    def has_ended(self) -> bool:
        with self._lock:
            return self._description["TrainingJobStatus"] in ENDED

    def update(self, **changes: Any) -> None:
        """Exchange members of the description."""
        with self._lock:
            self._description |= {**changes, "LastModifiedTime": datetime.now(UTC)}

    def move(self, status: str, secondary: str) -> bool:
        """Change the status; returns whether that was possible, for an ended job stays as it is.

        A job that is stopping stays so until it has ended: "InProgress" then only changes `secondary`.
        """
        with self._lock:
            if self._description["TrainingJobStatus"] in ENDED:
                return False
            self._description |= self._moved(status, secondary)
            return True

    def end(self, status: str, secondary: str, directory: Path) -> None:
        """Change the status for the last time, and leave the record in the job's folder."""
        with self._lock:
            ended = {**self._description, **self._moved(status, secondary)}
            with contextlib.suppress(OSError):  # the folder is gone, or full: only later sessions miss it
                _save({"description": ended, "tags": self.tags}, directory / _FILE)
            self._description = ended

    def _moved(self, status: str, secondary: str) -> dict[str, Any]:
        now = datetime.now(UTC)
        *earlier, last = self._description["SecondaryStatusTransitions"]
        following = {"Status": secondary, "StartTime": now, "StatusMessage": secondary}
        stopping = self._description["TrainingJobStatus"] == "Stopping" and status == "InProgress"
        return {
            "TrainingJobStatus": "Stopping" if stopping else status,
            "SecondaryStatus": secondary,
            "SecondaryStatusTransitions": [*earlier, {**last, "EndTime": now}, following],
            "LastModifiedTime": now,
        }


def _change(item: dict[str, Any], names: tuple[str, ...], function: Any) -> None:
    item |= {name: function(item[name]) for name in names if name in item}


def _save(content: object, path: Path) -> None:
    """Written whole or not at all, and for this user only: environments hold secrets."""
    temporary = path.with_suffix(".new")
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(content, indent=1, default=datetime.isoformat), "utf-8")
    temporary.replace(path)
