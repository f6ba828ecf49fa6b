"""Which modules and parameters of a model a plan names, and how it wants them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from ...errors import SMPError

__all__ = ["Entry", "Names", "expand", "shipped_plan"]

_STAR = "[^.]+"


@dataclass(frozen=True)
class Entry:
    """What a plan says about one module, parameter or attribute of the model.

    Attributes:
        name: the full name.
        style: as the plan spells it.
        pattern: the plan's key, for errors.
    """

    name: str
    style: str
    pattern: str


def shipped_plan(model: nn.Module) -> dict[str, str]:
    """The plan that ``transformers`` ships with a model (``model.tp_plan``), its patterns with full prefixes.

    Raises:
        SMPError: it ships none.
    """
    plan = getattr(model, "_tp_plan", None)
    if not plan:
        base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        plan = {f"{inside}{pattern}": style for pattern, style in base.items()}
    if not plan:
        raise SMPError(
            f"{type(model).__name__} comes without a tensor-parallel plan: give one, "
            '{"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}, or let '
            "smp_lite.nn.plans.derive_plan find what is safe"
        )
    return dict(plan)


def expand(
    model: nn.Module, plan: Mapping[str, str], *, shipped: bool, attributes: Iterable[str] = ()
) -> dict[str, Entry]:
    """Every name that the plan's patterns match.

    A ``*`` stands for one part of a name (between dots). Patterns may leave out the prefix of the base model
    (``model.``).

    Args:
        shipped: the plan came with the model; its patterns are for all variants of an architecture, so not
            each needs to match.
        attributes: styles whose patterns name attributes rather than modules.

    Raises:
        SMPError: a pattern matches nothing, or two want different things of one module; names them.
    """
    names = Names(model, attributes)
    found: dict[str, Entry] = {}
    for pattern, style in plan.items():
        matched = names.matching(pattern, style)
        if not matched and not shipped:
            raise SMPError(
                f"plan: {pattern!r}: {style!r} matches no module and no parameter of {type(model).__name__}"
                f"{_nearest(pattern, names.all)}"
            )
        for name in matched:
            other = found.get(name)
            if other is not None and other.style != style:
                raise SMPError(
                    f"plan: {name} is to be {other.style!r} by {other.pattern!r} and {style!r} by "
                    f"{pattern!r}: leave one of them out"
                )
            found[name] = Entry(name, style, pattern)
    if not found:
        raise SMPError(f"the plan of {type(model).__name__} matches none of its modules: {dict(plan)}")
    return found


class Names:
    """What the patterns of plans can name in a model.

    Args:
        model: the whole model.
        attributes: styles whose patterns name attributes rather than modules.
    """

    def __init__(self, model: nn.Module, attributes: Iterable[str] = ()) -> None:
        self.attributes = frozenset(attributes)
        self.modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        self.all = [*self.modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
        self.prefix = getattr(model, "base_model_prefix", "") or ""

    def matching(self, pattern: str, style: str) -> list[str]:
        """Full names; of an attribute, those of the modules that would have it."""
        if style in self.attributes:
            owner, _, attribute = pattern.rpartition(".")
            return [f"{name}.{attribute}" for name in _matching(owner, self.modules, self.prefix)]
        return _matching(pattern, self.all, self.prefix)


def _matching(pattern: str, names: Iterable[str], prefix: str) -> list[str]:
    expression = re.escape(pattern).replace(r"\*", _STAR)
    for start in ("", re.escape(prefix + ".") if prefix else ""):
        matches = re.compile(start + expression).fullmatch
        found = [name for name in names if matches(name)]
        if found:
            return found
    return []


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """``; the nearest are ...``, with layer numbers as stars."""
    known = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) for name in names))
    last = pattern.rpartition(".")[2]
    near = difflib.get_close_matches(pattern, known, 3, 0.6)
    near += [name for name in known if name.rpartition(".")[2] == last and name not in near]
    return f"; the nearest names: {', '.join(near[:4])}" if near else ""
