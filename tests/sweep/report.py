"""The table of a sweep."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

__all__ = ["report"]

_ORDER = ("equal", "1e-6", "1e-4", "rounding", "random", "different", "error", "timeout", "killed", "failed")


def report(results: dict[str, dict[str, Any]]) -> str:
    """Counts, and all models that are not equal, grouped by what happened to them."""
    counts = Counter(result["status"] for result in results.values())
    lines = [
        f"{counts[status]:5} {status}"
        for status in [*_ORDER, *sorted(set(counts) - set(_ORDER))]
        if counts[status]
    ]
    trained = [result for result in results.values() if "library_s" in result]
    if trained:
        slowest = sorted(trained, key=lambda result: -result["library_s"][0])[:10]
        lines += ["", "slowest first steps: library first, second; plain first, second"]
        lines += [
            f"  {r['name']:36} {r['library_s'][0]:7.2f} {r['library_s'][1]:7.2f}   "
            f"{r['plain_s'][0]:6.2f} {r['plain_s'][1]:6.2f}"
            for r in slowest
        ]
    for status in [s for s in counts if s != "equal"]:
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for result in results.values():
            if result["status"] == status:
                groups[_kind(result.get("error", ""))].append(result)
        lines += ["", f"{status}: {counts[status]}"]
        for members in sorted(groups.values(), key=len, reverse=True):
            lines.append(f"  {', '.join(result['name'] for result in members)}")
            lines.append(f"      {members[0].get('error') or members[0].get('worst', '')}")
    return "\n".join(lines)


def _kind(error: str) -> str:
    """An error without its numbers, names and places."""
    return re.sub(r"\d+|'[^']*'|\[[^]]*\]$|^\w+( with labels)?: ", "", error)[:80]
