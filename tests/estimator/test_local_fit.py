"""What a job on this machine gives its script and its user, with the SDK's own estimator."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.estimator.jobs import distribution, estimator, files_in, outputs_of, processes_of, write_wheel

pytestmark = pytest.mark.sampled(3)


@pytest.mark.slow
def test_a_script_gets_its_environment_arguments_and_channels(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "words.txt").write_text("some words")
    job = estimator(
        tmp_path,
        """
say(rank, "of", world.size)
if rank == 1:
    facts = {name: value for name, value in os.environ.items() if name.startswith("SM_")}
    output("facts.json", json.dumps({"env": facts, "argv": sys.argv, "cwd": os.getcwd()}))
    output("channel.txt", open(os.environ["SM_CHANNEL_TRAIN"] + "/words.txt").read())
    model("weights.txt", "the weights")
""",
        hyperparameters={
            "epochs": 3,
            "rate": 0.5,
            "name": "a b",
            "flag": True,
            "nothing": None,
            "layers": [1, 2],
            "table": {"a": 1},
        },
        environment={"WORD": "given"},
    )
    job.fit({"train": data.as_uri()}, logs="None")
    assert files_in(job.model_data) == {"weights.txt": "the weights"}
    outputs = outputs_of(job)
    assert outputs["channel.txt"] == "some words"
    facts = json.loads(outputs["facts.json"])
    environment = facts["env"]
    parameters = {"partitions": 2, "ddp": True}
    assert json.loads(environment["SM_HP_MP_PARAMETERS"]) == parameters
    assert json.loads(environment["SM_HPS"]) == {
        "epochs": 3,
        "rate": 0.5,
        "name": "a b",
        "flag": True,
        "nothing": None,
        "layers": [1, 2],
        "table": {"a": 1},
        "mp_parameters": parameters,
    }
    assert environment["SM_CURRENT_HOST"] == "algo-1"
    assert environment["SM_HOSTS"] == '["algo-1"]'
    assert environment["SM_HP_NAME"] == "a b"
    assert facts["cwd"].endswith("/code")
    arguments = facts["argv"][1:]
    assert arguments[arguments.index("--name") + 1] == "a b"
    assert "--mp_parameters" not in arguments
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_the_environment_of_the_request_reaches_the_script(tmp_path: Path) -> None:
    job = estimator(
        tmp_path,
        'output("word", os.environ["WORD"] + os.environ["TRAINING_JOB_NAME"])',
        environment={"WORD": "given "},
    )
    job.fit(job_name="named", logs="None")
    assert outputs_of(job) == {"word": "given named"}


@pytest.mark.slow
def test_what_the_user_gives_arrives_whatever_its_name_and_depth(tmp_path: Path) -> None:
    job = estimator(
        tmp_path,
        """
if rank == 0:
    output("given", json.dumps([json.loads(os.environ["SM_HPS"]), os.environ["StopTime"]]))
""",
        hyperparameters={
            "startTime": "soon",
            "paths": {"model": ["/opt/ml/model", {"endTime": "/opt/ml"}], "other": "/opt/mlx"},
        },
        environment={"StopTime": "noon"},
    )
    job.fit(job_name="named", logs="None")
    root = str(tmp_path / "jobs" / "named" / "hosts" / "algo-1")
    hyperparameters, stop_time = json.loads(outputs_of(job)["given"])
    assert hyperparameters["startTime"] == "soon"
    assert hyperparameters["paths"] == {"model": [f"{root}/model", {"endTime": root}], "other": "/opt/mlx"}
    assert stop_time == "noon"
    assert json.loads(job.latest_training_job.describe()["HyperParameters"]["startTime"]) == "soon"


@pytest.mark.slow
def test_output_that_the_screen_has_no_letters_for_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", screen)
    estimator(tmp_path, 'say("\u2603 caf\u00e9")').fit()
    shown = screen.buffer.getvalue().decode("latin-1")  # type: ignore[attr-defined]
    assert "[0] ? caf\u00e9\n" in shown


@pytest.mark.slow
def test_local_code_of_the_sdk_has_no_effect(tmp_path: Path) -> None:
    job = estimator(tmp_path, 'output("ran", "")')
    job.sagemaker_session.config = {"local": {"local_code": True}}
    job.fit(logs="None")
    assert outputs_of(job) == {"ran": ""}


@pytest.mark.slow
def test_lines_are_shown_with_their_rank_while_the_job_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = estimator(tmp_path, 'say("line from", rank)')
    job.fit()
    shown = capsys.readouterr().out
    assert "[0] line from 0\n" in shown
    assert "[1] line from 1\n" in shown


@pytest.mark.slow
def test_hosts_are_told_apart(tmp_path: Path) -> None:
    job = estimator(
        tmp_path,
        """
facts = {name: os.environ[name] for name in ("SM_CURRENT_HOST", "SM_HOSTS", "SM_OUTPUT_DATA_DIR")}
output(f"{rank}", json.dumps({**facts, "cwd": os.getcwd(), "group": os.getpgid(0)}))
""",
        instance_count=2,
    )
    job.fit(logs="None")
    facts = {int(rank): json.loads(text) for rank, text in outputs_of(job).items()}
    hosts = [facts[rank]["SM_CURRENT_HOST"] for rank in range(4)]
    assert hosts == ["algo-1", "algo-1", "algo-2", "algo-2"]
    assert all(facts[rank]["SM_HOSTS"] == '["algo-1","algo-2"]' for rank in facts)
    assert all(f"/{hosts[rank]}/" in facts[rank]["cwd"] for rank in facts)
    assert all(f"/{hosts[rank]}/" in facts[rank]["SM_OUTPUT_DATA_DIR"] for rank in facts)
    assert len({facts[rank]["group"] for rank in facts}) == 4


@pytest.mark.slow
def test_each_host_gets_its_share_of_a_sharded_channel(tmp_path: Path) -> None:
    from sagemaker.inputs import TrainingInput

    data = tmp_path / "data"
    data.mkdir()
    for name in "abcd":
        (data / name).write_text(name)
    job = estimator(
        tmp_path,
        'output(f"{rank}", "".join(sorted(os.listdir(os.environ["SM_CHANNEL_TRAIN"]))))',
        instance_count=2,
    )
    inputs = {
        "train": TrainingInput(job.sagemaker_session.upload_data(str(data)), distribution="ShardedByS3Key")
    }
    job.fit(inputs, logs="None")
    assert outputs_of(job) == {"0": "ac", "1": "ac", "2": "bd", "3": "bd"}


@pytest.mark.slow
def test_dependencies_and_requirements_are_there_and_this_python_is_left_alone(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "smp_lite_test_package", "WORD = 'required'\n")
    helper = tmp_path / "helper_package"
    helper.mkdir()
    (helper / "__init__.py").write_text("WORD = 'depended on'\n")
    job = estimator(
        tmp_path,
        """
import helper_package, smp_lite_test_package
output("words", helper_package.WORD + ", " + smp_lite_test_package.WORD)
""",
        dependencies=[str(helper)],
    )
    (tmp_path / "source" / "requirements.txt").write_text(f"pydantic\n{wheel}\n")
    job.fit(logs="None")
    assert outputs_of(job) == {"words": "depended on, required"}
    with pytest.raises(ImportError):
        __import__("smp_lite_test_package")


@pytest.mark.slow
def test_checkpoints_are_found_again_by_the_next_job(tmp_path: Path) -> None:
    script = """
directory = sys.argv[sys.argv.index("--checkpoints") + 1]
if rank == 0:
    known = sorted(os.listdir(directory))
    open(os.path.join(directory, f"step-{len(known)}"), "w").close()
    output("known", " ".join(known))
"""
    checkpoints = tmp_path / "checkpoints"
    for known in ("", "step-0"):
        job = estimator(
            tmp_path,
            script,
            checkpoint_s3_uri=checkpoints.as_uri(),
            checkpoint_local_path="/opt/ml/checkpoints",
            hyperparameters={"checkpoints": "/opt/ml/checkpoints"},
        )
        job.fit(logs="None")
        assert outputs_of(job) == {"known": known}
    assert sorted(os.listdir(checkpoints)) == ["step-0", "step-1"]


@pytest.mark.slow
def test_a_job_without_model_parallelism_is_one_process(tmp_path: Path) -> None:
    job = estimator(tmp_path, 'output("size", str(world.size))', distribution=None)
    job.fit(logs="None")
    assert outputs_of(job) == {"size": "1"}


@pytest.mark.ci
def test_without_mpi_each_host_runs_the_script_by_itself(tmp_path: Path) -> None:
    job = estimator(
        tmp_path,
        """
output(os.environ["SM_CURRENT_HOST"], f"{world.size} {os.environ['SM_HOSTS']}")
""",
        distribution=None,
        instance_count=2,
    )
    job.fit(logs="None")
    assert outputs_of(job) == dict.fromkeys(("algo-1", "algo-2"), '1 ["algo-1","algo-2"]')


@pytest.mark.slow
def test_a_local_fit_calls_nobody(tmp_path: Path) -> None:
    """In a process of its own: an audit hook sees every connection, and there are no credentials."""
    program = textwrap.dedent(
        f"""
        import logging, sys
        from pathlib import Path
        from tests.estimator.jobs import estimator
        # The SDK looks for credentials when it is imported and when it makes an estimator.
        job = estimator(Path({str(tmp_path)!r}), "say('hello')")
        logging.basicConfig(level=logging.INFO)
        calls = []
        def watch(event, arguments):
            if event in ("socket.connect", "socket.getaddrinfo"):
                calls.append((event, arguments[1:]))
        sys.addaudithook(watch)
        job.fit({{"train": {tmp_path.as_uri()!r}}})
        print("calls", calls)
        """
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "[0] hello\n" in result.stdout
    assert "calls []" in result.stdout
    assert "Warning" not in result.stderr
    assert "telemetry" not in result.stderr


@pytest.mark.slow
def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    job = estimator(tmp_path, "")
    job.fit(job_name="once", logs="None")
    with pytest.raises(Exception, match=r"ResourceInUse.*'once' exists already"):
        job.fit(job_name="once", logs="None")


def test_processes_of_all_hosts_must_fit_the_partitions(tmp_path: Path) -> None:
    job = estimator(tmp_path, "", distribution=distribution(processes=3))
    with pytest.raises(Exception, match="3"):
        job.fit(logs="None")


@pytest.mark.slow
def test_a_script_of_smp_v1_runs_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It imports smdistributed.modelparallel.torch, and speaks of CUDA."""
    job = estimator(
        tmp_path,
        "",
        source_dir=str(Path(__file__).parents[1] / "smp_v1" / "scripts"),
        entry_point="train_mnist.py",
        hyperparameters={"epochs": 1},
        environment={"SMP_LITE_CUDA_AS_CPU": "1"},
        distribution=distribution(microbatches=2),
    )
    job.fit()
    shown = capsys.readouterr().out
    for rank in (0, 1):
        assert f"[{rank}] SMP training finished successfully" in shown
