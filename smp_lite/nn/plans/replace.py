"""Splits the modules of an unmodified model, in place, as a plan says."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...comm.axis import Axis
from ...errors import SMPError
from ..layout import ParameterLayout, layout_of
from ..one_d import (
    ColumnParallelLinear,
    FeatureParallelDropout,
    FeatureParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ..one_d.linear import SharedRowsLinear
from ..one_d.parts import SplitModule, check_no_hooks, layout_over, nearest_sizes
from .following import check_code
from .heads import changes_of_heads, output_features
from .modules import (
    ColumnParallelConv1D,
    IdentityShare,
    RowParallelConv1D,
    SplitParameters,
    SummandModule,
    SummedOutput,
    WithSharedTail,
    mix_in,
)
from .patterns import Entry, expand, shipped_plan
from .source import function_of
from .styles import REFUSED, STYLES, Style

__all__ = ["parallelize"]


def parallelize(model: nn.Module, axis: Axis, plan: Mapping[str, str] | None = None) -> dict[str, str]:
    """Splits exactly the modules that a plan names, in place; each rank keeps its part of their weights.

    Afterwards the model takes the same inputs, whole on every rank, and gives the same outputs. Modules stay
    the same objects under the same names, tied weights stay tied, and every parameter that is not the same on
    all ranks has a :class:`~smp_lite.nn.layout.ParameterLayout`. Make optimizers afterwards. A model that is
    refused is left as it was. Attention weights that a model returns on request are those of this rank's
    heads.

    What the plan does to the code between the split modules is checked as far as source code shows it; run
    :func:`~smp_lite.nn.plans.check_parallelized` once for each new architecture or plan.

    Args:
        model: the whole model, the same on every rank.
        axis: the ranks that share it.
        plan: patterns of names to styles (``{"layers.*.mlp.up_proj": "colwise"}``), where ``*`` is one part
            of a name and the base model's prefix may be left out. None: what ``transformers`` ships with the
            model. Styles are those of ``transformers`` (:data:`~smp_lite.nn.plans.STYLES`), and of ours
            ``packed_colwise:3`` (the output features are three matrices of one size), ``local_dropout`` (a
            Dropout between split layers), ``local_size`` (the pattern names an integer attribute that counts
            split features).

    Returns:
        The style of every module, parameter or attribute that was changed, by its full name.

    Raises:
        SMPError: a pattern matches nothing, a style is unknown or cannot be exact, heads or features cannot
            be shared equally, weights are shared with a module that is not split alike, or the code between
            the split modules would compute something else. Names the pattern and the way out.
    """
    shipped = plan is None
    plan = shipped_plan(model) if plan is None else plan
    entries = expand(
        model, plan, shipped=shipped, attributes=[n for n, s in STYLES.items() if s.kind == "number"]
    )
    styles = {entry.name: _style(entry) for entry in entries.values()}
    changes = _Changes(model, axis)
    for entry in entries.values():
        changes.add(entry, styles[entry.name])
    _see_to_owners(model, axis, entries, styles, changes, shipped)
    changes.check()
    changes.apply()
    return {name: entry.style for name, entry in entries.items()}


def _style(entry: Entry) -> Style:
    if entry.style in REFUSED:
        raise SMPError(f"plan: {entry.pattern!r}: {entry.style!r} is not supported: {REFUSED[entry.style]}")
    name, colon, number = entry.style.partition(":")
    if colon and name == "packed_colwise" and number.isdigit() and int(number) > 1:
        return Style("column", packed=int(number), gives_parts=True)
    if entry.style not in STYLES:
        raise SMPError(
            f"plan: {entry.pattern!r}: {entry.style!r} is no style; there are {', '.join(sorted(STYLES))}"
        )
    return STYLES[entry.style]


@dataclass
class _Change:
    """Of one module.

    Attributes:
        kind: class to become, or to mix in.
        options: for its ``split``; None: ``layouts`` are all there is.
        layouts: of its parameters.
        values: attributes to set.
    """

    entry: Entry
    module: nn.Module
    kind: type[nn.Module] | None = None
    options: dict[str, Any] | None = None
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class _Changes:
    """All that is to be done to a model, checked before any of it is done."""

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self.model, self.axis = model, axis
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.found: dict[int, _Change] = {}

    def add(self, entry: Entry, style: Style) -> None:
        if style.kind == "number":
            return self._add_number(entry)
        if entry.name in self.modules:
            return self._add_module(entry, style, self.modules[entry.name])
        owner, _, name = entry.name.rpartition(".")
        return self._add_parameter(entry, style, self.modules[owner], name)

    def of(self, entry: Entry, module: nn.Module) -> _Change:
        if isinstance(module, SplitModule):
            raise SMPError(f"plan: {entry.name} is split already: parallelize works on a whole model")
        try:
            check_no_hooks(entry.name, module)
        except ValueError as error:
            raise SMPError(f"plan: {error}") from None
        return self.found.setdefault(id(module), _Change(entry, module))

    def share_rows(self, name: str, rows: range) -> None:
        """A layer stays whole, of which this rank computes these output features."""
        change = self.found[id(self.modules[name])]
        if change.kind is not ColumnParallelLinear:
            raise SMPError(f"plan: {name} has fewer heads than ranks, which only a torch.nn.Linear can have")
        change.kind, change.options = SharedRowsLinear, {"rows": rows}
        change.layouts = SharedRowsLinear.layouts(change.module, self.axis, rows=rows)

    def _add_number(self, entry: Entry) -> None:
        owner, _, attribute = entry.name.rpartition(".")
        module = self.modules[owner]
        value = getattr(module, attribute, None)
        if not isinstance(value, int) or isinstance(value, bool):
            raise SMPError(
                f"plan: {entry.pattern!r}: 'local_size': {entry.name} is {value!r}, no whole number"
            )
        if value % self.axis.size:
            raise SMPError(
                f"plan: {entry.name} is {value}, which the {self.axis.size} ranks of axis {self.axis.name!r} "
                f"cannot share equally; the nearest that they can: {nearest_sizes(value, self.axis.size)}"
            )
        self.of(entry, module).values[attribute] = value // self.axis.size

    def _add_module(self, entry: Entry, style: Style, module: nn.Module) -> None:
        if style.kind == "whole":
            return
        change = self.of(entry, module)
        change.entry = entry
        if style.kind == "partial":
            change.kind = SplitParameters
            for name, parameter in module.named_parameters(recurse=False):
                change.layouts[name] = layout_over(parameter, self.axis, None, partial=True)
            return
        wrappers: dict[str, type[nn.Module]] = {
            "summands": SummandModule,
            "summed": SummedOutput,
            "share": IdentityShare,
        }
        if style.kind in wrappers:
            change.values["axis"] = self.axis
            bare = style.kind == "summed" and change.layouts
            change.kind = SummandModule if bare else wrappers[style.kind]
            return
        if style.kind == "tail":
            return self._add_tail(change)
        change.kind, change.options = self._layer(entry, style, module)
        if change.kind is FeatureParallelDropout:
            FeatureParallelDropout.from_dense(module, self.axis)  # type: ignore[arg-type]  # raises
            change.options, change.values["axis"] = None, self.axis
            return
        try:
            change.layouts = change.kind.layouts(module, self.axis, **change.options)  # type: ignore[attr-defined]
        except ValueError as error:
            raise SMPError(f"plan: {entry.name} ({entry.pattern!r}: {entry.style!r}): {error}") from error

    def _add_tail(self, change: _Change) -> None:
        config = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        try:
            tail = getattr(config, "qk_rope_head_dim", None)
        except RuntimeError:  # transformers: it differs from layer to layer
            tail = None
        if not isinstance(tail, int):
            raise SMPError(
                f"plan: {change.entry.pattern!r}: {change.entry.style!r} needs qk_rope_head_dim in the "
                "model's configuration"
            )
        change.kind = WithSharedTail
        change.values.update(axis=self.axis, smp_tail=tail)

    def _layer(self, entry: Entry, style: Style, module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
        """Class and options of a split layer."""
        wanted = {
            "column": (nn.Linear, ColumnParallelLinear),
            "row": (nn.Linear, RowParallelLinear),
            "vocabulary": (nn.Embedding, VocabParallelEmbedding),
            "features": (nn.Embedding, FeatureParallelEmbedding),
            "dropout": (nn.Dropout, FeatureParallelDropout),
        }
        base, kind = wanted[style.kind]
        options = dict(style.options)
        conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf") and base is nn.Linear
        if not conv1d:
            _check_layer(entry, module, base)
        if style.packed > 1:
            if style.kind != "column":
                raise SMPError(
                    f"plan: {entry.pattern!r}: {entry.style!r} is for bare parameters of experts, not for "
                    f"{entry.name}"
                )
            features = output_features(module)
            if features % style.packed:
                raise SMPError(
                    f"plan: {entry.name} ({entry.pattern!r}: {entry.style!r}) has {features} output "
                    f"features, which are not {style.packed} matrices of one size"
                )
            options["sections"] = (features // style.packed,) * style.packed
        if conv1d:
            return (ColumnParallelConv1D if style.kind == "column" else RowParallelConv1D), options
        return kind, options

    def _add_parameter(self, entry: Entry, style: Style, module: nn.Module, name: str) -> None:
        parameter = getattr(module, name)
        if style.kind == "whole":
            return
        if isinstance(module, nn.Linear | nn.Embedding):
            raise SMPError(
                f"plan: {entry.pattern!r} names a parameter of a {type(module).__name__}: name the layer "
                "itself"
            )
        change = self.of(entry, module)
        if change.kind is SummedOutput:
            change.kind = SummandModule  # no layer sees to the input's gradient
        change.kind = change.kind or SplitParameters
        if style.kind == "partial":
            change.layouts[name] = layout_over(parameter, self.axis, None, partial=True)
            return
        if style.kind not in ("column", "row") or style.options:
            raise SMPError(
                f"plan: {entry.pattern!r}: {entry.style!r} is for modules; {entry.name} is a parameter"
            )
        if parameter.dim() == 1 and (style.packed > 1 or style.kind == "row"):
            raise SMPError(
                f"plan: {entry.pattern!r}: {entry.style!r} is for matrices; {entry.name} has one dimension"
            )
        if "bias" in name and (parameter.dim() > 1 or style.kind == "row"):
            raise SMPError(
                f"plan: {entry.pattern!r}: {entry.style!r}: biases of experts ({entry.name}) would be "
                "added by every rank or split by expert: not supported, leave the experts whole"
            )
        dim = parameter.dim() - 1 if style.kind == "row" else max(parameter.dim() - 2, 0)
        size = parameter.shape[dim]
        sections = (size // style.packed,) * style.packed if style.packed > 1 else None
        if size % (style.packed * self.axis.size):
            raise SMPError(
                f"plan: {entry.name} ({entry.pattern!r}: {entry.style!r}): dimension {dim} is {size}, "
                f"which the {self.axis.size} ranks of axis {self.axis.name!r} cannot share equally; the "
                f"nearest that they can: {nearest_sizes(size, style.packed * self.axis.size)}"
            )
        change.layouts[name] = layout_over(parameter, self.axis, dim, sections=sections)

    # Checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """
        Raises:
            SMPError: weights are shared with what is not split alike; a module of summands has something that
                every rank would add.
        """
        names = {id(module): name for name, module in reversed(self.modules.items())}
        for change in self.found.values():
            if change.kind is SummandModule:
                self._check_summands(change, names)
        holders: dict[int, list[tuple[nn.Module, str]]] = {}
        memory: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for module in self.model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    holders.setdefault(id(tensor), []).append((module, name))
                    if not tensor.is_meta and tensor.numel():
                        place = f"{names[id(module)]}.{name}"
                        memory.setdefault(_address(tensor), []).append((place, tensor))
        for change in self.found.values():
            for name, layout in change.layouts.items():
                parameter = change.module._parameters[name]
                if parameter is None:
                    continue
                place = f"{names[id(change.module)]}.{name}"
                if layout_of(parameter) is not None:
                    raise SMPError(f"plan: {place} is split already: parallelize works on a whole model")
                for module, other in holders[id(parameter)]:
                    found = self.found.get(id(module))
                    theirs = None if found is None else found.layouts.get(other)
                    if theirs != layout:
                        how = "is not in the plan" if theirs is None else "is split in another way"
                        raise SMPError(
                            f"plan: {place} ({change.entry.pattern!r}: {change.entry.style!r}) is the same "
                            f"parameter as {names[id(module)]}.{other}, which {how}: split both alike (an "
                            "embedding 'embedding_rowwise', a head 'colwise_gather_output'), or none"
                        )
                if not parameter.is_meta and parameter.numel():
                    for other_place, tensor in memory[_address(parameter)]:
                        if tensor is not parameter:
                            raise SMPError(
                                f"plan: {place} shares memory with {other_place}, which a part of it would "
                                "not"
                            )

    def _check_summands(self, change: _Change, names: dict[int, str]) -> None:
        inside = names[id(change.module)]
        for module in change.module.modules():
            found = self.found.get(id(module))
            if (
                found is not None
                and found.kind in (RowParallelLinear, SummedOutput)
                and module is not change.module
            ):
                raise SMPError(
                    f"plan: {names[id(module)]} sums over the ranks, and {inside} around it does so again"
                )
            for name, _ in module.named_parameters(recurse=False):
                layout = None if found is None else found.layouts.get(name)
                if layout is None or not layout.axes:
                    raise SMPError(
                        f"plan: {inside} is {change.entry.style!r}, but its parameter "
                        f"{names[id(module)]}.{name} is whole on every rank: what it contributes would be "
                        f"added once by each. Split it too, or leave {inside} out"
                    )

    def apply(self) -> None:
        """Now do it."""
        shared: dict[int, nn.Parameter] = {}
        for change in self.found.values():
            module = change.module
            if change.kind is not None:
                mix_in(module, change.kind)
            for name, value in change.values.items():
                setattr(module, name, value)
            if change.options is not None:
                module.split(self.axis, shared, **change.options)  # type: ignore[operator]
            elif isinstance(module, SplitModule):
                module.keep_parts(change.layouts, shared)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, nn.Parameter) else id(tensor)


def _check_layer(entry: Entry, module: nn.Module, base: type[nn.Module]) -> None:
    """That the module does what torch's does; an embedding's class may also change what torch's gives."""
    if not isinstance(module, base):
        raise SMPError(
            f"plan: {entry.pattern!r}: {entry.style!r} is for a {base.__name__}, but {entry.name} is a "
            f"{type(module).__name__}"
        )
    if base is nn.Dropout:
        return
    if nn.utils.parametrize.is_parametrized(module) or not isinstance(
        module._parameters.get("weight"), nn.Parameter
    ):
        raise SMPError(
            f"plan: {entry.name} computes its weight from others (a parametrization), so it cannot be split: "
            "remove that, or leave it out"
        )
    forward = type(module).forward
    if forward is base.forward:
        return
    if base is nn.Embedding and _wraps_only(forward):
        return
    raise SMPError(
        f"plan: {entry.pattern!r}: {entry.style!r}: {entry.name} is a {type(module).__name__}, whose "
        f"forward is its own and not torch.nn.{base.__name__}'s: it would compute with a part of the "
        "weight. Leave it out"
    )


def _wraps_only(forward: Callable[..., Any]) -> bool:
    """Whether a forward calls its base class's, and of the weight asks only the dtype and device."""
    tree = function_of(forward)
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    weights = sum(isinstance(node, ast.Attribute) and node.attr == "weight" for node in nodes)
    about = sum(
        isinstance(node, ast.Attribute)
        and node.attr in ("dtype", "device")
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "weight"
        for node in nodes
    )
    return "super().forward" in calls and weights == about and not any("embedding" in call for call in calls)


def _see_to_owners(
    model: nn.Module,
    axis: Axis,
    entries: Mapping[str, Entry],
    styles: Mapping[str, Style],
    changes: _Changes,
    shipped: bool,
) -> None:
    """Checks, and helps, the code that gets this rank's features where it had all."""
    owners: dict[str, dict[str, str]] = {}
    for name in entries:
        owner = _owner(name, changes.modules)
        owners.setdefault(owner, {})[name[len(owner) + 1 if owner else 0 :]] = name
    for owner_name, inside in owners.items():
        owner = changes.modules[owner_name]
        parts = {name: full for name, full in inside.items() if styles[full].gives_parts}
        if not parts:
            continue
        layers = {name: changes.modules[full] for name, full in parts.items() if full in changes.modules}
        heads = changes_of_heads(owner_name, owner, layers, axis)
        for name, rows in heads.rows.items():
            changes.share_rows(inside[name], rows)
        given = {name for name, full in inside.items() if styles[full].kind == "number"}
        numbers = {name: value for name, value in heads.numbers.items() if name not in given}
        if numbers:
            changes.of(entries[next(iter(inside.values()))], owner).values.update(numbers)
        gives = check_code(
            owner_name,
            owner,
            {name: styles[full] for name, full in inside.items()},
            known=given | set(numbers),
            shipped=shipped,
            summands=owner_name in styles and styles[owner_name].kind in ("summands", "summed"),
        )
        if gives:
            _see_to_takers(owner_name, changes.modules, styles)


def _see_to_takers(name: str, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> None:
    """The modules around one that hands on this rank's part, up to where that ends."""
    around = name
    while around:
        around = _owner(around, modules)
        start = f"{around}." if around else ""
        inside = {full[len(start) :]: style for full, style in styles.items() if full.startswith(start)}
        giver = name[len(start) :]
        if not check_code(around, modules[around], inside, known=(), shipped=True, giver=giver):
            return
    raise SMPError(
        f"plan: {name} ({type(modules[name]).__name__}) returns this rank's part of the features, and no "
        "layer of the plan takes it: name the layer after it as 'rowwise', or the one before as "
        "'colwise_gather_output'"
    )


def _owner(name: str, modules: Mapping[str, nn.Module]) -> str:
    """The nearest module around it that has a forward of its own."""
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]).forward is not nn.Module.forward:
            return name
    return ""
