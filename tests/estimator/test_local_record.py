"""What is told about a local job: as the service tells it, and after its Python has ended."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.session import get_session
from botocore.validate import ParamValidator
from sagemaker.pytorch import PyTorch

from smp_lite.estimator.local.record import JobRecord
from smp_lite.estimator.local.session import LocalMPISession
from tests.estimator.jobs import estimator, files_in

OF_THE_USER = {"HyperParameters": {"startTime": '"soon"', "EndTime": "1"}, "Environment": {"Time": "noon"}}


def a_record(**members: Any) -> JobRecord:
    request = {
        "TrainingJobName": "told",
        "OutputDataConfig": {"S3OutputPath": "s3://bucket"},
        "StoppingCondition": {"MaxRuntimeInSeconds": 1},
        "Tags": [{"Key": "owner", "Value": "me"}],
        **OF_THE_USER,
        **members,
    }
    return JobRecord.of_request(request, arn="arn:aws:sagemaker:x:0:training-job/told", model="s3://bucket/m")


def test_a_description_has_the_form_of_the_service() -> None:
    description = a_record().describe()
    model = get_session().get_service_model("sagemaker")
    shape = model.operation_model("DescribeTrainingJob").output_shape
    assert set(description) <= set(shape.members)
    assert ParamValidator().validate(description, shape).generate_report() == ""
    assert isinstance(description["CreationTime"], datetime)
    assert description["OutputDataConfig"]["KmsKeyId"] == ""
    assert {name: description[name] for name in OF_THE_USER} == OF_THE_USER


def test_a_description_is_a_copy() -> None:
    record = a_record()
    record.describe()["HyperParameters"].clear()
    assert record.describe()["HyperParameters"]


def test_a_job_that_stops_does_not_go_on_and_an_ended_one_does_not_stop(tmp_path: Path) -> None:
    record = a_record()
    assert record.move("Stopping", "Stopping")
    assert record.move("InProgress", "Uploading")
    assert record.describe()["TrainingJobStatus"] == "Stopping"
    record.end("Stopped", "Stopped", tmp_path)
    assert not record.move("Stopping", "Stopping")
    assert record.describe()["TrainingJobStatus"] == "Stopped"


def test_a_record_is_loaded_as_it_was(tmp_path: Path) -> None:
    record = a_record()
    assert JobRecord.load(tmp_path) is None
    record.end("Completed", "Completed", tmp_path)
    loaded = JobRecord.load(tmp_path)
    assert loaded is not None
    assert loaded.describe() == record.describe()
    assert loaded.tags == [{"Key": "owner", "Value": "me"}]


def test_an_end_that_cannot_be_written_is_told_all_the_same(tmp_path: Path) -> None:
    record = a_record()
    record.end("Completed", "Completed", tmp_path / "nowhere")
    assert record.has_ended()


@pytest.mark.slow
def test_a_later_session_attaches_to_an_ended_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tags = [{"Key": "owner", "Value": "me"}]
    job = estimator(tmp_path, "say('told before')\nif rank == 0: model('weights', '1')", tags=tags)
    job.fit(job_name="ended", logs="None")
    later = LocalMPISession(tmp_path / "jobs")
    attached = PyTorch.attach("ended", later)
    assert files_in(attached.model_data) == {"weights": "1"}
    assert attached.tags == tags
    later.logs_for_job("ended")
    assert "[0] told before\n" in capsys.readouterr().out
    later.stop_training_job("ended")
    assert later.describe_training_job("ended")["TrainingJobStatus"] == "Completed"
    for unknown in ("never", "../jobs/ended"):
        with pytest.raises(ClientError, match="has started no job"):
            later.describe_training_job(unknown)
