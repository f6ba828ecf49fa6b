"""`/opt/ml`, where SageMaker keeps a job, and the folder that takes its place on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["CONTAINER_ROOT", "translate_paths"]

CONTAINER_ROOT = "/opt/ml"

_PATH = re.compile(
    rf"""(?P<remote>(?:@|://)[^\s,;"'\[\](){{}}|<>]*)"""
    rf"""|(?:^|(?<=[\s:,=;"'\[({{|<>])){CONTAINER_ROOT}(?=$|[/\s:,;"'\])}}|])"""
)
"""Where a text or a word begins, or behind a sign that stands between paths; not in the address of another
machine, which is passed over to the end of its word."""


def translate_paths(value: Any, root: Path) -> Any:
    """`value` with `/opt/ml`, wherever it is or starts a path, replaced by the host's tree at `root`: in
    `--out=/opt/ml/model` and in `/opt/ml/a:/opt/ml/b`, too. `user@host:/opt/ml` is on another machine, and
    stays.

    Args:
        value: a text, or a list or dict with texts at any depth; what else there is stays as it is.
    """
    if isinstance(value, list):
        return [translate_paths(item, root) for item in value]
    if isinstance(value, dict):
        return {name: translate_paths(item, root) for name, item in value.items()}
    if isinstance(value, str):
        return _PATH.sub(lambda match: match["remote"] or str(root), value)
    return value
