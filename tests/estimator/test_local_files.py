"""A job's files on this machine: what its archives hold, and its paths in the user's own texts."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from smp_lite.estimator.local.files import collect_outputs, prepare_tree
from smp_lite.estimator.local.paths import translate_paths
from smp_lite.estimator.local.store import Store


def request(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": "named",
        "OutputDataConfig": {"S3OutputPath": f"file://{directory}/out"},
        "ResourceConfig": {"InstanceCount": 2, "InstanceType": "local"},
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        **changes,
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tree" / "model"
    folder.mkdir(parents=True)
    return folder


def packed(directory: Path) -> dict[str, bytes]:
    collect_outputs(request(directory), [directory / "tree"], directory / "output", Store(directory, None))
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
    ("target", "how"),
    [("gone", "nowhere"), ("link", "in circles"), (".", "in circles"), ("..", "in circles")],
)
def test_a_link_that_leads_to_nothing_is_named(target: str, how: str, model: Path, tmp_path: Path) -> None:
    (model / "deep").mkdir()
    link = model / "link" if target != ".." else model / "deep" / "link"
    link.symlink_to(target)
    with pytest.raises(ValueError, match=f"the link {link} -> {target} leads {how}"):
        packed(tmp_path)
    assert not (tmp_path / "output" / "model.tar.gz").exists()


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
