"""Nothing hangs: whatever goes wrong on one rank, all end, and the first cause is shown last.

Plain `mpirun python script.py` unless a test says otherwise: there nothing but the library itself
stands between one rank's mistake and peers that wait for ever. The time a test allows is a bound
against hanging, with room for a busy machine.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import run_distributed, run_script
from tests.launch.launching import launch, left_behind
from tests.sampling import one_in

pytestmark = pytest.mark.sampled(3)

HANG_S = 60.0
WATCHDOG = {"SMP_LITE_WATCHDOG_S": "300", "OMP_NUM_THREADS": "1"}

PREAMBLE = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, smp_lite as smp
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
at = sys.argv[1]
def here(place):
    if rank == 1 and at == place:
        ACTION
"""
SCRIPT = """
here("before init")
smp.init({"partitions": 2, "microbatches": 2})
here("after init")
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model = smp.DistributedModel(net)

@smp.step
def train(model, x):
    here("in the first step")
    out = model(x)
    if model.steps == 1:
        here("in a later step")
    loss = out.mean()
    model.backward(loss)
    return loss

for model.steps in range(3):
    train(model, torch.ones(4, 4))
    here("between steps")
"""


def write(directory: Path, body: str, action: str = "pass") -> Path:
    path = directory / "script.py"
    path.write_text(PREAMBLE.replace("ACTION", action) + body)
    return path


def fails(directory: Path, body: str, *args: str, action: str = "pass", ranks: int = 2) -> list[str]:
    """Runs a script that must fail in time; its stderr without mpirun's own notices."""
    path = write(directory, body, action)
    argv = [str(path), *(args or ("",))]
    result = run_script(argv, ranks, env=WATCHDOG, timeout_s=HANG_S)
    assert result.returncode != 0
    assert left_behind(path) == []
    notice = re.compile(r"^-{60,}\n.*?^-{60,}\n", re.DOTALL | re.MULTILINE)
    return notice.sub("", result.stderr).strip("\0 \n").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("place", one_in(2, ["after init", "in a later step", "between steps"]))
def test_an_exception_on_one_rank_ends_all_and_is_shown_last(tmp_path: Path, place: str) -> None:
    shown = fails(tmp_path, SCRIPT, place, action="raise RuntimeError('the cause')")
    assert shown[-1] == "RuntimeError: the cause"
    assert shown.count("RuntimeError: the cause") == 1
    assert "rank 1 failed:" in shown


@pytest.mark.slow
def test_a_config_that_is_wrong_on_one_rank_ends_all(tmp_path: Path) -> None:
    shown = fails(tmp_path, "smp.init({'partitions': 2, 'microbatches': 2 - 2 * rank})\n")
    assert "The number of microbatches must be a positive integer" in shown[-1]


@pytest.mark.slow
def test_a_timeline_that_cannot_be_written_ends_all_before_the_first_step(tmp_path: Path) -> None:
    name = "os.environ['SMP_LITE_TRACE'] = __file__\n"
    shown = fails(tmp_path, f"{name}smp.init({{'partitions': 2}})\nprint('went on', file=sys.stderr)\n")
    assert "SMP_LITE_TRACE=" in shown[-1] and "cannot be written there (File exists)" in shown[-1]
    assert "went on" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "action"),
    [
        pytest.param("after init", "sys.exit(3)", marks=pytest.mark.thorough),
        ("between steps", "sys.exit(0)"),
    ],
)
def test_a_rank_that_leaves_early_is_named(tmp_path: Path, place: str, action: str) -> None:
    shown = fails(tmp_path, SCRIPT, place, action=action)
    assert "rank(s) 1 ended the script early" in shown[-1]


UNEVEN = """
smp.init({"partitions": 1, "ddp": True})
model = smp.DistributedModel(torch.nn.Linear(4, 4))

@smp.step
def train(model, x):
    model.backward(model(x).mean())

for _ in range(2 + rank):
    train(model, torch.ones(4, 4))
"""


@pytest.mark.ci
def test_a_replica_that_has_no_more_batches_is_named(tmp_path: Path) -> None:
    last = fails(tmp_path, UNEVEN)[-1]
    assert "rank(s) 0 ended the script early: not all of the ranks 0, 1 came to" in last
    assert "All replicas must run equally many steps" in last


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    fails(tmp_path, SCRIPT, "between steps", action="os.kill(os.getpid(), 9)")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before init", "in the first step"])
def test_an_exception_under_the_launcher(tmp_path: Path, place: str) -> None:
    path = write(tmp_path, SCRIPT, "raise RuntimeError('the cause')")
    result = launch(tmp_path, "--processes", "2", str(path), place, env=WATCHDOG)
    assert result.returncode == 1
    assert result.stderr.endswith("RuntimeError: the cause\n")
    assert "rank 1 failed first:" in result.stderr
    assert left_behind(path) == []


@pytest.mark.thorough
def test_a_rank_that_leaves_early_under_the_launcher(tmp_path: Path) -> None:
    path = write(tmp_path, SCRIPT, "sys.exit(0)")
    result = launch(tmp_path, "--processes", "2", str(path), "between steps", env=WATCHDOG)
    assert result.returncode == 1
    assert "rank(s) 1 ended the script early" in result.stderr.splitlines()[-1]


ONE_STEP = """
smp.init({"partitions": 2, "microbatches": 2})
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model = smp.DistributedModel(net)

@smp.step
def train(model, x):
    out = model(x)
    if rank == 1 and at == "calls":
        out = torch.relu(out)
    model.backward(out.mean())

x = torch.ones(4, 4) + (rank if at == "batch" else 0)
train(model, x)
"""


@pytest.mark.slow
def test_ranks_that_record_different_calls_are_told_which(tmp_path: Path) -> None:
    *_, last = fails(tmp_path, ONE_STEP, "calls")
    assert "SMPMismatch" in last
    assert re.search(r"rank 1 recorded call \d+ of microbatch 0 = relu on stage \d", last)
    assert re.search(r"rank 0 recorded call \d+ of microbatch 0 = mean on stage \d", last)


@pytest.mark.slow
def test_ranks_with_different_batches_are_told(tmp_path: Path) -> None:
    *_, last = fails(tmp_path, ONE_STEP, "batch")
    assert "SMPMismatch: the batch of a step differs" in last
    assert "seed and shard data by smp.dp_rank(), never by smp.rank()" in last


MISSING = """
smp.set_watchdog(2)
if rank == 0:
    model.state_dict()
else:
    time.sleep(1000)
"""


@pytest.mark.slow
def test_a_collective_call_on_some_ranks_only_names_the_missing_ones(tmp_path: Path) -> None:
    *_, last = fails(tmp_path, ONE_STEP + MISSING)
    assert last.startswith("smp_lite.errors.SMPTimeout: waited 2 s: model.state_dict is collective")
    assert "rank(s) 1 did not call it" in last
    assert "SMP_LITE_WATCHDOG_S" in last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "names"),
    [
        pytest.param(
            "smp.allgather(1) if rank else smp.barrier()",
            ("allgather", "barrier"),
            marks=pytest.mark.thorough,
        ),
        ("train(model, x) if rank else model.state_dict()", ("SMPTimeout", "p group [0, 1]")),
    ],
    ids=["collectives", "step"],
)
def test_ranks_that_make_different_collective_calls_are_told(
    tmp_path: Path, calls: str, names: tuple[str, str]
) -> None:
    *_, last = fails(tmp_path, f"{ONE_STEP}smp.set_watchdog(2)\n{calls}\n")
    assert all(name.lower() in last.lower() for name in names)


@pytest.mark.slow
def test_different_calls_before_the_first_step_do_not_hang_either(tmp_path: Path) -> None:
    body = ONE_STEP.replace("train(model, x)\n", "smp.barrier() if rank else train(model, x)\n")
    *_, last = fails(tmp_path, body.replace("net =", "smp.set_watchdog(60)\nnet ="))
    assert "SMPMismatch" in last
    assert "barrier" in last


@pytest.mark.parametrize(
    ("world_size", "parameters", "text"),
    [
        (1, {"partitions": 2}, "partitions=2"),
        (3, {"partitions": 2, "ddp": True}, "multiple"),
        (4, {"partitions": 2}, "ddp"),
    ],
    ids=["too few", "no multiple", "ddp missing"],
)
def test_a_number_of_processes_that_does_not_fit(
    world_size: int, parameters: dict[str, object], text: str
) -> None:
    errors = run_distributed("tests.launch.api.api_cases:init_error", world_size, parameters=parameters)
    for error in errors:
        assert error.startswith("ConfigError: ")
        assert text in error
        assert re.search(rf"\b{world_size}\b", error)
