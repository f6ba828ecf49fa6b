"""The command `smp-lite`: `run` starts a script on several processes, `launch` prints what starts it on a
cluster, `plan` looks before it, `explain` reads configurations of five systems, `port` scripts of SMP v1.

`run` and `launch` must answer at once and so import no torch; what `plan` needs is imported when it is
asked for.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smp_lite import __version__
from smp_lite.errors import SMPError
from smp_lite.smp_v1.before_script import add_cuda_argument, job_variables

__all__ = ["main"]

_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of modules may have any letters
    try:
        code = _main(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except OSError as error:
        if not _is_of_output():
            raise
        # Python writes once more what could not be written, when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `| head`, which has what it wanted
            return 128 + signal.SIGPIPE
        print(
            f"smp-lite {arguments[0]}: standard output cannot be written to: {error.strerror}",
            file=sys.stderr,
        )
        return _USAGE_ERROR


def _is_of_output() -> bool:
    """Whether it is standard output that fails: then an empty line, which harms no one, fails too."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="smp-lite", description="Run, launch and plan SMP training scripts."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    names = "{run,launch,plan,explain,check,port}"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    run = commands.add_parser("run", help="run a script on several processes of this machine")
    _add_run_arguments(run)
    launch = commands.add_parser("launch", help="print what starts a script on a cluster; start nothing")
    _add_launch_arguments(launch)
    plan = commands.add_parser("plan", help="show how a model would be split and scheduled")
    if arguments[:1] == ["plan"]:
        from smp_lite.preview import step_preview as preview

        preview.add_plan_arguments(plan)
    explain = commands.add_parser(
        "explain", help="show what a configuration of one of five systems asks for, and say it as another"
    )
    if arguments[:1] == ["explain"]:
        from smp_lite.systems.showing.command import add_explain_arguments, run_explain

        add_explain_arguments(explain)
    check = commands.add_parser("check", help="compare a script's first steps with one process's, to the bit")
    if arguments[:1] == ["check"]:
        from smp_lite.check.command import add_check_arguments, run_check

        add_check_arguments(check)
    port = commands.add_parser("port", help="list what a script takes from SMP, and what becomes of it here")
    if arguments[:1] == ["port"]:
        from smp_lite.smp_v1.port.command import add_port_arguments, run_port

        add_port_arguments(port)
    overrides: list[str] = []
    try:
        if arguments[:1] == ["explain"]:
            # Changes of keys may stand between options, which a parser of sub-commands does not take.
            args = argparse.Namespace(command="explain", **vars(explain.parse_intermixed_args(arguments[1:])))
        elif arguments[:1] in (["run"], ["plan"], ["check"]):
            args, overrides = _parse_with_overrides(parser, arguments)
        else:
            args = parser.parse_args(arguments)
        if args.command == "port":
            return run_port(args)
        if args.command == "explain":
            return run_explain(args)
        if args.command == "run":
            return _run(args, overrides)
        if args.command == "launch":
            print(_launch(args), end="")
            return 0
        if args.parameters is not None:
            args.parameters = _only_parameters(args.parameters)
        return run_check(args, overrides) if args.command == "check" else preview.run_plan(args, overrides)
    except (ValueError, SMPError) as error:
        print(f"smp-lite {arguments[0]}: {error}", file=sys.stderr)
        return _USAGE_ERROR


def _parse_with_overrides(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Takes the ``key=value`` that stand before the script, between options or after them, out of the
    arguments.

    Raises:
        ValueError: there is no script after one.
    """
    overrides: list[str] = []
    while True:
        args = parser.parse_args(arguments)
        target = args.script if args.command == "run" else args.target
        place = len(arguments) - len(args.args) - 1  # all that follows the script is the script's
        if "=" in target and not Path(target).is_file():
            if not args.args:
                raise ValueError(f"no script after {target}: name the Python script that every rank runs")
            overrides.append(target)
            arguments = [*arguments[:place], *arguments[place + 1 :]]
        elif args.command != "run" and args.args and _is_function(target):
            # A function takes no arguments: what follows it is meant for us.
            arguments = [*arguments[:place], *arguments[place + 1 :], target]
        else:
            return args, overrides


def _is_function(target: str) -> bool:
    return ":" in target and not Path(target).is_file()


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many ranks to start")
    add_cuda_argument(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a configuration of one of five systems (see smp-lite explain); takes the place of --parameters",
    )
    parser.add_argument(
        "--dialect", metavar="SYSTEM", help="whose configuration it is, where the file does not tell"
    )
    _add_script_arguments(
        parser, "[KEY=VALUE ...] script", "; before it, changes to --config in its system's words"
    )


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        choices=("slurm", "kubernetes"),
        required=True,
        help="slurm: print a script for sbatch; kubernetes: print an MPIJob for kubectl apply",
    )
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="how many machines (default 1)")
    parser.add_argument(
        "--processes-per-host", type=int, required=True, metavar="M", help="how many ranks on each machine"
    )
    parser.add_argument(
        "--gpus-per-host", type=int, default=0, metavar="G", help="how many GPUs on each machine (default 0)"
    )
    parser.add_argument(
        "--share-gpus", action="store_true", help="allow more ranks than GPUs on a machine; they share"
    )
    parser.add_argument("--name", help="name of the job (default: made from that of the script)")
    parser.add_argument(
        "--time", metavar="LIMIT", help="longest run as Slurm writes it: minutes, H:MM:SS or D-HH:MM:SS"
    )
    parser.add_argument("--partition", help="Slurm: the partition to queue in (default: the cluster's own)")
    parser.add_argument("--image", help="Kubernetes: the container image, which holds the script")
    _add_script_arguments(parser, "script", "")


def _add_script_arguments(parser: argparse.ArgumentParser, shown: str, more: str) -> None:
    """The parameters, the script and its arguments; `shown` and `more` say what may stand before it."""
    parser.add_argument(
        "--parameters",
        metavar="JSON",
        help="the SMP parameters: a JSON object, or the path of a file that holds one",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module name, as in python -m"
    )
    parser.add_argument("script", metavar=shown, help=f"the Python script that every rank runs{more}")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments for the script")


def _run(args: argparse.Namespace, overrides: list[str]) -> int:
    from smp_lite.config import Config
    from smp_lite.entrypoints.mpi.launch_plan import plan_launch
    from smp_lite.entrypoints.mpi.mpirun import find_mpirun
    from smp_lite.entrypoints.this_machine.launcher import run_local
    from smp_lite.smp_v1.alias import refuse_original

    _check_overrides(args, overrides)
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise ValueError("the working directory has been removed: change to one that is there") from None
    if not args.module and not Path(args.script).is_file():
        raise ValueError(f"script {args.script!r} is not a file (working directory: {folder})")
    refuse_original(sys.path)
    parameters = None if args.parameters is None else _only_parameters(args.parameters)
    plan = plan_launch(
        processes=args.processes,
        parameters=parameters,
        script=args.script,
        args=args.args,
        module=args.module,
        cuda_as_cpu=args.cuda_as_cpu,
        defaults=job_variables(
            _file_of(args.script) if args.module else Path(args.script),
            folder,
            num_cpus=os.cpu_count() or 1,
            num_gpus=args.processes if args.cuda_as_cpu else 0,
        ),
        python=sys.executable,
        mpirun=find_mpirun(),
        is_root=os.geteuid() == 0,
    )
    environment = dict(os.environ)
    if args.config is not None:
        environment |= _config_variable(args, overrides)
    if parameters is not None:
        Config.from_parameters(parameters).check_world_size(args.processes)
    ending = run_local(plan, args.processes, environment)
    ending.show()
    return ending.exit_code


def _check_overrides(args: argparse.Namespace, overrides: list[str]) -> None:
    """
    Raises:
        ValueError: there are some without --config, or two configurations.
    """
    if args.config is None and overrides:
        raise ValueError(f"{overrides[0]} changes a configuration, but there is none: add --config FILE")
    if args.config is None and args.dialect is not None:
        raise ValueError("--dialect says whose configuration --config FILE is: add that")
    if args.config is not None and args.parameters is not None:
        raise ValueError("--config and --parameters are two configurations: give one of them")


def _config_variable(args: argparse.Namespace, overrides: list[str]) -> dict[str, str]:
    """For the ranks; the configuration is read here once, so that what is wrong with it is told at once."""
    from smp_lite.config import PARAMETERS_VARIABLE
    from smp_lite.systems.load.given import CONFIG_VARIABLE, variable_for
    from smp_lite.systems.load.loading import load_plan

    if PARAMETERS_VARIABLE in os.environ:
        raise ValueError(f"--config, but the environment variable {PARAMETERS_VARIABLE} is set too: unset it")
    load_plan(args.config, world_size=args.processes, dialect=args.dialect, overrides=overrides)
    return {CONFIG_VARIABLE: variable_for(args.config, args.dialect, overrides)}


def _file_of(module: str) -> Path | None:
    """Where `python -m module` would look first."""
    place = Path(*module.split("."))
    return next((p for p in (place.with_suffix(".py"), place / "__main__.py") if p.is_file()), None)


def _launch(args: argparse.Namespace) -> str:
    """The text that the cluster wants."""
    from smp_lite.entrypoints.clusters.cluster_job import ClusterJob, job_name

    if "=" in args.script and args.args and not Path(args.script).is_file():
        raise ValueError(
            f"{args.script} stands where the script is named, and a cluster's job takes no --config: "
            "give --parameters, or the configuration to smp.init in the script"
        )
    job = ClusterJob(
        name=args.name if args.name is not None else job_name(args.script),
        hosts=args.hosts,
        processes_per_host=args.processes_per_host,
        script=args.script,
        args=tuple(args.args),
        module=args.module,
        parameters=None if args.parameters is None else _read_parameters(args.parameters),
        time_limit=args.time,
        gpus_per_host=args.gpus_per_host,
        share_gpus=args.share_gpus,
    )
    if args.on == "slurm":
        from smp_lite.entrypoints.clusters.slurm_script import slurm_script

        if args.image is not None:
            raise ValueError("--image is for --on kubernetes: a Slurm job runs in the cluster's own Python")
        return slurm_script(job, partition=args.partition)

    from smp_lite.entrypoints.clusters.kubernetes_manifest import kubernetes_manifest

    if args.partition is not None:
        raise ValueError("--partition is for --on slurm: Kubernetes has none")
    if args.image is None:
        raise ValueError("--image is missing: name the container image that holds the script")
    return kubernetes_manifest(job, image=args.image)


def _only_parameters(text: str) -> dict[str, Any]:
    """As `_read_parameters`.

    Raises:
        ValueError: the environment has a configuration too, one of which would not count.
    """
    from smp_lite.config import PARAMETERS_VARIABLE
    from smp_lite.systems.load.given import CONFIG_VARIABLE

    for name in (PARAMETERS_VARIABLE, CONFIG_VARIABLE):
        if name in os.environ:
            raise ValueError(f"--parameters, but the environment variable {name} is set too: unset it")
    return _read_parameters(text)


def _read_parameters(text: str) -> dict[str, Any]:
    """The SMP parameters from a JSON text, or from the file that `text` names."""
    from smp_lite.config import parse_parameters
    from smp_lite.config.keys import unique_keys

    if not text.lstrip().startswith("{"):
        return parse_parameters(text)
    try:
        parameters: dict[str, Any] = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"--parameters is not valid JSON ({error}): {text}") from None
    return parameters


if __name__ == "__main__":
    sys.exit(main())
