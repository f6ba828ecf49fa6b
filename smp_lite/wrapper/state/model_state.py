"""State dicts of a model of which each mp rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ...errors import SMPError
from ...nn.guarding import unguarded
from ...nn.layout import layout_of, whole_of
from ...optim.state.own_parameters import PARTIAL_KEY, check_mark, partial_mark
from ...record.parameters.placement import FOREIGN, SPLIT
from ...runtime.model_runtime import ModelRuntime
from ...session import Session
from .state_loading import put_into
from .state_versions import with_versions_of
from .waiting_state import EXTRA_STATE, set_extra_state


class ModelState:
    """Reads and writes the state of the wrapped module on this rank."""

    def __init__(self, session: Session, module: nn.Module, runtime: ModelRuntime | None) -> None:
        self.session = session
        self.module = module
        self.runtime = runtime

    def local(self) -> dict[str, Any]:
        """Entries of this rank's stage; all of them before partition."""
        mark = partial_mark(self.session)
        with unguarded():
            full = self.module.state_dict()
        here = self._here(full)
        own = {key: value for key, value in full.items() if key in here}
        return with_versions_of(full, {**own, PARTIAL_KEY: mark})

    def _here(self, keys: Iterable[str]) -> set[str]:
        """The entries that this rank keeps up to date.

        They are told by the module that holds them, not by where their tensor is: a buffer is on every
        rank, but only the stages that run its module change it; and for a while (``cpu()``,
        ``smp.gathered``) a rank has all parameters. A split container runs on all ranks, so its buffers
        count everywhere.
        """
        if self.runtime is None:
            return set(keys)
        modules = dict(self.module.named_modules(remove_duplicate=False))
        here = set()
        for key in keys:
            holder, _, own = key.rpartition(".")
            module = modules.get(holder)
            if module is None or self._is_kept(module, own):
                here.add(key)
        return here

    def _is_kept(self, module: nn.Module, own: str | None = None) -> bool:
        """Whether this rank keeps an entry of a module up to date; None: any of them."""
        if self.runtime is None:
            return True
        placement = self.runtime.placement
        home = placement.home(module)
        return (
            home == FOREIGN
            or placement.stage_of[placement.names[id(module)]] in self.runtime.peers.stages
            or (home == SPLIT and (own is None or own not in module._parameters))
        )

    def whole(self, *, gather_to_rank0: bool = False) -> dict[str, Any]:
        """All entries on CPU, in the module's order; collective over the mp group."""
        local = self.local()
        local.pop(PARTIAL_KEY)
        live = self.module.state_dict(keep_vars=True)
        mine = {}
        for key, value in local.items():
            layout = layout_of(live[key]) if isinstance(value, torch.Tensor) else None
            mine[key] = _to_cpu(value if layout is None else whole_of(value, layout))
        world = self.session.world
        parts: list[dict[str, Any]] | None
        if world is None or self.runtime is None:
            parts = [mine]
        elif gather_to_rank0:
            parts = world.gather(mine, "PP", "model.state_dict")
        else:
            parts = world.exchange(mine, "PP", "model.state_dict")
        if parts is None or (gather_to_rank0 and world is not None and world.group_rank("MP") != 0):
            return {}
        found: dict[str, Any] = {}
        for part in parts:
            found.update(part)
        whole: dict[str, Any] = {}
        first: dict[int, str] = {}  # a tied parameter is one again, as in a plain state dict
        for key, value in live.items():
            if key in found:
                tied = isinstance(value, nn.Parameter)
                whole[key] = found[first.setdefault(id(value), key) if tied else key]
        return with_versions_of(live, whole)

    def merged(self, state: dict[str, Any], same_partition_load: bool) -> dict[str, Any]:
        """The dict to load: partial ones of all mp ranks are merged, unless this rank's own will do."""
        entries = dict(state)
        partial = entries.pop(PARTIAL_KEY, False)
        check_mark(self.session, partial, "model.load_state_dict")
        if partial and not same_partition_load and self.session.world is not None:
            parts = self.session.world.exchange(entries, "PP", "model.load_state_dict")
            entries = {key: value for part in parts for key, value in part.items()}
            partial = self._is_split() and partial
        return with_versions_of(state, {**entries, PARTIAL_KEY: partial})

    def _is_split(self) -> bool:
        """Whether entries of partial dicts are parts of parameters, merged or not."""
        return any(layout_of(parameter) is not None for parameter in self.module.parameters())

    def put_back(self, entries: dict[str, Any]) -> None:
        """Puts copies of entries of :meth:`local` where they were.

        Code of modules runs only where it keeps entries of its own, and then with all that the module has.
        """
        present = self.local()
        modules = dict(self.module.named_modules(remove_duplicate=False))
        kept_by_code: dict[str, set[str]] = {}
        with unguarded(), torch.no_grad():
            for key in entries.keys() & present.keys():
                holder, _, own = key.rpartition(".")
                part = modules.get(holder)
                if part is None or own not in {**part._parameters, **part._buffers, EXTRA_STATE: None}:
                    while holder not in modules:  # its name has points
                        holder = holder.rpartition(".")[0]
                    kept_by_code.setdefault(holder, set()).add(key)
                elif own != EXTRA_STATE:
                    present[key].copy_(entries[key])
            for holder, keys in kept_by_code.items():
                part, prefix = modules[holder], f"{holder}." if holder else ""
                keys |= {f"{prefix}{own}" for own in (*part._parameters, *part._buffers)}
                if keys & present.keys() <= entries.keys():
                    given = {key: entries[key] for key in keys & present.keys()}
                    part._load_from_state_dict(given, prefix, {"version": part._version}, True, [], [], [])
        set_extra_state(self.module, entries)

    def load(self, state: dict[str, Any], *, strict: bool) -> Any:
        """Copies the entries of this rank's stage into place.

        Raises:
            SMPError: ``strict`` and keys are missing or unknown.
        """
        partial = state.get(PARTIAL_KEY, False)
        entries = with_versions_of(state, {key: value for key, value in state.items() if key != PARTIAL_KEY})
        with unguarded():
            missing, unknown = put_into(
                self.module,
                entries,
                is_whole=not partial,
                is_loaded=self._is_kept if partial else lambda module: True,
            )
        if partial:
            here = self._here(missing)
            missing = [key for key in missing if key in here]
        if strict and (missing or unknown):
            raise SMPError(
                f"load_state_dict: missing keys {missing[:5]}, unknown keys {unknown[:5]} "
                "(strict=False ignores both)"
            )
        return _IncompatibleKeys(missing, unknown)


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
