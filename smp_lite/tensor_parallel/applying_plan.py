"""What a configuration of another system does to an ordinary model: which modules are split, and where each
layer goes.

SageMaker's parameters leave both to the script (``smp.tensor_parallelism``, ``smp.partition``) and to the
partitioner; nothing is done for them here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..session import Session
from ..systems.model_shape import describe_model, layer_costs, layer_names, layers_of_tensors
from ..systems.parallel_plan import ParallelPlan
from .splitting import split_modules

__all__ = ["apply_plan"]


def apply_plan(session: Session, module: nn.Module) -> None:
    """Splits and places the modules of the whole model, in place, as the session's plan says.

    Raises:
        SMPError: the plan does not fit the model.
    """
    plan = session.plan
    if plan is None:
        return
    stages = _stages_of_modules(plan, module)
    split_modules(plan, module, session)
    by_name = dict(module.named_modules())
    for name, stage in stages.items():
        session.assigned_stages[id(by_name[name])] = (by_name[name], plan.stages.owners[stage])
    _keep_tied_together(session, module)


def _keep_tied_together(session: Session, module: nn.Module) -> None:
    """Modules that share a parameter go to the stage of the first of them: an output layer with the weights
    of the embedding is where that is, and the pipeline comes back there."""
    homes: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if id(part) in session.assigned_stages:
                _, stage = session.assigned_stages[id(part)]
                session.assigned_stages[id(part)] = (part, homes.setdefault(id(parameter), stage))


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
