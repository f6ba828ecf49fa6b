"""What a plan changes of the modules that it names: classes, layouts of parameters, attributes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...comm.groups.axis import Axis
from ...errors import SMPError
from ..layout import ParameterLayout
from ..one_d import (
    ColumnParallelLinear,
    FeatureParallelDropout,
    FeatureParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ..one_d.linear import SharedRowsLinear
from ..one_d.parts import SplitModule, check_no_hooks, layout_over, nearest_sizes
from ..replaced import mark_replaced, parts_of
from .heads import output_features
from .modules import (
    ColumnParallelConv1D,
    IdentityShare,
    RowParallelConv1D,
    SplitHeads,
    SplitParameters,
    SummandModule,
    SummedOutput,
    WithSharedTail,
    mix_in,
)
from .patterns import Entry
from .source import function_of
from .styles import Style

__all__ = ["Change", "Changes"]


@dataclass
class Change:
    """Of one module.

    Attributes:
        kind: class to become, or to mix in.
        options: for its ``split``; None: ``layouts`` are all there is.
        layouts: of its parameters.
        values: attributes to set.
        has_heads: it is an attention whose heads are split.
    """

    entry: Entry
    module: nn.Module
    kind: type[nn.Module] | None = None
    options: dict[str, Any] | None = None
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    has_heads: bool = False


class Changes:
    """All that is to be done to a model, checked before any of it is done."""

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self.model, self.axis = model, axis
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.found: dict[int, Change] = {}

    def add(self, entry: Entry, style: Style) -> None:
        if style.kind == "number":
            return self._add_number(entry)
        if entry.name in self.modules:
            return self._add_module(entry, style, self.modules[entry.name])
        owner, _, name = entry.name.rpartition(".")
        return self._add_parameter(entry, style, self.modules[owner], name)

    def of(self, entry: Entry, module: nn.Module) -> Change:
        if isinstance(module, SplitModule):
            raise SMPError(f"plan: {entry.name} is split already: parallelize works on a whole model")
        try:
            check_no_hooks(entry.name, module)
        except ValueError as error:
            raise SMPError(f"plan: {error}") from None
        return self.found.setdefault(id(module), Change(entry, module))

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

    def _add_tail(self, change: Change) -> None:
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

    def apply(self) -> None:
        """Now do it."""
        before = parts_of(self.model)
        shared: dict[int, nn.Parameter] = {}
        for change in self.found.values():
            module = change.module
            if change.kind is not None:
                mix_in(module, change.kind)
            if change.has_heads and self.axis.size > 1:
                mix_in(module, SplitHeads)
            for name, value in change.values.items():
                setattr(module, name, value)
            if change.options is not None:
                module.split(self.axis, shared, **change.options)  # type: ignore[operator]
            elif isinstance(module, SplitModule):
                module.keep_parts(change.layouts, shared)
        mark_replaced(before, self.model)


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
