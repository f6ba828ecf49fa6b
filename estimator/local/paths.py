"""`/opt/ml`, where SageMaker keeps a job, and the folder that takes its place on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["CONTAINER_ROOT", "translate_paths"]

CONTAINER_ROOT = "/opt/ml"


def translate_paths(value: Any, root: Path) -> Any:
    """`value` with `/opt/ml`, where it is or starts a path, replaced by the host's tree at `root`.

    Args:
        value: a text, or a list or dict with texts at any depth; what else there is stays as it is.
    """
    if isinstance(value, list):
        return [translate_paths(item, root) for item in value]
    if isinstance(value, dict):
        return {name: translate_paths(item, root) for name, item in value.items()}
    if isinstance(value, str) and (value == CONTAINER_ROOT or value.startswith(f"{CONTAINER_ROOT}/")):
        return str(root) + value.removeprefix(CONTAINER_ROOT)
    return value
