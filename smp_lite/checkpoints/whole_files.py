"""Whole state dicts read tensor by tensor: of ``torch.save`` (mapped into memory), and ``safetensors``.

Entries are deferred tensors (:mod:`smp_lite.deferred`), read when a parameter is made of them, so no rank
ever holds the whole state. A folder of ``safetensors`` files is what ``save_pretrained`` of transformers
writes: one file, or several with an index.
"""

from __future__ import annotations

import json
import os
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..deferred import from_source, has_deferred
from ..errors import SMPError
from ..storage.torch_files import read_torch
from ..wrapper.state.state_versions import with_versions_of

__all__ = ["read_whole"]

_INDEX = ".safetensors.index.json"


def read_whole(path: Path, root: nn.Module, *, caller: str, weights_only: bool | None) -> Any:
    """What a file of a whole model's state holds.

    Args:
        path: of the file, or a folder of safetensors files.
        root: the model that it is for.
        caller: the public function, for errors.
        weights_only: as of :func:`smp_lite.storage.torch_files.read_torch`.

    Raises:
        SMPError: it cannot be read.
    """
    if path.is_dir() or path.name.endswith((".safetensors", _INDEX)):
        return _with_tied(_safetensors(path, caller), root)
    if not has_deferred(root):
        return read_torch(path, caller=caller, weights_only=weights_only)
    # Files of torch before 1.6 cannot be mapped.
    mapped = zipfile.is_zipfile(path)
    found = read_torch(path, caller=caller, weights_only=weights_only, mmap=mapped)
    if not isinstance(found, dict):
        return found
    later = {key: _later(value) if isinstance(value, torch.Tensor) else value for key, value in found.items()}
    return with_versions_of(found, later)


def _later(tensor: torch.Tensor) -> torch.Tensor:
    """It lies in a mapped file, of which only what is used is read."""
    if tensor.layout is not torch.strided:
        return tensor
    return from_source(tensor.shape, tensor.dtype, lambda: tensor.detach().clone(), tensor.stride())


def _safetensors(path: Path, caller: str) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise SMPError(
            f"{caller}: {os.fspath(path)!r} needs the package safetensors, which is not installed: pip "
            "install safetensors"
        ) from error
    found: dict[str, torch.Tensor] = {}
    for file, names in _files(path, caller).items():
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                there = set(opened.keys())
                for name in names if names is not None else opened.keys():
                    if name not in there:
                        raise SMPError(f"{caller}: {os.fspath(file)!r} lacks {name!r}, which its index names")
                    part = opened.get_slice(name)
                    found[name] = from_source(
                        part.get_shape(), _dtype(part.get_dtype(), name, caller), partial(_read, file, name)
                    )
        except (OSError, SafetensorError) as error:
            raise SMPError(f"{caller}: {os.fspath(file)!r} cannot be read: {error}") from error
    return found


def _files(path: Path, caller: str) -> dict[Path, list[str] | None]:
    """The files, each with the names that it is to be read for; None: all."""
    if path.is_dir():
        single, index = path / "model.safetensors", path / f"model{_INDEX}"
        if single.is_file() == index.is_file():
            both = "both" if single.is_file() else "neither"
            raise SMPError(
                f"{caller}: the folder {os.fspath(path)!r} holds {both} of {single.name} and {index.name}: "
                "name the file"
            )
        path = single if single.is_file() else index
    if not path.name.endswith(_INDEX):
        return {path: None}
    try:
        names: dict[str, str] = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise SMPError(
            f"{caller}: {os.fspath(path)!r} is no index of safetensors files: {error!r}"
        ) from error
    found: dict[Path, list[str] | None] = {}
    for name, file in names.items():
        listed = found.setdefault(path.parent / file, [])
        assert listed is not None
        listed.append(name)
    return found


_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}


def _dtype(text: str, name: str, caller: str) -> torch.dtype:
    if text not in _DTYPES:
        raise SMPError(f"{caller}: {name!r} has the dtype {text}, which is not read: convert the file")
    return _DTYPES[text]


def _read(file: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="cpu") as opened:
        found: torch.Tensor = opened.get_tensor(name)
    return found.clone()


def _with_tied(state: dict[str, torch.Tensor], root: nn.Module) -> dict[str, torch.Tensor]:
    """Of tensors that are one object the file holds one: transformers leave out the others."""
    named: dict[int, torch.Tensor] = {}
    own = root.state_dict(keep_vars=True)
    for key, tensor in own.items():
        if key in state:
            named.setdefault(id(tensor), state[key])
    lacking = {
        key: named[id(tensor)] for key, tensor in own.items() if key not in state and id(tensor) in named
    }
    return {**state, **lacking}
