"""Arguments of an estimator in a local job: each has its effect, is said to have none, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from sagemaker.debugger import DebuggerHookConfig, ProfilerConfig, Rule, rule_configs
from sagemaker.inputs import TrainingInput

from smp_lite.config import ConfigError
from smp_lite.estimator import LocalMPISession, PyTorch, request_of
from smp_lite.estimator.local.metrics import final_metrics
from smp_lite.estimator.local.request import without_effect
from tests.estimator.aws import example
from tests.estimator.jobs import estimator

DATA = "file:///tmp"


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("name", ["../../../escaped", "a/b", "..", "a b", "x" * 65, "ü"])
def test_a_channel_has_a_name_that_the_service_takes(name: str, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"ValidationException.*channel name .* is not valid"):
        request_of(estimator(tmp_path, ""), {name: DATA})
    strict = PyTorch(**example(tmp_path / "strict"))
    for send in (strict.fit, strict.dry_run):
        with pytest.raises(ConfigError, match=r"inputs: channel name .* is not valid"):
            send({name: "s3://bucket/x"})


def test_other_channels_are_taken(tmp_path: Path) -> None:
    inputs = {"te-st_1.a": TrainingInput(DATA), "x" * 64: DATA}
    request = request_of(estimator(tmp_path, ""), inputs)
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == list(inputs)


def test_a_job_on_spot_instances_may_wait_as_long_as_it_runs(tmp_path: Path) -> None:
    limits = {"use_spot_instances": True, "max_run": 50}
    with pytest.raises(ClientError, match="max_wait=10 with use_spot_instances=True and max_run=50"):
        request_of(estimator(tmp_path, "", **limits, max_wait=10))
    with pytest.raises(ConfigError, match="max_wait=10 with use_spot_instances=True and max_run=50"):
        PyTorch(**example(tmp_path / "strict", **limits, max_wait=10)).dry_run()
    assert "StoppingCondition" in request_of(estimator(tmp_path, "", **limits, max_wait=50))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"container_arguments": ["--zzz"]}, r"container_arguments=\['--zzz'\] need .* hyperparameters"),
        ({"metric_definitions": [{"Name": "loss", "Regex": "loss="}]}, "of 'loss' has no group"),
        ({"disable_output_compression": True}, "disable_output_compression=True is not supported in local"),
        ({"checkpoint_local_path": "/x"}, "checkpoint_local_path='/x' without checkpoint_s3_uri"),
        ({"metric_definitions": [{"Name": "loss", "Regex": "(loss"}]}, "of 'loss' is no regular expression"),
    ],
)
def test_what_cannot_be_done_here_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        request_of(estimator(tmp_path, "", **changes))


def test_a_variable_has_a_name_that_the_service_takes(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"ValidationException.*environment: 'A=B' is no name for a varia"):
        request_of(estimator(tmp_path, "", environment={"A=B": "1"}))
    assert request_of(estimator(tmp_path, "", environment={"_A1": "1"}))["Environment"] == {"_A1": "1"}


@pytest.mark.ci
def test_what_has_no_effect_here_is_known(tmp_path: Path) -> None:
    assert without_effect(request_of(estimator(tmp_path, ""))) == []
    assert without_effect(request_of(estimator(tmp_path, "", debugger_hook_config=False))) == []
    given = {
        "rules": [Rule.sagemaker(rule_configs.loss_not_decreasing())],
        "debugger_hook_config": DebuggerHookConfig(s3_output_path="s3://b/x"),
        "use_spot_instances": True,
        "max_wait": 60,
        "enable_network_isolation": True,
        "subnets": ["s"],
        "security_group_ids": ["g"],
        "profiler_config": ProfilerConfig(system_monitor_interval_millis=500),
        "enable_remote_debug": True,
        "enable_infra_check": True,
        "enable_session_tag_chaining": True,
        "enable_sagemaker_metrics": True,
        "training_repository_access_mode": "Vpc",
        "instance_placement_config": {"EnableMultipleJobs": True},
    }
    assert without_effect(request_of(estimator(tmp_path, "", **given))) == [
        "use_spot_instances",
        "rules",
        "debugger_hook_config",
        "subnets, security_group_ids",
        "enable_network_isolation",
        "instance_placement_config",
        "enable_sagemaker_metrics",
        "training_repository_access_mode",
        "profiler_config",
        "enable_infra_check",
        "enable_remote_debug",
        "enable_session_tag_chaining",
    ]
    given = {"enable_remote_debug": False, "disable_profiler": True}
    assert without_effect(request_of(estimator(tmp_path, "", **given))) == []


def test_the_last_value_of_a_metric_counts(tmp_path: Path) -> None:
    log = tmp_path / "algo-1.log"
    log.write_text("[0] loss=3.5 (best)\n[1] loss=2e-1\nloss=nothing\n[0] rate=1\n")
    definitions = [{"Name": "loss", "Regex": r"^loss=(\S+)"}, {"Name": "never", "Regex": "never=(.*)"}]
    found = final_metrics(definitions, [log, tmp_path / "algo-2.log"])
    assert [(metric["MetricName"], metric["Value"]) for metric in found] == [("loss", 0.2)]


@pytest.mark.slow
def test_a_description_has_the_metrics_and_the_log_what_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = estimator(
        tmp_path,
        "say('loss=%s' % (rank + 1)) if rank == 0 else None",
        metric_definitions=[{"Name": "loss", "Regex": "loss=(.*)"}],
        rules=[Rule.sagemaker(rule_configs.loss_not_decreasing())],
    )
    job.fit(job_name="measured")
    assert "smp-lite: without effect in local mode: rules" in capsys.readouterr().out
    for session in (job.sagemaker_session, LocalMPISession(tmp_path / "jobs")):
        (metric,) = session.describe_training_job("measured")["FinalMetricDataList"]
        assert (metric["MetricName"], metric["Value"]) == ("loss", 1.0)
