"""From a file or a dictionary to a plan."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ...config.errors import ConfigError
from ..dialects import colossal, enflame, libai, sagemaker, torchprime
from ..plan.parallel_plan import ParallelPlan, Said
from ..reading.python_config import run_python_config
from ..reading.python_tree import Tree, plain
from ..reading.texts import read_json, read_text, read_yaml
from ..reading.written import COMMAND_LINE, MOST, Written, near_keys, split_override
from .detect import DIALECTS, detect_dialect, detect_python, fitting_dialects

__all__ = ["load_plan", "read_configuration"]

_MODULES: Mapping[str, ModuleType] = {
    "sagemaker": sagemaker,
    "enflame": enflame,
    "colossal": colossal,
    "libai": libai,
    "torchprime": torchprime,
}
_SETTLE: Mapping[str, Callable[[Written], None]] = {
    "colossal": colossal.settle_aliases,
    "torchprime": torchprime.settle_shape,
}
#: Variables of a Python file that belong to a system.
_VARIABLES = {"colossal": (*colossal.KEYS, "NUM_MICRO_BATCHES", "num_chunks"), "libai": ("train", "compat")}
_PYTHON_DIALECTS = ("colossal", "libai")


def load_plan(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    dialect: str | None = None,
    overrides: Sequence[str] = (),
) -> ParallelPlan:
    """Returns the plan of a configuration of one of the five systems.

    Args:
        source: path of a ``.json``, ``.yaml`` or ``.py`` file, or a dictionary.
        world_size: number of ranks; None: where the configuration says it.
        dialect: ``sagemaker``, ``enflame``, ``colossal``, ``libai`` or ``torchprime``; None: by its shape.
        overrides: ``key=value`` with that system's keys; a later one wins.

    Raises:
        ConfigError: the file cannot be read or its system recognised, or a key is unknown or wrong.
    """
    if world_size is not None and (
        isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1
    ):
        raise ConfigError(f"world_size must be a whole number of 1 or more, got {world_size!r}")
    if world_size is not None and world_size > MOST:
        raise ConfigError(f"world_size is {world_size}, and there are {MOST} ranks at most")
    written = read_configuration(source, dialect=dialect, overrides=overrides)
    module = _MODULES[written.dialect]
    plan: ParallelPlan = module.compile_plan(written, world_size)
    ranks = Said(written.dialect, None, "--world-size")
    if world_size is None:
        ranks = Said(written.dialect, None, "--world-size", True, "by the configuration", is_inferred=True)
    plan = replace(plan, provenance=(("ranks", ranks), *plan.provenance))
    if written.others:
        note = f"not about parallelism, left alone: {', '.join(sorted(written.others))}"
        plan = replace(plan, notes=(*plan.notes, note))
    return plan


def read_configuration(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    dialect: str | None = None,
    overrides: Sequence[str] = (),
) -> Written:
    """Returns the keys of a configuration, command-line changes included; see :func:`load_plan`."""
    if dialect is not None and dialect not in DIALECTS:
        raise ConfigError(f"unknown dialect {dialect!r}: choose from {', '.join(DIALECTS)}")
    if isinstance(source, Mapping):
        tree = copy.deepcopy(dict(source))
        written = _written(tree, dialect, "the dictionary", None)
    else:
        written = _read_file(Path(source), dialect)
    if written.dialect in _SETTLE:
        _SETTLE[written.dialect](written)
    for text in overrides:
        key, value = split_override(text)
        written.set(_MODULES[written.dialect].path_of(key), value, COMMAND_LINE)
    return written


def _read_file(path: Path, dialect: str | None) -> Written:
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is not a file (working directory: {os.getcwd()})")
    if path.suffix == ".py":
        return _read_python(path, dialect)
    text = read_text(path)
    if path.suffix in (".yaml", ".yml"):
        value, warnings = read_yaml(text, str(path)), ()
    elif path.suffix == ".json" or text.lstrip().startswith("{"):
        value, warnings = read_json(text, str(path))
    else:
        raise ConfigError(f"{path} is neither .json, .yaml, .yml nor .py: name it by what it holds")
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}: a configuration is keys with values")
    written = _written(value, dialect, str(path), str(path))
    written.warnings += warnings
    return written


def _written(tree: dict[str, Any], dialect: str | None, name: str, file: str | None) -> Written:
    """
    Raises:
        ConfigError: the system is not recognised, or it plainly is another one than ``dialect``: its keys
            would be taken for something else, or not at all.
    """
    if dialect is None:
        written = Written(detect_dialect(tree, name), tree, file)
    else:
        others = [found for found in fitting_dialects(tree) if found != dialect]
        if others and dialect not in fitting_dialects(tree):
            raise ConfigError(
                f"{name} is a configuration of {others[0]}, by its keys {', '.join(map(repr, [*tree][:4]))}, "
                f"and --dialect (dialect=) says {dialect}: leave that out"
            )
        written = Written(dialect, tree, file)
    if written.dialect == "libai" and tree and "train" not in tree:
        raise ConfigError(
            f"{name} has no key 'train', under which LiBai's configurations say all about parallelism "
            f"(train.dist.tensor_parallel_size); it has {', '.join(map(repr, [*tree][:6]))}"
        )
    return written


def _read_python(path: Path, dialect: str | None) -> Written:
    found = dialect or detect_python(path)
    if found not in _PYTHON_DIALECTS:
        raise ConfigError(f"{path} is Python, and a {found} configuration is not: give its JSON or YAML file")
    config = run_python_config(path, libai.default_train if found == "libai" else None)
    variables = config.variables
    named = {name: value for name, value in variables.items() if name in _VARIABLES[found]}
    if found == "colossal":  # LiBai's files take models and data from elsewhere, and no degrees
        for name, value in config.unknown.items():
            if name in _VARIABLES[found]:
                raise ConfigError(
                    f"{name} is {value!r}, which is not known here: {value.why()}; give the value "
                    f"itself [{path}]"
                )
    if found == "libai" and "train" not in named:
        raise ConfigError(
            f"{path} defines no train: import it (from .common.train import train), or define it"
        )
    _check_others(variables, named, _VARIABLES[found], path)
    tree, origins = plain(Tree(named))
    written = Written(found, tree, str(path), origins, list(config.warnings))
    if found == "libai":
        _forget_defaults(written)
    written.others = [name for name in variables if name not in named]
    return written


def _check_others(
    variables: Mapping[str, Any], named: Mapping[str, Any], known: Sequence[str], path: Path
) -> None:
    """
    Raises:
        ConfigError: a variable of the file is no key, and looks like one: it would not count. One that has
            the value of the key, as in ``zero = ZERO``, loses nothing.
    """
    for name, value in variables.items():
        near = near_keys(name, known) if name not in named else []
        if near and not any(key in named and _is_same(named[key], value) for key in near):
            raise ConfigError(
                f"unknown key {name!r}: did you mean {near[0]!r}? If it is a variable of the file's own, "
                f"begin its name with an underscore: _{name.strip('_')} [{path}]"
            )


def _is_same(value: Any, other: Any) -> bool:
    # An array, or an Unknown, does not answer with True or False.
    return value is other or (type(value) is type(other) and repr(value) == repr(other))


def _forget_defaults(written: Written) -> None:
    """Takes what nobody said out of the tree of a missing train file, so that it counts as a default."""

    def kept(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            here = (*path, key)
            if isinstance(value, dict) and value:
                if below := kept(value, here):
                    found[key] = below
            elif here in written.origins:
                found[key] = value
        return found

    written.tree = {**written.tree, "train": kept(written.tree["train"], ("train",))}
