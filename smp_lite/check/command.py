"""The command line of ``smp-lite check``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

import torch

from .. import starting
from ..errors import SMPError
from ..smp_v1.before_script import add_cuda_argument, prepared_here
from .stepping import CheckEnded, StepChecker

__all__ = ["add_check_arguments", "run_check"]


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``smp-lite check`` takes."""
    parser.add_argument(
        "--parameters",
        metavar="JSON",
        help="the SMP parameters: a JSON object, or the path of a file that holds one; "
        "default: SM_HP_MP_PARAMETERS, then what the script gives smp.init()",
    )
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="how many steps to compare (default 2)"
    )
    add_cuda_argument(parser)
    parser.add_argument("script", help="the Python script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments for the script")


def run_check(args: argparse.Namespace) -> int:
    """Runs the script's first steps both ways and prints what it found.

    Returns:
        0 if all is equal, 1 if not.
    """
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: compare at least one step")
    if not Path(args.script).is_file():
        raise ValueError(f"script {args.script!r} is not a file (working directory: {os.getcwd()})")
    # The process forks, which torch's own threads would not survive.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    checker = StepChecker(args.steps)
    error = ""
    with (
        prepared_here(args.script, cuda_as_cpu=args.cuda_as_cpu),
        starting.checking(args.parameters, checker),
    ):
        error = _run_script(args.script, args.args)
    return _show(checker, args.script, error)


def _run_script(script: str, script_args: list[str]) -> str:
    """Runs the script until the check ends it; the error that it ended by, if it did."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *script_args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except CheckEnded:
        pass
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
        print(f"smp-lite check: {error or f'{script} ended without a step: there is nothing to compare'}")
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
