"""``smp.save`` and ``smp.load``: single files (SMP API reference, "Saving and Loading").

A rank's own file is ``f_{mp_rank}``, as SMP named it up to 1.5, or ``f_{pp_rank}_{tp_rank}``, as since 1.6:
scripts delete and look for files by these names. Which of them is told by the parameters, since scripts of
that time send their keys. Reading takes either, the newer where both are there. The names alone would not do:
``model_1_0`` may be pp rank 1's part of ``model`` or mp rank 0's of ``model_1``. So a file notes the numbers
that were appended.

A file appears under its name only when it is complete. Loading runs no code of the file unless asked:
``weights_only=True`` is the default here, as it is in torch since 2.6.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

from ..devices import home
from ..errors import SMPError
from ..optim.state.own_parameters import PARTIAL_KEY
from ..session import current
from ..storage.durable import replace_file
from ..storage.switch import new_name
from ..storage.torch_files import read_note, read_torch, write_torch


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
    numbers = ""
    if partial:
        if not v3:
            _refuse_pieces(obj)
        own = _own_numbers()
        numbers = own.replica if v3 else own.of_mp_rank[0]
    path = Path(f"{os.fspath(f)}{numbers}")
    replace_file(
        path,
        path.with_name(f"{path.name}.{new_name()}.part"),
        lambda new: write_torch(
            new,
            obj,
            json.dumps({_NUMBERS: numbers}),
            pickle_module=pickle_module,
            pickle_protocol=pickle_protocol,
        ),
    )


def _refuse_pieces(obj: Any) -> None:
    """Raises SMPError where it is a state of pieces, of which the other ranks' would be lost."""
    inside = obj.values() if isinstance(obj, dict) else ()
    marks = [part.get(PARTIAL_KEY) for part in (obj, *inside) if isinstance(part, dict)]
    if any(isinstance(mark, str) and mark.startswith("piece ") for mark in marks):
        raise SMPError(
            "smp.save: parameters are sharded, so each rank's local_state_dict() has other pieces, and one "
            "file for an mp rank would hold those of one: call it on all ranks with v3=True, or save "
            "model.state_dict() and optimizer.state_dict(), or use smp.save_checkpoint"
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
        map_location: as in ``torch.load``; None: this rank's device.
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
    path = _own_file(os.fspath(f), back_compat=back_compat) if partial else Path(f)
    if not path.exists():
        other = "a full one is there: pass partial=False" if os.path.exists(f) else "was it saved?"
        raise FileNotFoundError(f"smp.load: {os.fspath(path)!r} does not exist ({other})")
    return read_torch(
        path,
        caller="smp.load",
        weights_only=weights_only,
        map_location=home() if map_location is None else map_location,
        pickle_module=pickle_module,
        **pickle_load_args,
    )


def _own_file(f: str, *, back_compat: bool) -> Path:
    """This rank's own file; where there is none, what its name would be."""
    own = _own_numbers(before_1_10=back_compat)
    names = {Path(f"{f}{numbers}"): numbers for numbers in (*own.of_mp_rank, own.replica)}
    there = [path for path in names if path.is_file()]
    found = [path for path in there if _numbers_of(path) in (None, names[path])]
    if there and not found:
        numbers = _numbers_of(there[0])
        raise FileNotFoundError(
            f"smp.load: {os.fspath(there[0])!r} is there, but it was saved "
            f"{f'with {numbers!r} appended' if numbers else 'whole'}, so it is not this rank's part of {f!r}"
        )
    if not back_compat:
        found.sort(key=lambda path: -path.stat().st_mtime_ns)  # jobs of both kinds may have saved
    return next(iter(found or names))


_NUMBERS = "numbers"


def _numbers_of(path: Path) -> str | None:
    """What was appended to the name when a file was saved; None: it does not say."""
    note = read_note(path)
    return None if note is None else json.loads(note).get(_NUMBERS)


class _OwnNumbers(NamedTuple):
    """What is appended to names."""

    of_mp_rank: tuple[str, str]  # the first is the one to write
    replica: str  # of this rank's alone


def _own_numbers(*, before_1_10: bool = False) -> _OwnNumbers:
    session = current()
    pp, tp, rdp, mp = (session.group_rank(kind) for kind in ("PP", "TP", "RDP", "MP"))
    old, new = f"_{mp}", f"_{pp}_{tp}"
    is_new = session.cfg.is_of_smp_1_6 and not before_1_10
    return _OwnNumbers((new, old) if is_new else (old, new), f"{new}_{rdp}")
