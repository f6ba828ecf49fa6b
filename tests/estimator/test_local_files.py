"""A job's files on this machine: what its archives hold, and its paths in the user's own texts."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from smp_lite.estimator.local.files import collect_outputs, prepare_tree
from smp_lite.estimator.local.paths import translate_paths
from smp_lite.estimator.local.store import Store
from tests.estimator.jobs import estimator


def request(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": "named",
        "OutputDataConfig": {"S3OutputPath": f"file://{directory}/out"},
        "ResourceConfig": {"InstanceCount": 2, "InstanceType": "local"},
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        **changes,
    }


def collected(directory: Path, *trees: str) -> list[str]:
    """Pack the outputs; what is said of it."""
    said: list[str] = []
    paths = [directory / tree for tree in trees]
    collect_outputs(request(directory), paths, directory / "output", Store(directory, None), said.append)
    return said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tree" / "model"
    folder.mkdir(parents=True)
    return folder


def packed(directory: Path) -> dict[str, bytes]:
    assert collected(directory, "tree") == []
    with tarfile.open(directory / "output" / "model.tar.gz") as archive:
        members = archive.getmembers()
        assert all(member.isfile() or member.isdir() for member in members)
        return {
            member.name: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in members
            if member.isfile()
        }


def test_a_link_is_packed_as_what_it_leads_to(model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("w")
    (model / "best").symlink_to(elsewhere / "weights")
    (model / "folder").symlink_to(elsewhere)
    (model / "again").symlink_to("best")
    (model / "hard").hardlink_to(elsewhere / "weights")
    assert packed(tmp_path) == dict.fromkeys(("best", "folder/weights", "again", "hard"), b"w")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("link", "gone"),
        ("link", "/gone"),
        ("link", "file/below"),
        ("link", "link"),
        ("link", "."),
        ("deep/link", ".."),
        ("deep/link", "../.."),  # above the model's folder, and back to it
        ("link", "/"),
    ],
)
def test_a_link_that_leads_to_nothing_is_packed_as_a_link(
    name: str, target: str, model: Path, tmp_path: Path
) -> None:
    (model / "deep").mkdir()
    (model / "file").write_text("w")
    (model / name).symlink_to(target)
    text = f"links that lead nowhere or in circles, in model.tar.gz as links: {name} -> {target}"
    assert collected(tmp_path, "tree") == [text]
    with tarfile.open(tmp_path / "output" / "model.tar.gz") as archive:
        assert sorted(archive.getnames()) == sorted(["deep", "file", name])
        assert archive.getmember(name).issym()
        assert archive.getmember(name).linkname == target


def test_files_of_one_name_that_are_not_alike_are_said(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "model"
    for folder, text in ((model, "of this host"), (other, "of another")):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "own").write_text(text)
        (folder / "same").write_text("w")
    (other / "more").write_text("w")
    assert collected(tmp_path, "tree", "other") == [
        "several hosts have files of one name, of which model.tar.gz has the first host's: not in it are "
        f"deep/own ({other / 'deep' / 'own'})"
    ]
    assert packed(tmp_path) == {"deep/own": b"of this host", "same": b"w"}


def test_what_another_host_has_goes_before_a_link_that_leads_to_nothing(model: Path, tmp_path: Path) -> None:
    (model / "last").symlink_to("gone")
    (tmp_path / "other" / "model" / "last").mkdir(parents=True)
    (tmp_path / "other" / "model" / "last" / "weights").write_text("w")
    assert collected(tmp_path, "tree", "other") == []
    with tarfile.open(tmp_path / "output" / "model.tar.gz") as archive:
        assert archive.getnames() == ["last", "last/weights"]


TRANSLATED = {
    "/opt/ml": "ROOT",
    "/opt/ml/model": "ROOT/model",
    "--out=/opt/ml/model": "--out=ROOT/model",
    "/opt/ml/a:/opt/ml/b": "ROOT/a:ROOT/b",
    "/opt/ml/a,/opt/ml/b;/opt/ml": "ROOT/a,ROOT/b;ROOT",
    "cat '/opt/ml/a b' \"/opt/ml\"": "cat 'ROOT/a b' \"ROOT\"",
    "see /opt/ml/x": "see ROOT/x",
    "/opt/mlx /opt/ml-x": "/opt/mlx /opt/ml-x",
    "s3://bucket/opt/ml/x": "s3://bucket/opt/ml/x",
    "/usr/opt/ml/x": "/usr/opt/ml/x",
    "{/opt/ml/a,/opt/ml/b}": "{ROOT/a,ROOT/b}",
    "/opt/ml/a|/opt/ml/b": "ROOT/a|ROOT/b",
    "[/opt/ml/a]": "[ROOT/a]",
    "[/opt/ml] {/opt/ml} (/opt/ml) /opt/ml|": "[ROOT] {ROOT} (ROOT) ROOT|",
    "paths=[/opt/ml/x,/opt/ml/y]": "paths=[ROOT/x,ROOT/y]",
    "2>/opt/ml/output/log </opt/ml/in": "2>ROOT/output/log <ROOT/in",
    "user@host:/opt/ml/x": "user@host:/opt/ml/x",
    "--to=user@host:/opt/ml /opt/ml/x": "--to=user@host:/opt/ml ROOT/x",
    "http://h:/opt/ml": "http://h:/opt/ml",
    "[http://h:/opt/ml/x,/opt/ml/y]": "[http://h:/opt/ml/x,ROOT/y]",
    '{"a":"http://h:1","b":"/opt/ml"}': '{"a":"http://h:1","b":"ROOT"}',
}


@pytest.mark.parametrize("text", TRANSLATED)
def test_every_path_of_the_container_in_a_text_is_that_of_the_host(text: str) -> None:
    root = Path(r"/jobs/\1/algo-1")
    assert translate_paths(text, root) == TRANSLATED[text].replace("ROOT", str(root))
    assert translate_paths({"key": [text, 1]}, root) == {
        "key": [TRANSLATED[text].replace("ROOT", str(root)), 1]
    }


def test_a_host_without_a_share_of_a_sharded_channel_has_an_empty_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "only").touch()
    source = {"S3Uri": f"file://{data}", "S3DataDistributionType": "ShardedByS3Key"}
    asked = request(
        tmp_path, InputDataConfig=[{"ChannelName": "train", "DataSource": {"S3DataSource": source}}]
    )
    for host, names in (("algo-1", ["only"]), ("algo-2", [])):
        prepare_tree(asked, host, tmp_path / host, Store(tmp_path, None))
        assert [path.name for path in (tmp_path / host / "input/data/train").iterdir()] == names


@pytest.mark.slow
def test_a_link_that_leads_to_nothing_is_said_in_the_log_and_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = estimator(
        tmp_path,
        "if rank == 0: say('loss=1'); os.symlink('gone', os.environ['SM_MODEL_DIR'] + '/loss=2')",
        metric_definitions=[{"Name": "loss", "Regex": r"loss=(\d)"}],
    )
    job.fit()
    said = "smp-lite: links that lead nowhere or in circles, in model.tar.gz as links: loss=2 -> gone\n"
    assert said in capsys.readouterr().out
    description = job.latest_training_job.describe()
    assert description["TrainingJobStatus"] == "Completed"
    assert [metric["Value"] for metric in description["FinalMetricDataList"]] == [1.0]
