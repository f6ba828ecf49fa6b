"""Failure records: the first of a rank stays, the earliest comes first, writing never raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_lite.errors_record import ERROR_DIR_VARIABLE, read_failures, record_failure


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ERROR_DIR_VARIABLE, str(tmp_path))
    return tmp_path


def test_records_are_read_in_the_order_of_their_times(directory: Path) -> None:
    for rank in (3, 1, 10):
        assert record_failure(f"text {rank}", rank, exit_code=rank + 20)
    found = [(failure.rank, failure.exit_code, failure.text) for failure in read_failures(directory)]
    assert found == [(3, 23, "text 3"), (1, 21, "text 1"), (10, 30, "text 10")]


def test_the_first_record_of_a_rank_stays_and_nothing_else_is_left(directory: Path) -> None:
    assert record_failure("first", 0, exit_code=7)
    assert record_failure("second", 0, exit_code=8)
    (record,) = read_failures(directory)
    assert (record.text, record.exit_code) == ("first", 7)
    assert [path.name for path in directory.iterdir()] == ["rank0.failure.json"]


def test_an_exception_is_recorded_as_its_traceback(directory: Path) -> None:
    try:
        raise KeyError("lost \udcff")
    except KeyError as caught:
        error = caught
    assert record_failure(error, 0)
    assert record_failure((KeyError, error, error.__traceback__), 1)
    for record in read_failures(directory):
        assert record.text.startswith("Traceback (most recent call last):\n")
        assert "KeyError: 'lost \\udcff'" in record.text


def test_nothing_is_written_unless_a_launcher_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ERROR_DIR_VARIABLE, raising=False)
    assert not record_failure("text", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_no_second_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_DIR_VARIABLE, str(tmp_path / "gone"))
    assert not record_failure("text", 0)
