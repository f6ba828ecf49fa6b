"""The harness that other tests stand on: results, first causes, and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import WorldPool, run_distributed, run_script
from tests.launch.launching import left_behind, write

CASES = "tests.launch.processes.cases:"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # an ended process whose new parent has not taken note yet


@pytest.fixture
def pool() -> Iterator[WorldPool]:
    pool = WorldPool(2)
    yield pool
    pool.kill()


@pytest.mark.ci
def test_ranks_form_one_mpi_world_and_results_come_by_rank() -> None:
    assert run_distributed(f"{CASES}rank_and_size", 3) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]


def test_processes_are_kept_between_calls_unless_fresh_ones_are_asked_for() -> None:
    first = run_distributed(f"{CASES}process_id", 2)
    assert run_distributed(f"{CASES}process_id", 2) == first
    fresh = run_distributed(f"{CASES}process_id", 2, fresh=True)
    assert not set(fresh) & set(first)
    assert have_ended(fresh)


def test_arguments_parameters_and_large_results_travel() -> None:
    value = {"text": "x" * 1_000_000, "list": [1, None]}
    assert run_distributed(f"{CASES}echo", 2, kwargs={"value": value}) == [value, value]
    texts = run_distributed(f"{CASES}parameters", 2, parameters={"partitions": 2})
    assert texts == ['{"partitions": 2}'] * 2
    assert run_distributed(f"{CASES}parameters", 2) == [None, None]


def test_a_tensor_comes_back_whole() -> None:
    torch = pytest.importorskip("torch")
    for result in run_distributed(f"{CASES}tensor", 2, kwargs={"scale": 1.5}):
        assert torch.equal(result, torch.full((2, 3), 1.5))


def test_one_call_leaves_nothing_for_the_next() -> None:
    numbers = [run_distributed(f"{CASES}random_number", 2) for _ in range(2)]
    assert numbers[0] == numbers[1]
    for _ in range(2):
        was_set = run_distributed(f"{CASES}set_variable", 2, kwargs={"name": "SMP_LITE_LEFT"})
        assert was_set == [False, False]


def have_ended(processes: list[int]) -> bool:
    """Whether they are gone; a process that was killed needs a moment where much else runs."""
    until = time.monotonic() + 10
    while any(map(is_running, processes)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def failure_of(pool: WorldPool, case: str, timeout_s: float = 60.0, **kwargs: object) -> str:
    """The message of the failure; checks that the processes are gone and others can start."""
    before = pool.run(f"{CASES}process_id", None, None, 60.0)
    with pytest.raises(AssertionError) as caught:
        pool.run(f"{CASES}{case}", kwargs, None, timeout_s)
    assert not pool.alive
    assert have_ended(before)
    return str(caught.value)


def test_an_exception_on_one_rank_is_told_with_its_traceback(pool: WorldPool) -> None:
    text = failure_of(pool, "fail", failing_rank=1)
    assert "rank 1 failed first:\nTraceback" in text
    assert "RuntimeError: the cause" in text
    assert "--- rank0 ---\nwords before the failure\n" in text


@pytest.mark.slow
def test_a_rank_that_dies_is_told_with_its_record_if_it_left_one(pool: WorldPool) -> None:
    text = failure_of(pool, "die", recorded=True)
    assert "rank 1 failed first:\nthe recorded cause" in text


def test_a_rank_that_dies_without_a_record_is_named(pool: WorldPool) -> None:
    text = failure_of(pool, "die", recorded=False)
    assert "ended without an exception" in text
    assert "Exit code:    3" in text


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_shows_where(pool: WorldPool) -> None:
    text = failure_of(pool, "hang", timeout_s=2.0)
    assert "no result from ranks [1] within 2.0 s" in text
    assert "cases.py" in text
    assert "in hang" in text


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank(pool: WorldPool) -> None:
    assert "cannot pickle 'frame' object" in failure_of(pool, "unpicklable")


def test_a_call_after_a_failure_gets_new_processes() -> None:
    before = run_distributed(f"{CASES}process_id", 2)
    with pytest.raises(AssertionError, match="the cause"):
        run_distributed(f"{CASES}fail", 2, kwargs={"failing_rank": 0})
    after = run_distributed(f"{CASES}process_id", 2)
    assert not set(before) & set(after)


def test_a_script_runs_under_plain_mpirun(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "from mpi4py import MPI\n"
        "print(rank, os.environ['WORD'], sys.argv[1:], flush=True)\n"
        "print('apart', file=sys.stderr, flush=True)\n"
        "MPI.COMM_WORLD.Barrier()  # mpirun ends rank 0 when rank 1 has failed: both print before\n"
        "sys.exit(rank * 4)\n",
    )
    result = run_script([str(script), "a"], 2, env={"WORD": "w"})
    assert result.returncode == 4
    assert sorted(result.stdout.splitlines()) == ["0 w ['a']", "1 w ['a']"]
    assert "apart\n" in result.stderr


@pytest.mark.ci
def test_a_script_that_hangs_is_stopped_and_its_output_shown(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import time\nprint('up')\ntime.sleep(600)\n")
    with pytest.raises(AssertionError, match=r"took over 3\.0 s\nup\nup"):
        run_script([str(script)], 2, timeout_s=3.0)
    assert left_behind(script) == []
