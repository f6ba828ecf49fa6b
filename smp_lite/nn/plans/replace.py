"""Splits the modules of an unmodified model, in place, as a plan says."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...comm.groups.axis import Axis
from ...errors import SMPError
from .changes import Changes
from .conflicts import check_conflicts
from .following import check_code
from .heads import changes_of_heads, has_heads
from .known import plan_for
from .patterns import Entry, expand
from .styles import REFUSED, STYLES, Style

__all__ = ["parallelize"]


def parallelize(model: nn.Module, axis: Axis, plan: Mapping[str, str] | None = None) -> dict[str, str]:
    """Splits exactly the modules that a plan names, in place; each rank keeps its part of their weights.

    Afterwards the model takes the same inputs, whole on every rank, and gives the same outputs. Modules stay
    the same objects under the same names, tied weights stay tied, and every parameter that is not the same on
    all ranks has a :class:`~smp_lite.nn.layout.ParameterLayout`. Make optimizers afterwards. A model that is
    refused is left as it was. Attention weights that a model returns on request (``output_attentions``) are
    refused in its call: each rank has those of its heads.

    What the plan does to the code between the split modules is checked as far as source code shows it; run
    :func:`~smp_lite.nn.plans.check_parallelized` once for each new architecture or plan.

    Args:
        model: the whole model, the same on every rank.
        axis: the ranks that share it.
        plan: patterns of names to styles (``{"layers.*.mlp.up_proj": "colwise"}``), where ``*`` is one part
            of a name and the base model's prefix may be left out. None: what ``transformers`` ships with the
            model, or else ours (:func:`~smp_lite.nn.plans.known_plan`). Styles are those of ``transformers``
            (:data:`~smp_lite.nn.plans.STYLES`), and of ours ``packed_colwise:3`` (the output features are
            three matrices of one size), ``embedding_heads`` (an Embedding with a feature for each head),
            ``local_dropout`` (a Dropout between split layers), ``local_size`` (the pattern names an integer
            attribute that counts split features).

    Returns:
        The style of every module, parameter or attribute that was changed, by its full name.

    Raises:
        SMPError: a pattern matches nothing, a style is unknown or cannot be exact, heads or features cannot
            be shared equally, weights are shared with a module that is not split alike, or the code between
            the split modules would compute something else. Names the pattern and the way out.
    """
    shipped = False
    if plan is None:
        plan, shipped = plan_for(model)
    entries = expand(
        model, plan, shipped=shipped, attributes=[n for n, s in STYLES.items() if s.kind == "number"]
    )
    styles = {entry.name: _style(entry) for entry in entries.values()}
    changes = Changes(model, axis)
    for entry in entries.values():
        changes.add(entry, styles[entry.name])
    _see_to_owners(model, axis, entries, styles, changes, shipped)
    check_conflicts(changes)
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


def _see_to_owners(
    model: nn.Module,
    axis: Axis,
    entries: Mapping[str, Entry],
    styles: Mapping[str, Style],
    changes: Changes,
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
        packed = {name: styles[full].packed for name, full in parts.items()}
        heads = changes_of_heads(owner_name, owner, layers, axis, packed)
        for name, rows in heads.rows.items():
            changes.share_rows(inside[name], rows)
        given = {name for name, full in inside.items() if styles[full].kind == "number"}
        numbers = {name: value for name, value in heads.numbers.items() if name not in given}
        if has_heads(owner):
            changes.of(entries[next(iter(inside.values()))], owner).has_heads = True
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
