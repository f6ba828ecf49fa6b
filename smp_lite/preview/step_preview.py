"""``smp-lite plan``: what a script or a model would do, found without running it.

The same code path as a real job: the step is recorded, the model partitioned, the recording scheduled. Then
the schedule is simulated instead of executed, and its memory found by playing a microbatch on fake tensors
(:mod:`.memory_preview`). No process is started, and no data is needed: a model built on the meta device can
be far larger than this machine.

Time is computation: a stage runs one GFLOP (10^9 floating point operations) in a unit of time, a backward has
twice the operations of its forward, and messages take no time.

With ``pipeline: auto`` the pieces of each stage and the schedule are those that a job would begin with if it
measured nothing: :mod:`smp_lite.plan.choosing.shape_choice` counts operations, and messages by an assumed
speed. Its table is printed, and the picture shows what it has tried.

With ``--config``, the plan of any of the five systems is what is played; what it says stands above the
pictures, with the key that said it. Ranks that share a stage are one of them, with its parts of split
parameters: their collectives give the shapes of results, and talk to nobody.

A *script* is run up to the end of recording its first step that has a backward, in a session that plays all
stages. A ``package:function`` returns a model, or a model and the inputs of one batch: a tensor, a tuple, or
a dict of keyword arguments. Without inputs, ``--input`` describes them. Its microbatches get inputs of the
same form: if the second repeats the first, so do all others, and are not recorded one by one.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import session as session_module
from ..lifecycle import starting
from ..plan.collecting import without_gc
from ..plan.step.memory import format_memory_table
from ..plan.step.recorded_cost import RecordedCost
from ..plan.step.schedule_text import compute_lists, schedule_text
from ..plan.step.simulate import Simulation, simulate
from ..record.commands.recording import Recording
from ..record.values.placed import PlacedTensor
from ..record.values.structure import flatten
from ..runtime.step.batches import Batch
from ..smp_v1.before_script import add_cuda_argument, prepared_here
from ..steps.loader_batches import batches
from ..steps.step_function import step
from ..systems.load.job_config import JobConfig, add_config_arguments, read_job_config
from ..systems.plan.parallel_plan import ParallelPlan
from ..systems.showing.explain import SYSTEMS, settings_table
from ..wrapper.cutting.partitioning import report_partition
from ..wrapper.distributed_model import DistributedModel
from .drawing import check_picture, draw, pipeline_text
from .memory_preview import CannotPlay, MemoryPreview, preview_memory
from .shares import notes_on_schedule, shares_text
from .targets import as_call, build_model, described_inputs, own_traceback, split_target

FLOPS_UNIT = 1e9


class PlanReady(BaseException):
    """Ends a script whose first training step has been planned; no error, so no Exception.

    Attributes:
        batch: the planned work.
        recordings: by microbatch.
        inputs: tensors that the step function was given.
    """

    def __init__(
        self, batch: Batch, recordings: dict[int, Recording], inputs: tuple[torch.Tensor, ...]
    ) -> None:
        super().__init__()
        self.batch = batch
        self.recordings = recordings
        self.inputs = inputs


def stop_when_planned(batch: Batch, recordings: dict[int, Recording]) -> None:
    """For ``planning`` of lifecycle.starting: raises :class:`PlanReady` at the first step with a backward."""
    if any(recording.backwards for recording in recordings.values()):
        leaves: list[Any] = []
        flatten(session_module.current().step.inputs, leaves)
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        raise PlanReady(batch, recordings, inputs)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``smp-lite plan``."""
    parser.add_argument(
        "--parameters",
        metavar="JSON",
        help="the SMP parameters: a JSON object, or the path of a file that holds one; "
        "default: SM_HP_MP_PARAMETERS, then what the script gives smp.init()",
    )
    add_config_arguments(parser)
    parser.add_argument("--png", metavar="FILE", help="also draw the schedule as a picture")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]DTYPE[SIZES]",
        help="an input of a package:function model for one batch, such as 'int64[16,128]' or "
        "'mask=float32[16,128]'; integers are zeros",
    )
    parser.add_argument("--lists", action="store_true", help="also print each stage's list of actions")
    add_cuda_argument(parser)
    parser.add_argument(
        "target",
        metavar="[KEY=VALUE ...] target",
        help="a script, or package:function that builds a model; before it, changes to --config in its "
        "system's words",
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments for the script")


def run_plan(args: argparse.Namespace, overrides: Sequence[str] = ()) -> int:
    """Plans and prints; returns the exit code.

    Args:
        args: of :func:`add_plan_arguments`.
        overrides: ``key=value``, changes to the configuration.
    """
    given = read_job_config(args, overrides)
    is_script = args.target.endswith(".py") or Path(args.target).is_file()
    if args.input and is_script:
        raise ValueError("--input is for a package:function; a script makes its own inputs")
    if not is_script:
        split_target(args.target)
    if args.png is not None:
        check_picture(args.png)
    ready_for = contextlib.nullcontext()
    if is_script and Path(args.target).is_file():
        ready_for = prepared_here(args.target, cuda_as_cpu=args.cuda_as_cpu)
    parameters = given.parameters if given is not None and given.parameters is not None else args.parameters
    plan = given.plan if given is not None and given.parameters is None else None
    if given is not None:
        print(f"\n{_plan_text(given.plan, given.source)}\n")
    with (
        ready_for,
        starting.planning(parameters, stop_when_planned, plan=plan, world_size=args.world_size),
    ):
        ready = _plan_script(args.target, args.args) if is_script else _plan_function(args)
        with without_gc():
            _print(ready, args, given)
    # When the process ends, Python would look through all that has been made once more.
    atexit.register(gc.freeze)
    return 0


def _plan_script(script: str, script_args: list[str]) -> PlanReady:
    if not Path(script).is_file():
        raise ValueError(f"script {script!r} is not a file, and not package:function either")
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *script_args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with own_traceback(script):
            runpy.run_path(script, run_name="__main__")
    except PlanReady as ready:
        return ready
    finally:
        sys.argv, sys.path[:] = argv, path
    raise ValueError(f"{script} ended without a step that calls model.backward(): there is nothing to plan")


def _plan_function(args: argparse.Namespace) -> PlanReady:
    starting.init()
    module, inputs = build_model(args.target)
    call_args, call_kwargs = described_inputs(args.input) if args.input else as_call(inputs)
    if not call_args and not call_kwargs:
        raise ValueError(
            f"{args.target} returned no inputs: let it return (model, inputs), or describe them, for example "
            "--input 'int64[16,128]'"
        )
    model = DistributedModel(module)
    call_args, call_kwargs = next(iter(batches([(call_args, call_kwargs)] * batches_of_a_step())))

    @step
    def train(model: DistributedModel, call_args: Any, call_kwargs: Any) -> None:
        leaves: list[Any] = []
        flatten(model(*call_args, **call_kwargs), leaves)
        losses = [
            leaf.float().sum() for leaf in leaves if isinstance(leaf, PlacedTensor) and leaf.requires_grad
        ]
        if not losses:
            raise ValueError(f"{args.target}: no result of the model depends on its parameters")
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        model.backward(total)

    session_module.current().takes_rest_alike = True  # they get the same inputs
    try:
        with without_gc(), own_traceback(args.target):  # one step, which is short and makes much
            train(model, call_args, call_kwargs)
    except PlanReady as ready:
        return ready
    raise AssertionError("a step with a backward ends planning")


def batches_of_a_step() -> int:
    """How many batches of a loader the session's plan takes for one step."""
    plan = session_module.current().plan
    return plan.microbatches.count if plan is not None and plan.microbatches.source == "consume" else 1


def simulate_batch(batch: Batch) -> Simulation:
    """Replays a planned step; its times are in GFLOP."""
    cost = RecordedCost(batch.schedule, unit=FLOPS_UNIT)
    return simulate(batch.schedule, batch.works, cost=cost)


def _print(ready: PlanReady, args: argparse.Namespace, given: JobConfig | None) -> None:
    session = session_module.current()
    config = session.cfg
    simulation = simulate_batch(ready.batch)
    width = max(shutil.get_terminal_size((120, 24)).columns, 60)
    plan = given.plan if given is not None else session.plan
    title = (
        f"{config.partitions} partitions, {config.microbatches} microbatches, {pipeline_text(session)}, "
        f"optimize={config.optimize}"
    )
    if config.virtual_stages != 1:
        title += f", virtual_stages={config.virtual_stages}"
    if given is None:
        print(f"\n{title if plan is None else _plan_text(plan, 'given by the script')}")
    print()
    if (shares := shares_text(session)) is not None:
        print(f"{shares}\n")
    if session.num_stages == 1:
        partition, costs = session.model.partition_and_costs
        print(f"{report_partition(session, partition, costs)}\n")
    print(schedule_text(simulation, width, time_unit="GFLOP"))
    print("a stage computes 1 GFLOP in a unit of time; messages take none")
    print(*[f"- {note}" for note in ([] if plan is None else notes_on_schedule(plan))], sep="\n")
    if args.lists:
        print(f"{compute_lists(ready.batch.schedule)}\n")
    memory = _memory(session, ready)
    if args.png:
        draw(session, simulation, args.png, title, memory.stages if memory is not None else ())
        print(f"picture: {args.png}")


def _plan_text(plan: ParallelPlan, source: str) -> str:
    return f"{SYSTEMS[plan.dialect]}: {source}\n\n{settings_table(plan)}"


def _memory(session: session_module.Session, ready: PlanReady) -> MemoryPreview | None:
    """Prints the memory of the stages; None if it cannot be known."""
    try:
        memory = preview_memory(session, ready.batch, ready.recordings, ready.inputs)
    except CannotPlay as error:
        print(f"memory: not known, since {error}")
        return None
    print("memory of one rank of each stage at its peak in a training step: tensors, beside Python and torch")
    print(format_memory_table(memory.stages))
    print(*[f"- {note}" for note in memory.notes], sep="\n")
    return memory
