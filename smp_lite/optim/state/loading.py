"""Loading what :mod:`.dicts` has read: a whole state, this rank's own part of it, or one of several
shards.

Before partition a rank's parameters are not known, and torch would round a state to the type of
half-precision parameters; so parts, and states of stand-ins, wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import SMPError
from .dicts import HALF_KEYS, MASTERS, ReadState
from .own_parameters import PARTIAL_KEY, check_mark
from .split import state_part

__all__ = ["OptimizerState"]

_OF_SCHEDULERS = frozenset(
    ["params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"]
)
_LOAD = "optimizer.load_state_dict"


class OptimizerState(ReadState):
    """Reads and writes the state of one wrapped optimizer on this rank."""

    def load(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state, or this rank's own part of the same partition; also before partition."""
        self._check_kind(state_dict)
        state_dict = self._own_shard(state_dict)
        if "param_groups" not in state_dict:
            self._load_foreign(state_dict)
            return
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        sizes = [len(positions) for positions in saved]
        own_sizes = [len(lists["params"]) for lists in self._groups.lists()]
        if len(sizes) != len(own_sizes):
            raise ValueError(
                f"{_LOAD}: {len(sizes)} parameter groups, but the optimizer has "
                f"{len(own_sizes)}: build it with the same groups"
            )
        is_part = bool(state_dict.get(PARTIAL_KEY)) and sizes != own_sizes
        if not is_part and sizes != own_sizes:
            raise ValueError(
                f"{_LOAD}: parameter groups of sizes {sizes}, but the optimizer's have "
                f"{own_sizes}: it was saved from an optimizer of another model. (Where tensor parallelism "
                "replaces a Hugging Face GPT-2, three parameters stand for each fused c_attn: such state "
                "moves only between jobs that do so. Weights move everywhere: load_optimizer=False)"
            )
        self._check_settings(state_dict["param_groups"])
        self._check_own_keys(state_dict)
        waits = is_part or self._half is not None or self._axis is not None
        if self._session.model.partitioned:
            self._load(state_dict, is_part)
            self.pending = None  # of an earlier load, which the first step could not put in place
        elif waits:
            for group, settings in zip(self._torch_groups(), state_dict["param_groups"], strict=True):
                kept = settings.keys() - {"params", "param_names"}
                group.update({key: settings[key] for key in kept})
            self.pending = {"state_dict": state_dict, "is_part": is_part}
        else:
            state = state_dict["state"]
            if not state_dict.get(PARTIAL_KEY):
                at = self._groups.stepped_at
                state = {i: state_part(at(i), value) for i, value in state.items()}
            self._load_into_optimizer(state_dict, state, state_dict["param_groups"])

    def _check_settings(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError where settings are those of an optimizer of another kind.

        A later torch may know more of them, and a scheduler adds its own: it takes both that some are missing
        and that some are unknown.
        """
        defaults = getattr(self._optimizer, "defaults", None)
        if not isinstance(defaults, Mapping):
            return
        for group, own in zip(saved, self._torch_groups(), strict=True):
            missing = defaults.keys() - group.keys()
            unknown = group.keys() - defaults.keys() - own.keys() - _OF_SCHEDULERS
            if missing and unknown:
                raise ValueError(
                    f"{_LOAD}: the state was saved from an optimizer of another kind: it has the settings "
                    f"{sorted(unknown)}, and not {sorted(missing)}, which {type(self._optimizer).__name__} "
                    "has. Build the same kind, or begin with a new one (load_optimizer=False)"
                )

    def _check_own_keys(self, state_dict: Mapping[str, Any]) -> None:
        """Raises SMPError where the optimizer reads more of a state dict than each rank has a part of."""
        kind = type(self._optimizer)
        reads_own = not kind.load_state_dict.__module__.startswith(("torch.", __name__.partition(".")[0]))
        hooks = getattr(self._optimizer, "_optimizer_load_state_dict_pre_hooks", None)
        if (reads_own or hooks) and (own := self._own_keys(state_dict)):
            raise SMPError(
                f"{_LOAD}: the state has {own[0]!r} beside 'state' and 'param_groups', which "
                f"{kind.__name__}.load_state_dict, or a hook of it, may read, and which is about the whole "
                "model, of which this rank steps a part: leave it out, or use partitions=1"
            )

    def _check_kind(self, state_dict: Mapping[str, Any]) -> None:
        """Raises SMPError where a state is of a job of another precision."""
        has_masters = MASTERS in state_dict
        saved = "fp32"
        if has_masters:
            saved = "bf16" if state_dict.get("loss_scaler") is None else "fp16"
        own = "fp32"
        if self._half is not None:
            own = "fp16" if self._half is torch.float16 else "bf16"
        if saved != own:
            raise SMPError(
                f"{_LOAD}: the state is of a job in {saved}, and this one trains in {own}: the optimizer "
                f"goes on from other weights there. Train in {saved} as before, or load the model alone "
                "(load_optimizer=False) and begin with a new optimizer"
            )

    def _own_shard(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Of shards that lie side by side, this rank's."""
        mark = state_dict.get(PARTIAL_KEY)
        shards = state_dict.get("state")
        own, size = self.own_mark, 1 if self._axis is None else self._axis.size
        if isinstance(shards, list):
            if self._axis is None or len(shards) != size:
                raise ValueError(
                    f"{_LOAD}: the state has {len(shards)} shards, one for each replica that it was saved "
                    "on, and here the optimizer's state is "
                    f"{'whole' if self._axis is None else f'in {size}'}: load a whole state "
                    "(save_checkpoint(..., partial=False), optimizer.state_dict())"
                )
            index = self._axis.index
            picked = {key: state_dict[key][index] for key in ("state", MASTERS) if key in state_dict}
            return {**state_dict, **picked, PARTIAL_KEY: own}
        if self._axis is None:
            check_mark(self._session, mark, _LOAD)
        elif mark and mark != own:
            theirs = "the whole state of its part" if mark is True else f"{mark}"
            raise ValueError(
                f"{_LOAD}: it is {theirs}, and this rank keeps {own}: let each rank load its own "
                "(gather_if_shard=False), or load a whole state (optimizer.state_dict())"
            )
        return state_dict

    def _load_foreign(self, state: dict[str, Any]) -> None:
        """Of an object that is no optimizer of torch, whose state has a form of its own."""
        if not self._session.model.partitioned:
            self.pending = {"foreign": state}
            return
        with self._groups.here():
            self._optimizer.load_state_dict({key: v for key, v in state.items() if key != PARTIAL_KEY})

    def load_pending(self) -> None:
        """Puts what was loaded before partition in place; called once by the model."""
        if not self.pending:
            return
        pending, self.pending = self.pending, None
        if "foreign" in pending:
            self._load_foreign(pending["foreign"])
            return
        with self._groups.here():
            own = self._optimizer.state_dict()["param_groups"]
        # Settings count from when they were loaded: a scheduler may have changed them since.
        state_dict = pending["state_dict"]
        saved = [group["params"] for group in state_dict["param_groups"]]
        saved += self._added_since(len(saved), is_part=pending["is_part"])
        groups = [{**settings, "params": params} for settings, params in zip(own, saved, strict=True)]
        self._load({**state_dict, "param_groups": groups}, pending["is_part"])

    def _added_since(self, count: int, *, is_part: bool) -> list[list[int]]:
        """Positions in groups that the script has added to those that were loaded; they have no state yet."""
        if is_part:
            return self._groups.positions()[count:]
        sizes = [len(lists["params"]) for lists in self._groups.lists()]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [list(range(start, start + n)) for start, n in zip(starts, sizes, strict=True)][count:]

    def _load(self, state_dict: dict[str, Any], is_part: bool) -> None:
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        order = self._groups.positions()
        if is_part and saved != order:
            raise ValueError(
                f"{_LOAD}: this rank has the parameters {order} (positions in the "
                f"whole model), but the part is for {saved}: it was saved on another rank or with another "
                "partition. Load the whole state_dict() instead"
            )
        number = {p: i for i, p in enumerate(position for positions in order for position in positions)}
        is_whole = not state_dict.get(PARTIAL_KEY)
        with self._groups.here():
            self._load_here(state_dict, number, is_whole=is_whole)
        if self._half is not None:
            self._load_half(state_dict, is_whole=is_whole)

    def _load_here(self, state_dict: dict[str, Any], number: dict[int, int], *, is_whole: bool) -> None:
        start = 0
        groups = []
        for group, own in zip(state_dict["param_groups"], self._torch_groups(), strict=True):
            count = len(own["params"])
            names = {"param_names": own["param_names"]} if "param_names" in own else {}
            groups.append({**group, **names, "params": list(range(start, start + count))})
            start += count
        here = {int(i): value for i, value in state_dict["state"].items() if int(i) in number}
        if is_whole:
            here = {i: state_part(self._groups.stepped_at(i), value) for i, value in here.items()}
        state = {number[i]: value for i, value in here.items()}
        self._load_into_optimizer(state_dict, state, groups)

    def _load_into_optimizer(
        self, state_dict: Mapping[str, Any], state: Mapping[int, Any], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """With what else is in the state dict: its class, or a hook, may read it."""
        others = {key: value for key, value in state_dict.items() if key not in (PARTIAL_KEY, *HALF_KEYS)}
        self._optimizer.load_state_dict({**others, "state": state, "param_groups": groups})

    def _load_half(self, state_dict: dict[str, Any], *, is_whole: bool) -> None:
        own = {i: self._groups.stepped_at(i).detach() for i in self._of_half()[MASTERS]}
        saved = {int(i): value for i, value in state_dict[MASTERS].items()}
        if missing := sorted(own.keys() - saved.keys()):
            raise ValueError(
                f"{_LOAD}: there is no master weight of the parameters {missing[:5]} (positions in the whole "
                "model): they did not train where it was saved. Freeze the same ones"
            )
        with torch.no_grad():
            for position, master in own.items():
                value = saved[position]
                if is_whole:
                    at = self._groups.stepped_at(position)
                    value = state_part(at, {MASTERS: value})[MASTERS]
                if value.shape != master.shape:
                    raise ValueError(
                        f"{_LOAD}: the master weight of parameter {position} has shape {list(value.shape)}, "
                        f"and here it is {list(master.shape)}: it was saved from another model"
                    )
                master.copy_(value)
        self.loaded_masters = True
        if self._scaling is not None:
            self._scaling.load_state_dict(state_dict)
