"""The command line of ``smp-lite check``."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ..devices import CPU, DEVICE_VARIABLE
from ..errors import SMPError
from ..lifecycle import starting
from ..preview.targets import own_traceback
from ..smp_v1.before_script import add_cuda_argument, prepared_here
from ..systems.load.job_config import add_config_arguments, read_job_config
from . import model_script
from .over_ranks import Target, check_over_ranks, without_step
from .stepping import CheckEnded, NeedsRanks, StepChecker

__all__ = ["add_check_arguments", "run_check"]


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``smp-lite check`` takes."""
    parser.add_argument(
        "--parameters",
        metavar="JSON",
        help="the SMP parameters: a JSON object, or the path of a file that holds one; "
        "default: SM_HP_MP_PARAMETERS, then what the script gives smp.init()",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="how many steps to compare (default 2)"
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]DTYPE[SIZES]",
        help="an input of a package:function model for one batch, such as 'int64[16,128]'; integers are "
        "zeros, other numbers random",
    )
    add_cuda_argument(parser)
    parser.add_argument(
        "target",
        metavar="[KEY=VALUE ...] target",
        help="a script, or package:function that builds a model; before it, changes to --config in its "
        "system's words",
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments for the script")


def run_check(args: argparse.Namespace, overrides: Sequence[str] = ()) -> int:
    """Runs the first steps both ways and prints what it found.

    Where a rank holds whole stages, this process plays them all, and results are compared to the bit; where
    ranks share a stage, or there are replicas, real ranks are started (:mod:`.over_ranks`).

    Args:
        args: of :func:`add_check_arguments`.
        overrides: ``key=value``, changes to the configuration.

    Returns:
        0 if all is equal, 1 if not.

    Raises:
        ValueError: an argument is wrong, or the environment names another device than the CPU: a process that
            has used an accelerator cannot fork.
    """
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: compare at least one step")
    before = dict(os.environ)
    try:
        return _run_check(args, overrides)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_check(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    if (device := os.environ.setdefault(DEVICE_VARIABLE, CPU.type)) != CPU.type:
        raise ValueError(
            f"{DEVICE_VARIABLE}={device!r}: check compares on the CPU, since it forks: leave it out, and "
            "give --cuda-as-cpu if the script speaks of CUDA"
        )
    given = read_job_config(args, overrides)
    target = _target(args)
    # The process forks, which torch's own threads would not survive.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    parameters = given.parameters if given is not None and given.parameters is not None else args.parameters
    plan = given.plan if given is not None and given.parameters is None else None
    processes = given.plan.world_size if given is not None else args.world_size or 1
    if given is None or given.plan.world_size == given.plan.pp_size:
        checker = StepChecker(args.steps, processes)
        try:
            error = ""
            with (
                starting.checking(parameters, checker, plan=plan, world_size=args.world_size),
                contextlib.suppress(CheckEnded),
            ):
                error = target.run()
            return _show(checker, target.name, error)
        except NeedsRanks as asked:
            processes = asked.num_ranks
    return check_over_ranks(
        target,
        processes=processes,
        steps=args.steps,
        environment={} if given is None or parameters is not None else given.environment(),
        parameters=parameters,
        cuda_as_cpu=args.cuda_as_cpu,
    )


def _target(args: argparse.Namespace) -> Target:
    """
    Raises:
        ValueError: it is neither a script nor a function.
    """
    path = Path(args.target)
    if path.is_file():
        if args.input:
            raise ValueError("--input is for a package:function; a script makes its own inputs")

        def run_script() -> str:
            with prepared_here(args.target, cuda_as_cpu=args.cuda_as_cpu):
                return _run_script(args.target, args.args)

        return Target(args.target, tuple(args.args), run_script, is_script=True)
    if ":" not in args.target:
        raise ValueError(
            f"script {args.target!r} is not a file (working directory: {os.getcwd()}), and not "
            "package:function either"
        )

    def run_function() -> str:
        try:
            model_script.train(args.target, args.input, args.steps)
        except SMPError as error:
            return str(error)
        return ""

    return Target(args.target, tuple(args.input), run_function, is_script=False)


def _run_script(script: str, script_args: list[str]) -> str:
    """Runs the script until the check ends it by CheckEnded; the error that it ended by itself, if it did."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *script_args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with own_traceback(script):
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                return "" if not end.code else f"the script ended with exit code {end.code}"
    except SMPError as error:
        return str(error)
    finally:
        sys.argv, sys.path[:] = argv, path
    return ""


def _show(checker: StepChecker, script: str, error: str) -> int:
    reports = checker.reports
    if not reports:
        print(f"smp-lite check: {error or without_step(script)}")
        return 1
    last = reports[-1]
    if last.refused:
        print(f"refused in step {last.index}: {last.refused}")
        return 1
    if last.fails:
        print(f"step {last.index} fails in one process too: {last.fails}")
        return 1
    if last.differs:
        print(f"step {last.index} differs from one process:")
        for text in last.texts[:5]:
            print(f"  {text}")
        if len(last.texts) > 5:
            print(f"  and {len(last.texts) - 5} more")
        return 1
    calls = sum(report.num_calls for report in reports)
    steps = f"{len(reports)} step{'s' * (len(reports) != 1)}"
    stages = f"{last.num_stages} stage{'s' * (last.num_stages != 1)}"
    rounded = list(dict.fromkeys(name for report in reports for name in report.rounded))
    if rounded:
        print(
            f"equal over {steps}: {calls} calls, {stages}; but for the last bits of {len(rounded)} gradient"
            f"{'s' * (len(rounded) != 1)}, whose parts are summed in another order ({rounded[0]}...)"
        )
    else:
        print(f"equal to the bit over {steps}: {calls} calls, {stages}")
    if error:
        print(f"(then the script ended: {error})")
    return 0
