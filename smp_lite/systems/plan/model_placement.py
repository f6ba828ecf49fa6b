"""A plan against a model: what each tensor becomes, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...config.errors import ConfigError
from .layouts import kind_of_class, layout_of
from .model_shape import ModelShape, layer_costs, layer_names, layers_of_tensors
from .parallel_plan import ParallelPlan, ShardingRule
from .sharding_rules import check_all_match, local_shape, match_modules, match_tensors, matches, num_chunks

__all__ = ["ModelPlacement", "TensorPlacement", "check_model", "place_model"]

_MOST_SHOWN = 5


@dataclass(frozen=True)
class TensorPlacement:
    """One tensor of the model.

    Attributes:
        name: in the state dict.
        shape: of the whole tensor.
        dims: the axes that each dimension is split over, the first being major.
        layout: a word for it: the rule that said it, or the layout of the mode.
        local_shape: of the part of rank 0's coordinates, the largest.
        stage: that holds it; None: not known before the script runs.
        tied_to: the first name of the same tensor, if this is another.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    layout: str
    local_shape: tuple[int, ...]
    stage: int | None
    tied_to: str | None = None


@dataclass(frozen=True)
class ModelPlacement:
    """All tensors of a model.

    Attributes:
        tensors: in the order of the state dict.
        outputs: module -> the rule of its output.
        problems: what does not fit; nothing may run while there is any.
        notes: how undecided things were taken.
    """

    tensors: tuple[TensorPlacement, ...]
    outputs: tuple[tuple[str, ShardingRule], ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check_model(plan: ParallelPlan, model: ModelShape) -> ModelPlacement:
    """Returns :func:`place_model`.

    Raises:
        ConfigError: something does not fit; the text names the first few problems.
    """
    placement = place_model(plan, model)
    if placement.problems:
        rest = len(placement.problems) - _MOST_SHOWN
        shown = "; ".join(placement.problems[:_MOST_SHOWN])
        raise ConfigError(f"{shown}; and {rest} more" if rest > 0 else shown)
    return placement


def place_model(plan: ParallelPlan, model: ModelShape) -> ModelPlacement:
    """Returns what the plan makes of each tensor, with all problems instead of the first."""
    problems: list[str] = []
    notes: list[str] = []
    told: dict[str, str] = {}
    by_rule = match_tensors(plan.rules, model.tensors, model.ties, told)
    undecided = set(told)
    outputs = match_modules(plan.rules, model.modules, told)
    problems += told.values()
    if plan.strict_rules:
        problems += check_all_match(plan.rules, model.tensors, model.modules)
    stages = _stages(plan, model, problems, notes)
    tensors = []
    styled = False
    for name, shape in model.tensors.items():
        dims, layout, has_style = _dims(plan, model, name, shape, by_rule)
        styled = styled or has_style
        problems += _size_problems(plan, name, shape, dims)
        tensors.append(
            TensorPlacement(
                name=name,
                shape=shape,
                dims=dims,
                layout="undecided" if name in undecided else layout,
                local_shape=local_shape(plan, shape, dims),
                stage=stages.get(name),
                tied_to=model.ties.get(name),
            )
        )
    if plan.tensor.mode == "rules":
        uneven = [t.name for t in tensors if _is_uneven(plan, t.shape, t.dims)]
        if uneven:
            notes.append(
                f"sizes that do not divide give late ranks smaller chunks: {uneven[0]}"
                + (f" and {len(uneven) - 1} more" if len(uneven) > 1 else "")
            )
    if plan.tensor.mode == "1d" and not styled:
        notes.append(
            "1d: which linear layers are split by columns and which by rows is up to the layers; all are "
            "shown by "
            "columns, as the model brings no plan of its own"
        )
    if plan.tensor.mode == "smp":
        notes.append(
            "which modules are shared is known when the script runs: those under smp.tensor_parallelism; "
            "all are "
            "shown whole"
        )
    if plan.tensor.mode == "3d":
        notes.append("3d: input and output change places from one layer to the next; the shapes stay")
    return ModelPlacement(tuple(tensors), tuple(outputs.items()), tuple(problems), tuple(notes))


def _dims(
    plan: ParallelPlan,
    model: ModelShape,
    name: str,
    shape: tuple[int, ...],
    by_rule: dict[str, ShardingRule],
) -> tuple[tuple[tuple[str, ...], ...], str, bool]:
    """Axes by dimension, a word for the layout, and whether the model's own plan had a style for it."""
    if name in by_rule:
        return by_rule[name].dims, by_rule[name].name, False
    module, _, leaf = name.rpartition(".")
    kind = kind_of_class(model.modules.get(module, ""))
    style = next((style for pattern, style in model.styles.items() if matches(pattern, module)), "")
    # A tensor with two names is laid out where it is first used.
    if name in model.ties:
        first, _, leaf = model.ties[name].rpartition(".")
        kind = kind_of_class(model.modules.get(first, ""))
    dims, word = layout_of(plan.tensor, kind, leaf, len(shape), style)
    if plan.tensor.mode == "1d" and model.styles and not style:
        dims, word = ((),) * len(shape), "whole"  # only what the model's plan names is split
    if plan.tp_size == 1 and plan.tensor.mode != "rules":
        dims, word = ((),) * len(shape), "whole"
    return dims, word, bool(style)


def _size_problems(
    plan: ParallelPlan, name: str, shape: Sequence[int], dims: tuple[tuple[str, ...], ...]
) -> list[str]:
    if plan.tensor.mode == "rules":
        return []
    texts = []
    for dim, (size, axes) in enumerate(zip(shape, dims)):
        count = num_chunks(plan.topology, axes)
        if size % count:
            key = plan.said(f"axis.{axes[0]}").key
            below = size // count * count
            near = [n for n in (below, below + count) if n > 0]
            texts.append(
                f"{name} has size {size} in dimension {dim}, which {count} ranks do not divide ({key}): "
                "the nearest "
                f"sizes that do are {' and '.join(map(str, near))}"
            )
    return texts


def _is_uneven(plan: ParallelPlan, shape: Sequence[int], dims: tuple[tuple[str, ...], ...]) -> bool:
    return any(size % num_chunks(plan.topology, axes) for size, axes in zip(shape, dims))


def _stages(
    plan: ParallelPlan, model: ModelShape, problems: list[str], notes: list[str]
) -> dict[str, int | None]:
    if plan.stages.num_stages == 1:
        return dict.fromkeys(model.tensors, 0)
    if plan.stages.kind in ("contexts", "file"):
        where = "the script's smp.partition contexts" if plan.stages.kind == "contexts" else plan.stages.file
        notes.append(f"stages are known when the script runs: {where} say them")
        return {}
    try:
        layers = layer_names(model, plan.stages.num_layers)
        of_tensor = layers_of_tensors(model, layers)
        of_layer = plan.stage_of_layer(len(layers), layer_costs(model, of_tensor, len(layers)))
    except ConfigError as error:
        problems.append(str(error))
        return {}
    if plan.stages.kind == "partitioner":
        notes.append(
            "stages: by the parameters of whole layers here; the partitioner decides on the recorded "
            "model, with its "
            "computation and memory (smp-lite plan shows that)"
        )
    return {name: of_layer[layer] for name, layer in of_tensor.items()}
