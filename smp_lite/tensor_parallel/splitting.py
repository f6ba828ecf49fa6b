"""Which modules of an ordinary model are split over the ranks of a stage, by the plan of a configuration.

Whatever the system, it comes to a style for each module (:mod:`smp_lite.nn.plans`). Mode 1d takes the plan
that comes with the model, or derives one. Enflame splits every linear layer by itself: outputs are gathered,
or partial sums added. torchprime's rules name weights; where XLA would find out what their neighbours need,
here each output is made whole again. Where only elementwise functions stand between two layers, the two are a
pair, with one sum instead of a gather and a split: the same values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn

from ..config.errors import ConfigError
from ..errors import SMPError
from ..nn.distributed.base import DistributedModule
from ..nn.layout import layout_of
from ..nn.plans import derive_plan, known_plan
from ..nn.plans import parallelize as in_place
from ..nn.plans.known import plan_for
from ..nn.plans.patterns import expand
from ..session import Session, current
from ..systems.plan.model_shape import describe_model
from ..systems.plan.parallel_plan import ParallelPlan
from ..systems.plan.sharding_rules import check_all_match, match_tensors
from .by_hand import refuse_whole_dropout
from .split_record import Origin, Split, note_split

__all__ = ["parallelize", "split_modules"]

_BY_HAND = {
    "2d": "smp_lite.nn.two_d",
    "2.5d": "smp_lite.nn.two_d",
    "3d": "smp_lite.nn.three_d",
    "sequence": "smp_lite.nn.sequence",
}
_BY_ITSELF = {"column": "colwise_gather_output", "row": "rowwise_split_input"}
_IN_A_PAIR = {"column": "colwise", "row": "rowwise"}


def parallelize(model: nn.Module, plan: Mapping[str, str] | None = None) -> dict[str, str]:
    """Splits modules of an ordinary model over the tensor-parallel ranks, in place; before it is wrapped.

    Every rank keeps its part of their weights; the model takes the same inputs and gives the same outputs.
    All ranks must bring the same batch (``prescaled_batch: True``).

    Args:
        model: the whole model, the same on all ranks.
        plan: patterns of names to styles, ``{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj":
            "rowwise"}``; the styles are those of transformers. None: what transformers ships with the model,
            or else ours for its architecture (:func:`smp_lite.nn.plans.known_plan`), or else the pairs of
            linear layers that are safe (:func:`smp_lite.nn.plans.derive_plan`).

    Returns:
        The style of every module that was changed, by its full name.

    Raises:
        SMPError: ``smp.init()`` was not called, the ranks of a stage have batches of their own, or the plan
            does not fit the model; names the pattern and the way out.
    """
    session = current()
    if session.has_own_batches:
        raise SMPError(
            "smp.parallelize: the ranks that share a stage must bring the same batch: set prescaled_batch: "
            "True"
        )
    if session.model is not None:
        raise SMPError("smp.parallelize was called after smp.DistributedModel: split the model before")
    axis = session.axis("+".join(session.topology.stage_axes))
    origin: Origin = "given"
    if plan is None:
        found, origin = _plan_and_origin(model)
        plan = None if origin == "shipped" else found
    styles = in_place(model, axis, plan)
    note_split(model, Split(origin, styles))
    return styles


def split_modules(plan: ParallelPlan, module: nn.Module, session: Session) -> None:
    """Splits modules of the whole model, in place.

    Raises:
        SMPError: the plan does not fit the model.
        ConfigError: rules that match nothing, or are for tensors of other ranks.
    """
    by_hand = any(layout_of(parameter) is not None for parameter in module.parameters())
    styles: dict[str, str] | None
    origin: Origin = "configured"
    if plan.rules:
        styles = _styles_of_rules(plan, module, session)
    elif plan.tp_size == 1 or by_hand:
        if plan.tp_size > 1 and plan.tensor.mode in _BY_HAND:
            refuse_whole_dropout(plan.tensor.mode, module)
        return
    elif plan.tensor.mode in _BY_HAND:
        raise SMPError(
            f"{plan.said('tensor').text()}: no layer of {type(module).__name__} is split. Layers of mode "
            f"{plan.tensor.mode!r} are chosen in the model: build it from those of "
            f"{_BY_HAND[plan.tensor.mode]}, or use mode '1d', which splits ordinary models"
        )
    elif plan.tensor.mode == "enflame":
        styles = _styles_of_every_linear(plan, module)
    else:
        try:
            found, origin = _plan_and_origin(module)
        except SMPError as error:
            raise SMPError(
                f"{plan.said('tensor').text()}: {error}, to smp.parallelize(model, plan), before the model "
                "is wrapped"
            ) from error
        styles = None if origin == "shipped" else found
    if styles is None or styles:
        changed = in_place(module, session.axis("+".join(plan.role_axes("tp"))), styles)
        note_split(module, Split(origin, changed))


def refuse_own_batches(session: Session, module: nn.Module) -> None:
    """Only SMP's distributed modules bring the batches of several ranks together.

    Raises:
        SMPError: the ranks of a stage have batches of their own, and a layer of another kind is split.
    """
    if not session.has_own_batches:
        return
    inside = {id(part) for m in module.modules() if isinstance(m, DistributedModule) for part in m.modules()}
    for name, part in module.named_modules():
        split = any(layout_of(parameter) is not None for parameter in part.parameters(recurse=False))
        if split and id(part) not in inside:
            raise SMPError(
                f"{name or type(module).__name__} is split over ranks that bring batches of their own, and "
                "would mix them up: set prescaled_batch: True and give all tensor-parallel ranks the same "
                "batch"
            )


def _plan_and_origin(module: nn.Module) -> tuple[dict[str, str], Origin]:
    """The plan that comes with the model, ours for it, or its safe pairs; and which of them it is."""
    found, shipped = _plan_for(module)
    if shipped:
        return found, "shipped"
    return found, "known" if known_plan(module) else "derived"


def _plan_for(module: nn.Module) -> tuple[dict[str, str], bool]:
    """The plan that comes with the model, ours for it, or its safe pairs; and whether it came with it."""
    try:
        return plan_for(module)
    except SMPError:
        return derive_plan(module), False


def _pairs(module: nn.Module) -> dict[str, str]:
    """The style of every module of the plan for the model; none where nothing is safe.

    Our own plans also change attributes and refuse dropout on heads; layers one by one need neither.
    """
    try:
        plan, shipped = (derive_plan(module), False) if known_plan(module) else _plan_for(module)
        return {name: entry.style for name, entry in expand(module, plan, shipped=shipped).items()}
    except SMPError:
        return {}


def _styles_of_every_linear(plan: ParallelPlan, module: nn.Module) -> dict[str, str]:
    way = "row" if plan.tensor.sharding_dim == 0 else "column"
    styles = {}
    # Torch's attention reads the weight of its last layer, and does not call it.
    read = {each.out_proj for each in module.modules() if isinstance(each, nn.MultiheadAttention)}
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) and child not in read:
            size = child.in_features if way == "row" else child.out_features
            if size % plan.tp_size:
                below = size // plan.tp_size * plan.tp_size
                nearest = f"{below} or {below + plan.tp_size}" if below else f"{plan.tp_size}"
                raise SMPError(
                    f"{plan.said('tensor').text()}: {name} has {size} {'in' if way == 'row' else 'out'}put "
                    f"features, which {plan.tp_size} shards cannot share equally; the nearest sizes that "
                    f"they can: {nearest}"
                )
            styles[name] = _BY_ITSELF[way]
    if not styles:
        raise SMPError(
            f"{plan.said('tensor').text()}: {type(module).__name__} has no torch.nn.Linear, and only these "
            "are split"
        )
    return styles | _pairs(module) if plan.tensor.fuse else styles


def _styles_of_rules(plan: ParallelPlan, module: nn.Module, session: Session) -> dict[str, str]:
    """For weights that a rule splits over the tensor axis."""
    shape = describe_model(module)
    rules = match_tensors(plan.parameter_rules, shape.tensors, shape.ties)
    lost = check_all_match(plan.rules, shape.tensors, shape.modules)
    if lost and plan.strict_rules:
        raise ConfigError(lost[0])
    copied = {rule.name for rule in rules.values() if any("data" in axes for axes in rule.dims)}
    if copied and plan.topology.axis_size("data") > 1 and session.rank == 0:
        warnings.warn(
            f"sharding {', '.join(sorted(copied))}: over the axis 'data' every rank has a copy of its own: "
            "to share parameters out, name the axis 'fsdp' (ici_mesh.fsdp)",
            stacklevel=2,
        )
    if plan.tp_size == 1:
        return {}
    tensor_axes = set(plan.role_axes("tp"))
    modules = dict(module.named_modules())
    ways: dict[str, str] = {}
    biases: dict[str, str] = {}
    for name, rule in rules.items():
        dims = [bool(tensor_axes & set(axes)) for axes in rule.dims]
        if not any(dims):
            continue
        owner, _, own = name.rpartition(".")
        kind = modules[owner]
        if own == "bias" and isinstance(kind, nn.Linear):
            biases[owner] = rule.name  # goes with its weight
            continue
        if own != "weight" or not isinstance(kind, nn.Linear | nn.Embedding):
            raise SMPError(
                f"sharding {rule.name!r}: {name} belongs to a {type(kind).__name__}, and over the tensor "
                "axis only weights of Linear and Embedding are split"
            )
        ways[owner] = "column" if dims[0] else "row"
    for owner, rule_name in biases.items():
        if ways.get(owner) != "column":
            raise SMPError(
                f"sharding {rule_name!r}: {owner}.bias is split over the tensor axis where the first "
                f"dimension of its weight is, and this one's is not: give {owner}.weight [tensor, null], or "
                "its bias [null]"
            )
    styles = {}
    for owner, way in ways.items():
        if isinstance(modules[owner], nn.Embedding):
            styles[owner] = "embedding_rowwise" if way == "column" else "embedding_colwise"
        else:
            styles[owner] = _BY_ITSELF[way]
    pairs = {name: style for name, style in _pairs(module).items() if style in _IN_A_PAIR.values()}
    if pairs and all(_IN_A_PAIR.get(ways.get(name, "")) == style for name, style in pairs.items()):
        styles |= pairs
    return styles
