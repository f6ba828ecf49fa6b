"""What a configuration of another system does to an ordinary model: which modules are split, and where each
layer goes.

SageMaker's parameters leave both to the script (``smp.tensor_parallelism``, ``smp.partition``) and to the
partitioner; nothing is done for them here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..config.errors import ConfigError
from ..errors import SMPError
from ..session import Session
from ..systems.dialects.libai_saved import LibaiPlan, save_config
from ..systems.plan.model_shape import describe_model, layer_costs, layer_names, layers_of_tensors
from ..systems.plan.parallel_plan import ParallelPlan
from .by_hand import refuse_other_axes
from .parts_in_line import refuse_mixing_features
from .splitting import split_modules

__all__ = ["apply_plan"]


def apply_plan(session: Session, module: nn.Module) -> None:
    """Splits and places the modules of the whole model, in place, as the session's plan says.

    Raises:
        SMPError: the plan does not fit the model.
    """
    refuse_other_axes(session, module)
    refuse_mixing_features(module)
    plan = session.plan
    if plan is None:
        return
    _refuse_left_to_engine(session, plan)
    placed = {
        name: session.assigned_stages[id(part)][1]
        for name, part in module.named_modules()
        if id(part) in session.assigned_stages
    }
    # What the script has placed itself stays there: a pipeline that was built of a list, smp.partition.
    by_rule = {} if "" in placed else _stages_of_modules(plan, module)
    stages = {name: plan.stages.owners[stage] for name, stage in by_rule.items()} | placed
    split_modules(plan, module, session)
    by_name = dict(module.named_modules())
    for name, stage in stages.items():
        session.assigned_stages[id(by_name[name])] = (by_name[name], stage)
    _keep_tied_together(session, module)
    if isinstance(plan, LibaiPlan):
        _save_config(session, plan, module)


def _refuse_left_to_engine(session: Session, plan: ParallelPlan) -> None:
    clip = dict(plan.others).get("clip_grad_norm") if plan.dialect == "colossal" else None
    if clip and not session.has_engine:
        raise SMPError(
            f"clip_grad_norm={clip!r} is what the engine of smp_lite.systems.colossal.initialize does in its "
            "step(): use that, or leave the key out and call torch.nn.utils.clip_grad_norm_ in the script"
        )


def _save_config(session: Session, plan: LibaiPlan, module: nn.Module) -> None:
    """LiBai's ``config.yaml``, where ranks train (and not where one process plays all of them). The first
    rank writes it, and all hear whether it could."""
    if plan.output_dir is None or session.world is None:
        return
    told = None
    if session.rank == 0:
        try:
            save_config(plan, plan.output_dir, _stages_of_layers(session, plan, module))
        except SMPError as error:
            told = str(error)
    told = session.world.exchange(told, "WORLD", "config.yaml")[0]
    if told is not None:
        raise SMPError(told)


def _stages_of_layers(session: Session, plan: ParallelPlan, module: nn.Module) -> list[int] | None:
    """As they are: the script may have placed some layers itself. None: the model has no lists of layers."""
    try:
        layers = layer_names(describe_model(module), plan.stages.num_layers)
    except ConfigError:
        return None
    by_name = dict(module.named_modules())
    return [session.assigned_stages.get(id(by_name[name]), (None, 0))[1] for name in layers]


def _keep_tied_together(session: Session, module: nn.Module) -> None:
    """Modules that share a parameter, directly or by a chain of others, go to the stage of the first of them:
    an output layer with the weights of the embedding is where that is, and the pipeline comes back there."""
    parts = [part for part in module.modules() if id(part) in session.assigned_stages]
    first, before = list(range(len(parts))), None
    of_parameter: dict[int, int] = {}
    while before != first:
        before = list(first)
        for number, part in enumerate(parts):
            own = [id(parameter) for parameter in part.parameters(recurse=False)]
            first[number] = min([first[number], *(of_parameter.get(key, number) for key in own)])
            of_parameter |= dict.fromkeys(own, first[number])
    stages = [session.assigned_stages[id(part)][1] for part in parts]
    for part, home in zip(parts, first, strict=True):
        session.assigned_stages[id(part)] = (part, stages[home])


def _stages_of_modules(plan: ParallelPlan, module: nn.Module) -> dict[str, int]:
    """For every module of a whole model, as ``smp-lite explain --model`` shows it."""
    if plan.pp_size == 1 or plan.stages.kind in ("partitioner", "contexts", "file"):
        return {}
    shape = describe_model(module)
    layers = layer_names(shape, plan.stages.num_layers)
    of_tensor = layers_of_tensors(shape, layers)
    of_layer = plan.stage_of_layer(len(layers), layer_costs(shape, of_tensor, len(layers)))
    number = {name: index for index, name in enumerate(layers)}
    found: dict[str, int] = {}
    last = of_layer[0]
    for name, part in module.named_modules():
        inside = next((number[prefix] for prefix in _prefixes(name) if prefix in number), None)
        tensors = [f"{name}.{own}" if name else own for own, _ in _own_tensors(part)]
        own = next((of_tensor[tensor] for tensor in tensors if tensor in of_tensor), None)
        layer = inside if inside is not None else own
        last = of_layer[layer] if layer is not None else last
        found[name] = last
    return found


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
