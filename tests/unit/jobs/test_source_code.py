"""Where a job's code can lie, and what is said when it cannot be had."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from smp_lite.entrypoints.container.source_code import fetch_source, install_requirements


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "with space"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "train.py").write_text("code")
    (folder / "start.sh").write_text("#!/bin/sh\n")
    return folder


@pytest.fixture
def archive(source: Path, tmp_path: Path) -> Path:
    path = tmp_path / "sourcedir.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(source, ".")
    return path


@pytest.mark.parametrize("spelling", ["path", "uri"])
@pytest.mark.parametrize("kind", ["source", "archive"])
def test_code_comes_from_folders_and_archives(
    kind: str, spelling: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    target = tmp_path / "code"
    fetch_source(str(path) if spelling == "path" else path.as_uri(), target)
    assert (target / "deep" / "train.py").read_text() == "code"


def test_a_relative_folder_as_the_sdk_writes_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    fetch_source("file://src", tmp_path / "code")
    assert (tmp_path / "code" / "deep" / "train.py").exists()


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "file", "../outside")
    with pytest.raises(ValueError, match="could not be unpacked"):
        fetch_source(str(path), tmp_path / "deep" / "code")
    assert not (tmp_path / "deep" / "outside").exists()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/no/such/folder", "there is no such file or folder"),
        ("https://example.com/code.tar.gz", "must be an s3:// or file:// address"),
        (__file__, "could not be unpacked as a tar.gz archive"),
    ],
)
def test_code_that_cannot_be_had_is_named(location: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fetch_source(location, tmp_path / "code")
    assert location in str(caught.value)


def test_no_requirements_need_no_pip(tmp_path: Path) -> None:
    install_requirements(tmp_path, apart=tmp_path / "packages")
    assert not (tmp_path / "packages").exists()
