"""The versions of modules in a state dict, which torch keeps beside its entries.

A module that has changed what it saves counts its ``_version`` up, and its ``_load_from_state_dict`` turns
older entries into new ones. Which they are is told by an attribute of the dict: a dict without it is taken
for one of the oldest version, and what was saved yesterday would be turned once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

__all__ = ["with_versions_of"]

_VERSIONS = "_metadata"


def with_versions_of(source: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries as a state dict that says of modules' versions what another one does.

    Args:
        source: a state dict of torch, or what was made of one; where it says nothing, nor does the result.
        entries: some of its entries, or what has become of them. Versions that they come with stay.
    """
    versions = getattr(entries, _VERSIONS, None) or getattr(source, _VERSIONS, None)
    found: OrderedDict[str, Any] = OrderedDict(entries)
    if versions is not None:
        setattr(found, _VERSIONS, versions)
    return found
