"""Attention heads under a plan: that ranks get whole ones, and the numbers of heads that a module keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...comm.groups.axis import Axis
from ...errors import SMPError
from ..one_d.parts import nearest_sizes
from .source import reads_of, words

__all__ = ["HEAD_COUNTS", "HeadChanges", "changes_of_heads", "has_heads", "output_features"]

HEAD_COUNTS = words(
    "num_heads num_attention_heads n_heads n_head num_attn_heads num_query_heads num_key_value_heads "
    "num_kv_heads n_kv_heads"
)
"""Attributes of modules and configurations that count heads."""

_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_GROUPS = "num_key_value_groups"


@dataclass
class HeadChanges:
    """What a module with split heads needs beside its split layers.

    Attributes:
        rows: by layer, the output features that this rank computes of a layer that stays whole (key and value
            heads that several ranks share).
        numbers: new values of attributes.
    """

    rows: dict[str, range] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)


def output_features(layer: Any) -> int:
    """Of a Linear or a Conv1D."""
    found: int = layer.out_features if isinstance(layer, nn.Linear) else layer.nf
    return found


def changes_of_heads(
    name: str, owner: nn.Module, layers: Mapping[str, nn.Module], axis: Axis, packed: Mapping[str, int]
) -> HeadChanges:
    """
    Args:
        name: of the owner.
        owner: the module whose code takes the layers' outputs.
        layers: those split by output features, by their names in the owner.
        packed: how many matrices of one size each holds side by side.

    Raises:
        SMPError: heads that the ranks cannot share, or numbers of heads that cannot be changed.
    """
    changes = HeadChanges()
    found = [attribute for attribute in _HEAD_SIZES if _is_number(owner, attribute)]
    reads = reads_of(type(owner))
    if found:
        head_size: int = getattr(owner, found[0])
        for layer_name, layer in layers.items():
            if isinstance(layer, nn.Embedding):
                continue  # it has one feature for each head
            features = output_features(layer) // packed[layer_name]
            heads, rest = divmod(features, head_size)
            if rest or heads % axis.size == 0:
                continue
            if layer_name in _KEYS_AND_VALUES and axis.size % heads == 0:
                changes.rows[layer_name] = _shared_rows(name, owner, layers, head_size, heads, axis)
                continue
            raise SMPError(
                f"plan: {name}.{layer_name} has {heads} heads of {found[0]}={head_size}, which the "
                f"{axis.size} ranks of axis {axis.name!r} cannot share equally; the nearest that they can: "
                f"{nearest_sizes(heads, axis.size)}"
            )
    if changes.rows:
        if set(changes.rows) != set(_KEYS_AND_VALUES):
            raise SMPError(
                f"plan: of {name}.k_proj and v_proj only {sorted(changes.rows)} has fewer heads than the "
                f"{axis.size} ranks of axis {axis.name!r}: such heads cannot be shared between ranks"
            )
        heads = output_features(layers["k_proj"]) // head_size
        changes.numbers[_GROUPS] = getattr(owner, _GROUPS) * heads // axis.size
    for attribute in sorted(HEAD_COUNTS & reads.attributes):
        if not _is_number(owner, attribute):
            continue
        count: int = getattr(owner, attribute)
        if changes.rows and "k" in attribute:
            changes.numbers[attribute] = 1
        elif count % axis.size:
            raise SMPError(
                f"plan: {name}.{attribute} is {count}, and the {axis.size} ranks of axis {axis.name!r} "
                "cannot share as many heads equally; the nearest that they can: "
                f"{nearest_sizes(count, axis.size)}"
            )
        else:
            changes.numbers[attribute] = count // axis.size
    fixed = sorted(HEAD_COUNTS & reads.of_config)
    if fixed:
        raise SMPError(
            f"plan: the code of {name} ({type(owner).__name__}) counts heads by self.config.{fixed[0]}, "
            f"which is that of the whole model, so {', '.join(sorted(layers))} cannot be 'colwise': use "
            "'colwise_gather_output', and 'rowwise_split_input' for the layer after them"
        )
    return changes


def has_heads(owner: nn.Module) -> bool:
    """Whether a module is an attention."""
    counts = any(_is_number(owner, attribute) for attribute in (*HEAD_COUNTS, *_HEAD_SIZES))
    return counts or "Attention" in type(owner).__name__


def _shared_rows(
    name: str, owner: nn.Module, layers: Mapping[str, nn.Module], head_size: int, heads: int, axis: Axis
) -> range:
    queries = layers.get("q_proj")
    if queries is None or not _is_number(owner, _GROUPS):
        raise SMPError(
            f"plan: {name} has {heads} key and value heads for the {axis.size} ranks of axis "
            f"{axis.name!r}, and {type(owner).__name__} has no {_GROUPS} and q_proj by which each rank "
            f"could take the heads that it needs: use at most {heads} ranks, or leave {name} out"
        )
    groups: int = getattr(owner, _GROUPS)
    if groups * heads % axis.size or output_features(queries) % (groups * heads * head_size):
        raise SMPError(
            f"plan: {name} has {groups * heads} query heads, which the {axis.size} ranks of axis "
            f"{axis.name!r} cannot share equally; the nearest that they can: "
            f"{nearest_sizes(groups * heads, axis.size)}"
        )
    head = axis.index // (axis.size // heads)
    return range(head * head_size, (head + 1) * head_size)


def _is_number(owner: nn.Module, attribute: str) -> bool:
    value = vars(owner).get(attribute)
    return isinstance(value, int) and not isinstance(value, bool)
