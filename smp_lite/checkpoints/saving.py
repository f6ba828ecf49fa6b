"""``smp.save`` and ``smp.load``: single files (SMP API reference, "Saving and Loading").

A rank's own file is ``f_{mp_rank}``, as SMP named it up to 1.5, or ``f_{pp_rank}_{tp_rank}``, as since 1.6:
scripts delete and look for files by these names. Which of them is told by the parameters, since scripts of
that time send their keys. Reading takes either, the newer where both are there.

A file appears under its name only when it is complete. Loading runs no code of the file unless asked:
``weights_only=True`` is the default here, as it is in torch since 2.6.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

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
        f: path; a partial one gets this rank's numbers appended (see the module).
        partial: whether each mp rank saves its part; call it on ranks with ``smp.dp_rank() == 0`` then.
        pickle_module, pickle_protocol: as in ``torch.save``.
        v3: each replica saves its own part, as ``f_{pp_rank}_{tp_rank}_{rdp_rank}``; call it on all ranks.
    """
    if not isinstance(f, str | os.PathLike):
        raise TypeError(f"smp.save: f must be a path, got {type(f).__name__}")
    own = _own_names(os.fspath(f))
    path = Path((own.replica if v3 else own.names[0]) if partial else f)
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
        back_compat: the file is from before SMP 1.10, so look for ``f_{mp_rank}`` first.
        weights_only: read tensors and plain Python data alone, and what
            ``torch.serialization.add_safe_globals`` allows. False: anything, which can run code of whoever
            made the file. None: True, unless ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1`` is set.

    Raises:
        FileNotFoundError: it is not there.
        SMPError: it holds what is not read without asking, or is no whole file of ``torch.save``.
    """
    path = Path(f)
    if partial:
        own = _own_names(os.fspath(f), before_1_10=back_compat)
        found = [Path(name) for name in (*own.names, own.replica) if os.path.exists(name)]
        if not back_compat:
            found.sort(key=lambda name: -name.stat().st_mtime_ns)  # jobs of both kinds may have saved
        path = found[0] if found else Path(own.names[0])
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


class _OwnNames(NamedTuple):
    names: tuple[str, str]  # of this mp rank's file; the first is the one to write
    replica: str  # of this rank's alone


def _own_names(f: str, *, before_1_10: bool = False) -> _OwnNames:
    session = current()
    pp, tp, rdp, mp = (session.group_rank(kind) for kind in ("PP", "TP", "RDP", "MP"))
    old, new = f"{f}_{mp}", f"{f}_{pp}_{tp}"
    is_new = session.cfg.is_of_smp_1_6 and not before_1_10
    return _OwnNames((new, old) if is_new else (old, new), f"{new}_{rdp}")
