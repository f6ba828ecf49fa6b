"""Which parameters of the model lie in pieces over the replicas, as the configuration says."""

from __future__ import annotations

from torch import nn

from ..runtime.sharded.units import Sharding, choose_units
from ..session import Session
from ..systems.plan.sharding_rules import match_tensors

__all__ = ["sharding_of"]


def sharding_of(session: Session, module: nn.Module) -> Sharding | None:
    """Of the whole model, before it is partitioned; None: no parameter is sharded."""
    if not session.shard_axes or session.world is None:
        return None
    plan = session.plan
    assert plan is not None
    shapes: dict[str, tuple[int, ...]] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shapes[name] = tuple(parameter.shape)
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    wanted = set(session.shard_axes)
    rules = match_tensors(plan.parameter_rules, shapes, ties)
    ruled = {name for name, rule in rules.items() if any(wanted.intersection(axes) for axes in rule.dims)}
    by_rules = plan.data_parallel.policy == "fsdp"
    names = {ties.get(name, name) for name in (ruled if by_rules else shapes)}
    return Sharding(session.axis("+".join(session.shard_axes)), names, choose_units(module))
