"""Which system a configuration is written for, by its shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config.errors import ConfigError
from ..dialects.torchprime import is_sharding_map
from ..reading.python_config import names_in
from ..reading.texts import read_text

__all__ = ["DIALECTS", "detect_dialect", "detect_python", "fitting_dialects"]

DIALECTS = ("sagemaker", "enflame", "colossal", "libai", "torchprime")
_LOOKED_FOR = {
    "sagemaker": "partitions or pipeline_parallel_degree",
    "enflame": "stage_cnt, sharding_size or device_mapping",
    "colossal": "parallel",
    "libai": "train with train.dist",
    "torchprime": "ici_mesh, sharding, model.sharding, or names with lists of axes",
}


def detect_dialect(value: object, name: str) -> str:
    """Returns the system of a read configuration.

    Args:
        value: its content.
        name: of the file, for errors.

    Raises:
        ConfigError: none of the five fits, or more than one.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} holds a {type(value).__name__}: a configuration is keys with values")
    found = fitting_dialects(value)
    if isinstance(value.get("smdistributed"), Mapping) and not found:
        raise ConfigError(
            f"{name} holds a distribution of an Estimator: give what is under "
            "smdistributed.modelparallel.parameters"
        )
    return _one(found, name)


def fitting_dialects(value: Mapping[Any, Any]) -> list[str]:
    """Returns the systems that have the keys of a read configuration."""
    model, train = value.get("model"), value.get("train")
    found = {
        "sagemaker": bool({"partitions", "pipeline_parallel_degree"} & value.keys()),
        "enflame": bool({"stage_cnt", "sharding_size", "sharding_dim", "device_mapping"} & value.keys()),
        "colossal": "parallel" in value,
        "libai": isinstance(train, Mapping) and "dist" in train,
        "torchprime": bool({"ici_mesh", "dcn_mesh", "sharding"} & value.keys())
        or (isinstance(model, Mapping) and "sharding" in model)
        or is_sharding_map(value),
    }
    return [dialect for dialect, fits in found.items() if fits]


def detect_python(path: Path) -> str:
    """Returns the system of a Python file by the variables that it sets or imports; it does not run."""
    names = names_in(read_text(path), str(path))
    found = [
        dialect for dialect, variable in (("colossal", "parallel"), ("libai", "train")) if variable in names
    ]
    return _one(found, str(path))


def _one(found: list[str], name: str) -> str:
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{name} may be a configuration of {' or of '.join(found)}: say which with --dialect (dialect=)"
        )
    looked = "; ".join(f"{dialect}: {text}" for dialect, text in _LOOKED_FOR.items())
    raise ConfigError(
        f"{name} is not a configuration of the five systems that are known. Looked for: {looked}. If it is "
        "one, "
        f"say which with --dialect (dialect=)"
    )
