"""Resuming from a portable checkpoint: each rank reads the pieces that it holds, whatever layout wrote them.

Before partition a rank does not know its pieces. Then all that can be checked is checked at once, by names
and shapes of the whole model, and the tensors are read by the first step, when it has partitioned the model.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...errors import SMPError
from ...nn.layout import layout_of
from ...optim.state.own_parameters import PARTIAL_KEY, partial_mark
from ...record.code.source_line import warn_once_at_user_line
from ...record.parameters.away import is_away
from ...session import Session
from ...storage.layout import USER_CONTENT, part_file
from ...storage.torch_files import read_torch
from ...wrapper.state.state_versions import with_versions_of
from ...wrapper.state.waiting_state import set_extra_state
from .matching import ModelEntries, OptimizerEntries, match_model, match_optimizer
from .names import Portable
from .pieces import boxes_of
from .reading import PieceReader, read_metadata
from .together import together

__all__ = ["bytes_read", "resume_portable"]

_CALLER = "resume_from_checkpoint"

bytes_read: list[int] = []
"""Of the files of tensors, by each load of this process; for tests and for who wants to know."""


def resume_portable(
    session: Session, found: Portable, *, strict: bool, load_optimizer: bool, weights_only: bool | None
) -> Any:
    """Loads it into the session's model and optimizer; the user content. Collective over all ranks.

    Raises:
        SMPError: it is of another model or optimizer, or something of it is missing, on this rank or on
            another one.
    """
    load = _Load(session, found, strict=strict, weights_only=weights_only)
    contents: list[Any] = []

    def look() -> None:
        load.look(load_optimizer=load_optimizer)
        path = found.folder / part_file(USER_CONTENT, 0)
        if path.exists():
            contents.append(read_torch(path, caller=_CALLER, weights_only=weights_only))
        elif found.identity is not None and USER_CONTENT in found.identity.parts:
            raise SMPError(f"{_CALLER}: {os.fspath(path)!r} is missing: it is a part of {found}")

    together(session, _CALLER, look)
    if session.model.partitioned:
        load.read_and_put()
    else:
        load.postpone()
    return contents[0] if contents else None


class _Load(Mapping[str, Any]):
    """One load on one rank.

    Before partition it stands in the model's list of states to load, as a state dict that is read when it is
    asked for.
    """

    def __init__(self, session: Session, found: Portable, *, strict: bool, weights_only: bool | None) -> None:
        self.session, self.found = session, found
        self.strict, self.weights_only = strict, weights_only
        self._description: Metadata | None = None
        self._model: ModelEntries | None = None
        self._optimizer: OptimizerEntries | None = None
        self._state: dict[str, Any] | None = None
        self._optimizer_state: dict[str, Any] | None = None

    def _reader(self) -> PieceReader:
        assert self._description is not None
        return PieceReader(self.found.folder, self._description, _CALLER, weights_only=self.weights_only)

    def look(self, *, load_optimizer: bool) -> None:
        """Finds all entries; reads no tensors of parameters."""
        session = self.session
        folder = self.found.folder
        self._description = read_metadata(folder, _CALLER, weights_only=self.weights_only)
        with self._reader() as reader:
            reader.check_files()
            self._model = match_model(reader, session.model, strict=self.strict)
            has_optimizer = any(".param_groups." in key for key in reader.entries)
            session.unread_optimizer = None
            if load_optimizer and has_optimizer:
                session.check_one_optimizer(_CALLER)
            if load_optimizer and session.optimizer is not None:
                self._optimizer = match_optimizer(reader, session.model, session.optimizer)
        if load_optimizer and session.optimizer is None and has_optimizer:
            session.unread_optimizer = os.fspath(folder)
        if load_optimizer and session.optimizer is not None and self._optimizer is None and session.rank == 0:
            warn_once_at_user_line(
                f"{_CALLER}: {os.fspath(folder)!r} was saved without an optimizer, so this one starts "
                "afresh; load_optimizer=False says that this is meant"
            )

    def read_and_put(self) -> None:
        """Collective over all ranks."""
        together(self.session, _CALLER, self._read)
        together(self.session, _CALLER, self._put)

    def _put(self) -> None:
        self._take_place()
        self.session.model.load_state_dict(self._state, strict=False, same_partition_load=True)
        self._put_optimizer()
        self._state = None

    def _put_optimizer(self) -> None:
        if self._optimizer_state is not None:
            self.session.optimizer.load_state_dict(self._optimizer_state)
            self._optimizer_state = None

    def _put_optimizer_late(self) -> None:
        """Settings count from when they were loaded: the script may have changed them since."""
        if self._optimizer_state is not None:
            optimizer, saved = self.session.optimizer, self._optimizer_state["param_groups"]
            groups = [
                {**settings, **{key: own[key] for key in settings.keys() & own.keys() - {"params"}}}
                for settings, own in zip(saved, optimizer.param_groups, strict=False)
            ]
            # Groups that it has added have no state yet.
            added = zip(optimizer.param_groups, optimizer.positions_here, strict=True)
            groups += [{**own, "params": here} for own, here in [*added][len(saved) :]]
            self._optimizer_state["param_groups"] = groups
        self._put_optimizer()

    # Before partition ---------------------------------------------------------------------------------------

    def postpone(self) -> None:
        """The first step reads and puts in place."""
        optimizer = self.session.optimizer
        self._take_place()
        model = self.session.model
        model.keep_until_partition(self, strict=False)
        with self._reader() as reader:  # The script may look at it, and change it, before the first step.
            others = self._model.others.items()
            set_extra_state(model.module, {key: _nest(reader, *place) for key, place in others})
        if self._optimizer is not None:
            for group, settings in zip(optimizer.param_groups, self._optimizer.groups, strict=True):
                group.update(
                    copy.deepcopy(settings)
                )  # learning rate schedulers that are built next start from them
            optimizer.wait_for_state(True)

    def _take_place(self) -> None:
        """Earlier loads that wait for the first step, or that it could not read, are given up."""
        pending = self.session.model._pending_state
        for load, _ in pending:
            is_other = isinstance(load, _Load) and load._optimizer is not None
            if is_other and self._optimizer is not None:
                self.session.optimizer.wait_for_state(False)
        pending[:] = [each for each in pending if not isinstance(each[0], _Load)]

    def _read_late(self) -> dict[str, Any]:
        if self._state is None:
            together(self.session, _CALLER, self._read)
            if self._optimizer is not None:
                self.session.optimizer.wait_for_state(False)
                together(self.session, _CALLER, self._put_optimizer_late)
        assert self._state is not None
        return self._state

    @property
    def _metadata(self) -> Any:
        """As of torch's state dicts (:mod:`smp_lite.wrapper.state.state_versions`)."""
        return getattr(self._read_late(), "_metadata", None)

    def __getitem__(self, key: str) -> Any:
        return self._read_late()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read_late())

    def __len__(self) -> int:
        return len(self._read_late())

    # Reading ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """This rank's pieces."""
        with self._reader() as reader:
            self._state = self._read_model(reader)
            if self._optimizer is not None:
                self._optimizer_state = self._read_optimizer(reader, self._optimizer)
            bytes_read.append(reader.bytes_read)

    def _read_model(self, reader: PieceReader) -> dict[str, Any]:
        assert self._model is not None
        wrapper = self.session.model
        live = wrapper.module.state_dict(keep_vars=True)
        here = {key for key in wrapper._state().local() if key != PARTIAL_KEY}
        state: dict[str, Any] = {PARTIAL_KEY: partial_mark(self.session)}
        of_tensor: dict[str, torch.Tensor] = {}
        for key, value in live.items():
            entry = self._model.tensors.get(self._model.first[key])
            if key not in here or is_away(value):
                continue
            if key in self._model.others:
                state[key] = _nest(reader, *self._model.others[key])
            elif entry is not None and isinstance(value, torch.Tensor):
                if entry not in of_tensor:
                    of_tensor[entry] = _piece(reader, entry, value)
                state[key] = of_tensor[entry]
        # As in plain PyTorch, where one is read into the state dict of the model that there is.
        return with_versions_of(live, state)

    def _read_optimizer(self, reader: PieceReader, entries: OptimizerEntries) -> dict[str, Any]:
        optimizer = self.session.optimizer
        parameters = dict(self.session.model.module.named_parameters())
        state: dict[int, Any] = {}
        groups = []
        position = 0
        for names, settings in zip(entries.names, entries.groups, strict=True):
            here = []
            for name in names:
                if not is_away(parameters[name]):
                    here.append(position)
                    places = entries.state.get(name)
                    if places:
                        state[position] = _state_of(reader, places, optimizer.stand_in_of(parameters[name]))
                position += 1
            groups.append({**settings, "params": here})
        return {"state": state, "param_groups": groups, PARTIAL_KEY: optimizer.own_mark}


def _piece(reader: PieceReader, key: str, parameter: torch.Tensor) -> torch.Tensor:
    """The part of an entry that this rank holds of the parameter that it belongs to."""
    layout = layout_of(parameter)
    entry = reader.entries[key]
    if layout is None or tuple(entry.size) != layout.shape or not entry.size:
        return reader.tensor(key)
    return reader.tensor(key, boxes_of(layout, layout.shape), layout.local_shape)


def _state_of(
    reader: PieceReader, places: Mapping[tuple[str | int, ...], str], parameter: torch.Tensor
) -> dict[str, Any]:
    flat = {key: _leaf(reader, key, parameter) for key in places.values()}
    return unflatten_state_dict(flat, {key: place for place, key in places.items()})


def _leaf(reader: PieceReader, key: str, parameter: torch.Tensor) -> Any:
    is_tensor = isinstance(reader.entries[key], TensorStorageMetadata)
    return _piece(reader, key, parameter) if is_tensor else reader.value(key)


def _nest(reader: PieceReader, key: str, leaves: list[str]) -> Any:
    """What is no tensor, such as extra state of a module, from its leaves."""

    def leaf(at: str) -> Any:
        is_tensor = isinstance(reader.entries[at], TensorStorageMetadata)
        return reader.tensor(at) if is_tensor else reader.value(at)

    if leaves == [key]:
        return leaf(key)
    inside = {}
    for at in leaves:
        path = reader.path(at)
        depth = next(i for i in range(len(path) + 1) if ".".join(map(str, path[:i])) == key)
        inside[at] = path[depth:]
    return unflatten_state_dict({at: leaf(at) for at in leaves}, inside)
