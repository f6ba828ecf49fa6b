"""A check over several processes: the script runs on its ranks, and then as plain torch in one process.

Stages that several ranks share cannot be played by one process, and replicas that average gradients are more
than one. So the ranks are real ones; they leave what they find in a folder (:mod:`.in_ranks`), and afterwards
this process runs the script with the whole model (:mod:`.dense_run`) and compares.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..lifecycle import starting
from ..smp_v1.before_script import job_variables
from ..systems.plan.parallel_plan import ParallelPlan
from ..systems.showing.text_parts import WIDTH
from . import rank_script
from .dense_run import DenseChecker, plan_of_one_process
from .rank_notes import RankNotes
from .stepping import CheckEnded

__all__ = ["Target", "check_over_ranks", "without_step"]


@dataclass(frozen=True)
class Target:
    """What is checked.

    Attributes:
        name: a file, or ``package:function``.
        args: of the script; descriptions of inputs of a function.
        run: runs it in this process; returns the error that it ended by, or ``""``.
        is_script: it is no ``package:function``.
    """

    name: str
    args: tuple[str, ...]
    run: Callable[[], str]
    is_script: bool


def check_over_ranks(
    target: Target,
    *,
    processes: int,
    steps: int,
    environment: Mapping[str, str],
    parameters: Mapping[str, object] | None,
    cuda_as_cpu: bool,
) -> int:
    """Runs the target on ranks and in this process, and prints what it found.

    Args:
        target: what.
        processes: how many ranks.
        steps: how many steps to compare.
        environment: variables for the ranks.
        parameters: SMP's, for the ranks; None: as the environment or the script says.
        cuda_as_cpu: for scripts that speak of CUDA.

    Returns:
        0 if all is equal up to rounding, 1 if not.
    """
    from smp_lite.entrypoints.mpi.launch_plan import plan_launch
    from smp_lite.entrypoints.mpi.mpirun import find_mpirun
    from smp_lite.entrypoints.this_machine.launcher import run_local

    with tempfile.TemporaryDirectory(prefix="smp-lite-check-") as folder:
        plan = plan_launch(
            processes=processes,
            parameters=parameters,
            script=rank_script.__name__,
            args=rank_script.words_of(
                folder, steps, is_script=target.is_script, target=target.name, args=target.args
            ),
            module=True,
            cuda_as_cpu=cuda_as_cpu,
            defaults=job_variables(
                Path(target.name) if target.is_script else None,
                os.getcwd(),
                num_cpus=os.cpu_count() or 1,
                num_gpus=processes if cuda_as_cpu else 0,
            ),
            python=sys.executable,
            mpirun=find_mpirun(),
            is_root=os.geteuid() == 0,
        )
        print(f"smp-lite check: {target.name} on {processes} ranks", flush=True)
        ending = run_local(plan, processes, {**os.environ, **environment})
        notes = RankNotes(Path(folder), processes)
        if notes.setting is None or (ending.exit_code and notes.failure is None):
            if ending.exit_code:
                if not _is_told_in_one_line(ending.headline):
                    ending.show()
                print(_wrapped(f"refused: {ending.headline}"))
                return 1
            print(f"smp-lite check: {target.name} did not come to smp.init(): there is nothing to compare")
            return 1
        print("smp-lite check: the same in one process", flush=True)
        checker = DenseChecker(notes)
        error = _run_dense(target, notes, checker)
        return _show(target, notes, checker, error, processes)


def _run_dense(target: Target, notes: RankNotes, checker: DenseChecker) -> str:
    """Runs the target in this process; returns the error that it ended by."""
    assert notes.setting is not None
    plan: ParallelPlan | None = None if notes.plan is None else plan_of_one_process(notes.plan)
    parameters = None
    if plan is None:
        parameters = {"partitions": 1, "microbatches": notes.setting["microbatches"]}
    with starting.checking(parameters, checker, plan=plan), contextlib.suppress(CheckEnded):
        return target.run()
    return ""


def _show(target: Target, notes: RankNotes, checker: DenseChecker, error: str, processes: int) -> int:
    reports, failure = checker.reports, notes.failure
    last = reports[-1] if reports else None
    step = notes.step(0) if notes.num_steps or failure is not None else None
    if step is not None and step.split is not None:
        print(_wrapped(f"plan of the layers: {step.split.origin_text}"))
        for line in step.split.lines():
            print(f"  {line}")
    if last is not None and last.fails:
        which = "too" if failure else "only"
        print(_wrapped(f"step {last.index} fails in one process {which}: {last.fails}"))
        return 1
    if last is not None and last.texts:
        print(f"step {last.index} differs from one process:")
        _print_first(last.texts)
        return 1
    if failure is not None:
        where = f" in {failure.module}" if failure.module else ""
        print(_wrapped(f"refused in step {failure.step} on rank {failure.rank}{where}: {failure.text}"))
        return 1
    if last is None:
        print(_wrapped(f"smp-lite check: {error or without_step(target.name)}"))
        return 1
    if len(reports) < notes.num_steps:
        why = error or "its loop depends on the number of ranks"
        print(
            _wrapped(
                f"the script ended in one process after {len(reports)} steps, and had {notes.num_steps} on "
                f"the ranks: {why}"
            )
        )
        return 1
    assert step is not None and notes.setting is not None
    _show_equal(notes, checker, processes)
    return 0


def _show_equal(notes: RankNotes, checker: DenseChecker, processes: int) -> None:
    reports, setting = checker.reports, notes.setting
    assert setting is not None
    last = reports[-1]
    steps = f"{len(reports)} step{'s' * (len(reports) != 1)}"
    axes = " x ".join(f"{name} {size}" for name, size in setting["axes"] if size > 1)
    largest = max(report.largest for report in reports)
    how = (
        "to the bit" if largest == 0.0 else f"up to rounding (by {largest:.1g} of a tensor's largest number)"
    )
    optimizer = ", and what the optimizer made of them" if len(reports) > 1 else ""
    print(
        _wrapped(
            f"equal over {steps} on {processes} ranks ({axes}), {how}: results of {last.num_replicas} "
            f"batch{'es' * (last.num_replicas != 1)} a step, {last.num_gradients} gradients, put together "
            f"where ranks have parts{optimizer}"
        )
    )
    if last.parts:
        names = ", ".join(last.parts[:3])
        print(_wrapped(f"not compared: {len(last.parts)} buffers of which ranks have parts ({names})"))


def without_step(name: str) -> str:
    """For a script that ended before there was anything to compare."""
    return f"{name} ended without a step (a call of a function under @smp.step): there is nothing to compare"


def _is_told_in_one_line(headline: str) -> bool:
    """Whether an error of ours says all: of others the traceback is shown as well."""
    return any(f"{kind}: " in headline for kind in ("SMPError", "ConfigError"))


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _print_first(texts: Sequence[str]) -> None:
    for text in texts[:6]:
        print(_wrapped(text, "  "))
    if len(texts) > 6:
        print(f"  and {len(texts) - 6} more")
