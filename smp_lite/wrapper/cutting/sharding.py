"""Which parameters of the model lie in pieces over the replicas, as the configuration says."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.parameter import is_lazy

from ...record.parameters.placement import Placement
from ...runtime.sharded.slices import announce_names
from ...runtime.sharded.units import Sharding, choose_units
from ...session import Session
from ...systems.plan.sharding_rules import match_tensors

__all__ = ["announce_slices", "own_memory", "sharding_of"]


def sharding_of(session: Session, module: nn.Module) -> Sharding | None:
    """Of the whole model, before it is partitioned; None: no parameter is sharded."""
    if not session.shard_axes or session.world is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shapes[name] = tuple(parameter.shape)
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    axis, units = session.axis("+".join(session.shard_axes)), choose_units(module)
    plan = session.plan
    if plan is None:
        return Sharding(
            axis,
            shapes.keys() - ties.keys(),
            units,
            smallest=session.cfg.sdp_param_persistence_threshold,
            max_live_elements=session.cfg.sdp_max_live_parameters,
            reduced_elements=session.cfg.sdp_reduce_bucket_size,
        )
    wanted = set(session.shard_axes)
    rules = match_tensors(plan.parameter_rules, shapes, ties)
    ruled = {name for name, rule in rules.items() if any(wanted.intersection(axes) for axes in rule.dims)}
    by_rules = plan.data_parallel.policy == "fsdp"
    return Sharding(axis, {ties.get(name, name) for name in (ruled if by_rules else shapes)}, units)


def own_memory(session: Session, placement: Placement) -> Collection[str]:
    """Names of the parameters for which pieces, or what an optimizer steps in their place, have memory of
    their own."""
    cfg = session.cfg
    is_cut = bool(session.shard_axes) or cfg.shard_optimizer_state
    replicas = len(session.group("RDP")) if session.world is not None else 1
    has_own = cfg.fp16 or cfg.bf16 or (is_cut and replicas > 1)
    return placement.parameter_stage.keys() if has_own else ()


def announce_slices(session: Session, module: nn.Module) -> None:
    """Tells the sizes of the slices that parameters will be cut into."""
    if session.shard_axes and session.world is not None:
        axis = session.axis("+".join(session.shard_axes))
        for parameter in module.parameters():
            if not is_lazy(parameter):
                announce_names(parameter, axis.size)
