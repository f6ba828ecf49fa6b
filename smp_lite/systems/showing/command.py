"""The command line of ``smp-lite explain``."""

from __future__ import annotations

import argparse
import textwrap

from ...config.errors import ConfigError
from ..dialects.libai_saved import config_yaml
from ..load.detect import DIALECTS
from ..load.loading import load_plan
from ..plan.model_placement import ModelPlacement, place_model
from ..plan.model_shape import build_model_shape, layer_costs, layer_names, layers_of_tensors
from ..plan.parallel_plan import ParallelPlan
from .conversion import Conversion, convert
from .explain import SYSTEMS, explain_plan
from .explain_model import explain_model
from .text_parts import WIDTH, bullets

__all__ = ["add_explain_arguments", "run_explain"]


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``smp-lite explain`` takes."""
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="number of ranks, where the file leaves it open"
    )
    parser.add_argument("--dialect", choices=DIALECTS, help="the system of the file (default: by its shape)")
    parser.add_argument(
        "--model",
        metavar="PACKAGE:FUNCTION",
        help="also show what becomes of the tensors of the nn.Module that this function returns",
    )
    parser.add_argument(
        "--as",
        dest="target",
        choices=DIALECTS,
        help="print the nearest configuration of this system instead, and what it cannot say",
    )
    parser.add_argument(
        "--config-yaml",
        action="store_true",
        help="print what LiBai saves as config.yaml instead: values resolved, and the stage of each layer",
    )
    parser.add_argument("file", help="a configuration: .json, .yaml or .py")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes, with the keys of the file's system"
    )


def run_explain(args: argparse.Namespace) -> int:
    """Prints; returns 0, or 1 where the model does not fit."""
    plan = load_plan(args.file, world_size=args.world_size, dialect=args.dialect, overrides=args.overrides)
    placement: ModelPlacement | None = None
    of_layer: tuple[int, ...] | None = None
    if args.config_yaml:
        return _print_config_yaml(plan, args)
    if args.model is not None:
        shape = build_model_shape(args.model)
        placement = place_model(plan, shape)
        if (
            not placement.problems
            and plan.stages.kind not in ("contexts", "file")
            and plan.stages.num_stages > 1
        ):
            layers = layer_names(shape, plan.stages.num_layers)
            costs = layer_costs(shape, layers_of_tensors(shape, layers), len(layers))
            of_layer = plan.stage_of_layer(len(layers), costs)
    if args.target is not None:
        print(_conversion_text(plan, convert(plan, args.target, model=placement, stage_of_layer=of_layer)))
        return 0
    print(explain_plan(plan, args.file))
    if placement is not None:
        print(f"\n{explain_model(plan, placement, args.model)}")
        return 1 if placement.problems else 0
    return 0


def _print_config_yaml(plan: ParallelPlan, args: argparse.Namespace) -> int:
    if plan.dialect != "libai" or args.target is not None:
        raise ConfigError(
            "--config-yaml prints LiBai's own file, of a LiBai configuration alone"
            + ("" if args.target is None else ": leave --as out")
            + ("" if plan.dialect == "libai" else f"; {args.file} is {SYSTEMS[plan.dialect]}'s")
        )
    stages = None
    if args.model is not None:
        layers = layer_names(build_model_shape(args.model), plan.stages.num_layers)
        stages = plan.stage_of_layer(len(layers))
    print(config_yaml(plan, stages), end="")
    return 0


def _conversion_text(plan: ParallelPlan, conversion: Conversion) -> str:
    """The text of the file, and below it, as its comments would be, what it does not say."""
    lines = [conversion.text.rstrip(), ""]
    ranks = f"{conversion.world_size} rank{'s' * (conversion.world_size != 1)}"
    title = f"{SYSTEMS[conversion.dialect]}, for {ranks}."
    if not conversion.losses:
        text = f"{title} It says all that the {SYSTEMS[plan.dialect]} configuration says."
        return "\n".join([*lines, textwrap.fill(text, WIDTH)])
    lines.append(f"{title} It cannot say, or says otherwise:")
    return "\n".join([*lines, bullets(conversion.losses)])
