"""Which processes belong to a launch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smp_lite.entrypoints.this_machine.channels import Channels
from smp_lite.entrypoints.this_machine.leftovers import belongs_to, kill_leftovers
from smp_lite.errors_record import ERROR_DIR_VARIABLE


@contextmanager
def a_process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """One of the launch with that folder, started as leader of a process group."""
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        env={**os.environ, ERROR_DIR_VARIABLE: str(directory)},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # from here on it shows its environment
            yield process
        finally:
            process.kill()


def test_leftovers_of_one_launch_end_and_those_of_others_stay(tmp_path: Path) -> None:
    ours, others = tmp_path / "a", tmp_path / "ab"
    with a_process(ours) as first, a_process(ours) as second, a_process(others) as other:
        kill_leftovers(ours)
        assert (first.wait(20), second.wait(20)) == (-9, -9)
        assert other.poll() is None
        assert belongs_to(other.pid, others)
        assert not belongs_to(first.pid, ours)


def test_a_stranger_with_the_process_id_of_a_rank_is_none(tmp_path: Path) -> None:
    with a_process(tmp_path) as rank, a_process(tmp_path / "another") as stranger:
        (tmp_path / "rank0.pid").write_text(str(rank.pid))
        (tmp_path / "rank1.pid").write_text(str(stranger.pid))
        with Channels(tmp_path, (), ()) as channels:
            assert sorted(channels.told_pids()) == sorted([rank.pid, stranger.pid])
            assert channels.rank_pids() == [rank.pid]
