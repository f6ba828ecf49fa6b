"""The command `smp-lite`: `run` starts a script on several processes, `plan` looks before it.

`run` must answer at once and so imports no torch; what `plan` needs is imported when it is asked
for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="smp-lite", description="Run and plan SMP training scripts on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{run,plan}")
    run = commands.add_parser("run", help="run a script on several processes of this machine")
    _add_run_arguments(run)
    plan = commands.add_parser("plan", help="show how a model would be split and scheduled")
    if arguments[:1] == ["plan"]:
        from smp_lite import preview

        preview.add_plan_arguments(plan)
    args = parser.parse_args(arguments)
    try:
        if args.command == "run":
            return _run(args)
        if args.args and ":" in args.target:
            # A function takes no arguments: what follows it is meant for us.
            args = parser.parse_args(["plan", *args.args, args.target])
        if args.parameters is not None:
            args.parameters = _read_parameters(args.parameters)
        return preview.run_plan(args)
    except ValueError as error:
        print(f"smp-lite {args.command}: {error}", file=sys.stderr)
        return _USAGE_ERROR


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many ranks to start")
    parser.add_argument(
        "--parameters",
        metavar="JSON",
        help="the SMP parameters: a JSON object, or the path of a file that holds one",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module name, as in python -m"
    )
    parser.add_argument("script", help="the Python script that every rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments for the script")


def _run(args: argparse.Namespace) -> int:
    from smp_lite.config import Config
    from smp_lite.entrypoints.launch_plan import plan_launch
    from smp_lite.entrypoints.local import run_local
    from smp_lite.entrypoints.mpirun import find_mpirun

    if not args.module and not Path(args.script).is_file():
        raise ValueError(f"script {args.script!r} is not a file (working directory: {os.getcwd()})")
    parameters = None if args.parameters is None else _read_parameters(args.parameters)
    plan = plan_launch(
        processes=args.processes,
        parameters=parameters,
        script=args.script,
        args=args.args,
        module=args.module,
        python=sys.executable,
        mpirun=find_mpirun(),
        is_root=os.geteuid() == 0,
    )
    if parameters is not None:
        Config.from_parameters(parameters).check_world_size(args.processes)
    return run_local(plan, args.processes, os.environ)


def _read_parameters(text: str) -> dict[str, Any]:
    """The SMP parameters from a JSON text, or from the file that `text` names."""
    from smp_lite.config import parse_parameters

    if not text.lstrip().startswith("{"):
        return parse_parameters(text)
    try:
        parameters: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--parameters is not valid JSON ({error}): {text}") from None
    return parameters


if __name__ == "__main__":
    sys.exit(main())
