"""The notebooks run from a clean kernel, and show what they promise."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.example import MPI_OPTIONS, PARAMETERS, SMP_OPTIONS
from tests.launch.launching import left_behind
from tests.notebooks.executing import FOLDER, execute, outputs, pictures, printed

# Each runs one or two whole jobs, on cores that other tests use as well.
pytestmark = pytest.mark.timeout(400)

NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
LARGEST_PICTURE = 200_000
"""Characters of base64."""

# With 4 processes in the place of 8.
EXAMPLE_OPTIONS = {"smp_options": SMP_OPTIONS, "mpi_options": {**MPI_OPTIONS, "processes_per_host": 4}}


def job_outputs(directory: Path) -> list[dict[str, Any]]:
    """The JSON files of each job's output, in the order of the jobs' names."""
    found = []
    for archive in sorted(directory.glob("smp_lite_jobs/*/output/output.tar.gz")):
        with tarfile.open(archive) as tar:
            files = {name: tar.extractfile(name) for name in tar.getnames() if name.endswith(".json")}
            found.append({name: json.load(file) for name, file in files.items() if file is not None})
    return found


def test_there_are_four() -> None:
    assert NOTEBOOKS == ["01_local.ipynb", "02_partition.ipynb", "03_to_sagemaker.ipynb", "04_systems.ipynb"]


@pytest.mark.parametrize(("name", "number"), list(zip(NOTEBOOKS, (3, 3, 0, 2))))
def test_committed_notebooks_hold_small_pictures_and_no_other_output(name: str, number: int) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    assert pictures(notebook) == number
    for output in outputs(notebook):
        assert list(output.get("data", {})) == ["image/png"]
        assert len(output.data["image/png"]) < LARGEST_PICTURE
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", ["01_local.ipynb", "03_to_sagemaker.ipynb", "fit.py"])
def test_the_distribution_is_that_of_the_documentation(name: str) -> None:
    if name.endswith(".py"):
        sources = [(FOLDER / name).read_text()]
    else:
        notebook = nbformat.read(FOLDER / name, as_version=4)
        sources = [cell.source for cell in notebook.cells if "smp_options = " in cell.source]
    (source,) = sources
    given = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in EXAMPLE_OPTIONS
    }
    assert given == EXAMPLE_OPTIONS


@pytest.mark.slow
def test_a_local_job(tmp_path: Path) -> None:
    notebook = execute("01_local.ipynb", tmp_path, parameters={"STEPS": 8})
    log = printed(notebook)
    assert re.search(r"^\[0\] +1 +blocks\.2-3, norm, head ", log, re.MULTILINE), log
    assert re.search(r"^\[0\] training  8/8  loss [\d.]+", log, re.MULTILINE), log
    (output,) = job_outputs(tmp_path)
    losses = output["losses.json"]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    events = output["timeline/timeline.json"]["traceEvents"]
    computed = {(e["cat"], e["args"]["step"]) for e in events if e.get("cat") in ("forward", "backward")}
    assert computed == {(kind, step) for kind in ("forward", "backward") for step in range(8)}
    assert pictures(notebook) == 3  # loss, schedule, timeline
    assert left_behind(tmp_path) == []


@pytest.mark.thorough
def test_splits_are_compared(tmp_path: Path) -> None:
    notebook = execute("02_partition.ipynb", tmp_path, parameters={"STEPS": 4})
    text = printed(notebook)
    for weight in ("0", "0.2", "0.5", "0.8", "1"):
        assert f"memory_weight {weight}\n" in text
    shares = [float(share) for share in re.findall(r"^ +0  .*?([\d.]+)%$", text, re.MULTILINE)]
    assert len(shares) == 6
    # The more weight on memory, the less computation beside the embedding; by hand it is as with none.
    assert shares[:5] == sorted(shares[:5], reverse=True)
    assert shares[0] > shares[4] + 10
    assert shares[5] == shares[0]
    assert "token_embedding | norm, head" in text
    first, second = job_outputs(tmp_path)
    assert first["losses.json"] == second["losses.json"]
    assert len(first["losses.json"]) == 4
    assert "all losses are equal: True" in text
    assert pictures(notebook) == 3  # the splits, two timelines
    assert left_behind(tmp_path) == []


@pytest.mark.thorough
def test_five_systems_train_alike(tmp_path: Path) -> None:
    notebook = execute("04_systems.ipynb", tmp_path, parameters={"STEPS": 4})
    text = printed(notebook)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("smp_lite_jobs/systems/*.out.json")]
    assert len(found) == 5
    for output in found:
        assert len(output["losses"]) == 4
        assert output["losses"] == pytest.approx(found[0]["losses"], rel=1e-6)
        assert len(output["ranks"]) == 4
        # No rank holds everything, nor the same as all others.
        names = [{(held["name"], str(held["boxes"])) for held in rank} for rank in output["ranks"]]
        assert any(rank != names[0] for rank in names)
    (largest,) = re.findall(r"^largest of any two systems at any step: (\S+)$", text, re.MULTILINE)
    assert 0 <= float(largest) < 1e-5
    for system in ("SageMaker", "Enflame DTU", "Colossal-AI", "LiBai", "torchprime"):
        assert re.search(rf"^{system} +\d\.\d+ +\d\.\d+ +\S+$", text, re.MULTILINE), system
    assert "parallel = " in text[text.index("--as colossal") :]
    assert pictures(notebook) == 2  # the losses, who holds what
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop(0), "numbers lie on no rank"),
        (lambda held: held[0].update(shape=[3, 3]), "has another shape"),
    ],
)
def test_a_number_that_nobody_holds_is_an_error(
    change: Callable[[list[dict[str, Any]]], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    holdings = importlib.import_module("holdings")
    shapes = {"a.weight": [4, 2], "a.bias": [4]}
    ranks = [
        [
            {"name": "a.weight", "shape": [4, 2], "boxes": [[[2 * rank, 0], [2, 2]]]},
            {"name": "a.bias", "shape": [4], "boxes": [[[0], [4]]]},
        ]
        for rank in range(2)
    ]
    holdings.check_holdings(ranks, shapes)
    change(ranks[1])
    with pytest.raises(ValueError, match=message):
        holdings.check_holdings(ranks, shapes)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """AWS in this process, for every kernel started within; its SageMaker client."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("SUBMIT", raising=False)

    from tests.estimator.aws import BUCKET, boto_session, moto_server

    with moto_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("SAGEMAKER_BUCKET", BUCKET)
        yield boto_session().client("sagemaker", endpoint_url=url)


@pytest.mark.thorough
def test_a_job_is_submitted_only_when_asked(aws: Any, tmp_path: Path) -> None:
    notebook = execute("03_to_sagemaker.ipynb", tmp_path, parameters={"STEPS": 7})
    text = printed(notebook)
    assert "SUBMIT is not set: nothing was sent" in text
    assert aws.list_training_jobs()["TrainingJobSummaries"] == []
    request = json.loads(text[: text.index("\n}\n") + 2])
    assert json.loads(request["HyperParameters"]["mp_parameters"]) == PARAMETERS
    assert request["HyperParameters"]["sagemaker_mpi_num_of_processes_per_host"] == "4"
    assert request["HyperParameters"]["steps"] == "7"
    assert "ml.g5.12xlarge has 4 GPUs (A10G, 24 GB each)\n" in text
    assert re.search(r"^image: \S+/pytorch-training:2\.6\.0-gpu-py312$", text, re.MULTILINE)
    assert "refused: mpi.processes_per_host=16, but instance_type='ml.g5.12xlarge' has 4 GPUs" in text

    prices = {"STEPS": 7, "MAX_RUN_S": 7200, "INSTANCE_COUNT": 2}
    notebook = execute("03_to_sagemaker.ipynb", tmp_path, parameters=prices, environment={"SUBMIT": "1"})
    (job,) = aws.list_training_jobs()["TrainingJobSummaries"]
    text = printed(notebook)
    assert f"{job['TrainingJobName']}: Completed" in text
    assert re.search(r"ml\.c5\.4xlarge +4 x its price +<- this job", text)
    sent = aws.describe_training_job(TrainingJobName=job["TrainingJobName"])
    assert sent["HyperParameters"] == {
        **request["HyperParameters"],
        "sagemaker_job_name": json.dumps(job["TrainingJobName"]),
    }
    assert sent["StoppingCondition"]["MaxRuntimeInSeconds"] == 7200

    on_gpus = {"STEPS": 7, "INSTANCE_TYPE": "ml.g5.12xlarge"}
    execute("03_to_sagemaker.ipynb", tmp_path, parameters=on_gpus, environment={"SUBMIT": "1"})
    types = {
        aws.describe_training_job(TrainingJobName=job["TrainingJobName"])["ResourceConfig"]["InstanceType"]
        for job in aws.list_training_jobs()["TrainingJobSummaries"]
    }
    assert types == {"ml.c5.4xlarge", "ml.g5.12xlarge"}
    assert left_behind(tmp_path) == []
