"""``smp.save`` and ``smp.load``: single files (SMP API reference, "Saving and Loading").

A file appears under its name only when it is complete. Loading runs no code of the file unless asked:
``weights_only=True`` is the default here, as it is in torch since 2.6.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from ..errors import SMPError
from ..session import current
from ..storage.durable import replace_file
from ..storage.switch import new_name
from ..storage.torch_files import read_torch, write_torch


def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """``torch.save``, to a file of this mp rank's own if ``partial``.

    Args:
        obj: what to save.
        f: path; a partial one gets ``_{mp_rank}`` appended.
        partial: whether each mp rank saves its part; call it on ranks with ``smp.dp_rank() == 0`` then.
        pickle_module, pickle_protocol: as in ``torch.save``.
        v3: the naming of sharded optimizer state, which is not supported yet.
    """
    if not isinstance(f, str | os.PathLike):
        raise TypeError(f"smp.save: f must be a path, got {type(f).__name__}")
    if v3:
        raise SMPError("smp.save(v3=True) belongs to sharded optimizer state, which is not supported yet")
    path = _partial_path(f) if partial else Path(f)
    replace_file(
        path,
        path.with_name(f"{path.name}.{new_name()}.part"),
        lambda new: write_torch(new, obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol),
    )


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    back_compat: bool = False,
    *,
    weights_only: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """``torch.load`` of what :func:`save` wrote; call it on all ranks.

    Args:
        f: path as given to :func:`save`.
        map_location: as in ``torch.load``; None: CPU.
        pickle_module: as in ``torch.load``; another than Python's needs ``weights_only=False``.
        partial: read this mp rank's own file.
        back_compat: accepted for SMP scripts; there is one naming only.
        weights_only: read tensors and plain Python data alone, and what
            ``torch.serialization.add_safe_globals`` allows. False: anything, which can run code of whoever
            made the file. None: True, unless ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1`` is set.

    Raises:
        FileNotFoundError: it is not there.
        SMPError: it holds what is not read without asking, or is no whole file of ``torch.save``.
    """
    path = _partial_path(f) if partial else Path(f)
    if not path.exists():
        other = "a full one is there: pass partial=False" if os.path.exists(f) else "was it saved?"
        raise FileNotFoundError(f"smp.load: {os.fspath(path)!r} does not exist ({other})")
    return read_torch(
        path,
        caller="smp.load",
        weights_only=weights_only,
        map_location="cpu" if map_location is None else map_location,
        pickle_module=pickle_module,
        **pickle_load_args,
    )


def _partial_path(f: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(f)}_{current().group_rank('MP')}")
