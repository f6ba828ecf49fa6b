"""State dicts of an optimizer of which each rank keeps a part.

They name parameters by their position in the whole model, as a plain optimizer's do, so a whole one (gathered
over the mp group) loads into a plain optimizer and the other way round. A rank's own part is marked, and with
sharded optimizer state says which shard it is; ``gather_if_shard`` puts the shards of all replicas side by
side, as SMP does (API reference, ``DistributedOptimizer.local_state_dict``).

In half precision the masters and the loss scale are in it too, under the names that SMP's files have. An
optimizer's state without masters is none of such a job: what it has seen are other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from ...comm.groups.axis import Axis
from ...errors import SMPError
from ...nn.guarding import plain
from ..half.loss_scaling import LossScaling
from .groups import Groups
from .own_parameters import PARTIAL_KEY, partial_mark
from .split import whole_state

if TYPE_CHECKING:
    from ...session import Session

__all__ = ["HALF_KEYS", "MASTERS", "ReadState"]

MASTERS = "fp32_from_fp16"
HALF_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", MASTERS)
"""What half precision adds to a state dict."""


class ReadState:
    """The state of one wrapped optimizer on this rank.

    Args:
        session: the job's.
        optimizer: the inner one, which may be no optimizer of torch.
        groups: of it.
        torch_groups: gives those of the optimizer of torch.
        half: the session's type of parameters; None: they have their own.
        scaling: of fp16.
        axis: over which the state is sharded; None: it is not.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        groups: Groups,
        torch_groups: Callable[[], list[dict[str, Any]]],
        half: torch.dtype | None,
        scaling: LossScaling | None,
        axis: Axis | None,
    ) -> None:
        self._session, self._optimizer, self._groups = session, optimizer, groups
        self._torch_groups, self._half, self._scaling, self._axis = torch_groups, half, scaling, axis
        self.pending: dict[str, Any] | None = None
        self.loaded_masters = False  # since the optimizer's last step

    # Reading ------------------------------------------------------------------------------------------------

    def local(self, *, gather_if_shard: bool) -> dict[str, Any]:
        """This rank's part; collective over the replicas where shards are gathered."""
        own = self._local()
        if self._axis is None:
            return {**own, PARTIAL_KEY: self.own_mark}
        if gather_if_shard:
            assert self._session.world is not None
            keys = [key for key in ("state", MASTERS) if key in own]
            shards = self._session.world.gather(
                to_cpu({key: own[key] for key in keys}), "RDP", "optimizer.local_state_dict"
            )
            if shards is not None:
                own.update({key: [shard[key] for shard in shards] for key in keys})
        return {**own, PARTIAL_KEY: self.own_mark}

    @property
    def own_mark(self) -> bool | str:
        """What marks this rank's own part."""
        if self._axis is None:
            return partial_mark(self._session)
        return f"shard {self._axis.index} of {self._axis.size} of the optimizer's state"

    def check_readable(self) -> None:
        """
        Raises:
            SMPError: the first step has still to put it in place, or to make it.
        """
        if self.pending is not None:
            raise SMPError(
                "the optimizer's state was loaded and waits for the first step, which puts it in place: run "
                "a step before asking for the state"
            )
        if (self._half is not None or self._axis is not None) and not self._session.model.partitioned:
            raise SMPError(
                "the optimizer's state was asked for before the first step, which makes its master weights "
                "and shards: run a step first"
            )

    def _local(self) -> dict[str, Any]:
        self.check_readable()
        is_cut = self._session.model.partitioned
        stand_ins = self._groups.stand_ins
        if stand_ins is not None and self.loaded_masters and not stand_ins.are_followed():
            raise _other_masters()
        with self._groups.here():
            state: dict[str, Any] = _plain(self._optimizer.state_dict())
        if is_cut and "param_groups" in state:
            if own := self._own_keys(state):
                raise SMPError(
                    f"optimizer.state_dict(): that of {type(self._optimizer).__name__} has {own[0]!r} beside "
                    "'state' and 'param_groups', which each rank would have for its own parameters, and "
                    "nobody can bring together: keep it in a group (group['count']) or by parameter "
                    "(optimizer.state[parameter]), or save it beside the state"
                )
            renumber = dict(enumerate(position for order in self._groups.positions() for position in order))
            state = {
                **state,
                "state": {renumber[i]: value for i, value in state["state"].items()},
                "param_groups": [
                    {**group, "params": [renumber[i] for i in group["params"]]}
                    for group in state["param_groups"]
                ],
            }
        return {**state, **self._of_half()}

    def _own_keys(self, state: Mapping[str, Any]) -> list[str]:
        """Keys of the optimizer's class beside torch's; none where this rank has all that they are about."""
        session = self._session
        has_peers = session.stage_peers is not None and not session.stage_peers.is_alone
        if session.num_stages == 1 and not has_peers and not session.shard_axes and self._axis is None:
            return []
        return sorted(map(str, state.keys() - {"state", "param_groups", PARTIAL_KEY, *HALF_KEYS}))

    def check_followed(self) -> None:
        """Stand-ins follow parameters that were changed.

        Raises:
            SMPError: masters were loaded, and are not those of the model's parameters.
        """
        stand_ins = self._groups.stand_ins
        assert stand_ins is not None
        if stand_ins.follow() and self.loaded_masters:
            self.loaded_masters = False
            raise _other_masters()
        self.loaded_masters = False

    def _of_half(self) -> dict[str, Any]:
        if self._half is None:
            return {}
        stand_ins = self._groups.stand_ins
        assert stand_ins is not None
        masters = {}
        for order in self._groups.positions():
            for position in order:
                parameter = self._groups.parameter_at(position)
                stand_in = stand_ins.of(parameter)
                if stand_in is not parameter and stand_in.dtype != parameter.dtype:
                    masters[position] = stand_ins.value_of(parameter)
        scale: dict[str, Any] = dict.fromkeys(HALF_KEYS)
        if self._scaling is not None:
            scale.update(self._scaling.state_dict())
        return {**scale, MASTERS: masters}

    def whole(self, *, gather_to_rank0: bool) -> dict[str, Any]:
        """The whole state; collective over the mp group, and over the replicas where it is sharded."""
        local = self._local()
        stepped_at = self._groups.stepped_at
        if "state" in local:
            local["state"] = {i: whole_state(stepped_at(i), value) for i, value in local["state"].items()}
        if MASTERS in local:
            local[MASTERS] = {
                i: whole_state(stepped_at(i), {MASTERS: value})[MASTERS]
                for i, value in local[MASTERS].items()
            }
        if "param_groups" not in local:
            if self._session.replica_size == 1:
                return local
            raise SMPError(
                f"{type(self._optimizer).__name__}.state_dict() is not that of an optimizer of torch, so the "
                "stages' parts cannot be put together: save local_state_dict()"
            )
        world = self._session.world
        if world is None or not self._session.model.partitioned:
            return local if world is None or not gather_to_rank0 or world.group_rank("MP") == 0 else {}
        collect = world.gather if gather_to_rank0 else world.exchange
        parts = collect(to_cpu(local), "PP", "optimizer.state_dict")
        if parts is None or (gather_to_rank0 and world.group_rank("MP") != 0):
            return {}
        merged = {
            # By position alone: what is no parameter of the model has state on every stage.
            key: dict(sorted((item for part in parts for item in part[key].items()), key=itemgetter(0)))
            for key in ("state", MASTERS)
            if key in local
        }
        groups = []
        everywhere = self._groups.positions(here_only=False)
        for number, (lists, positions) in enumerate(zip(self._groups.lists(), everywhere, strict=True)):
            # What an optimizer counts for a group, it counts where the group has parameters.
            of_parts = [part["param_groups"][number] for part in parts]
            group = next((found for found in of_parts if found["params"]), of_parts[0])
            groups.append({**group, **lists, "params": positions})
        return {**local, **merged, "param_groups": groups}


def _plain(value: Any) -> Any:
    """The same nest with ordinary tensors for pieces, which the optimizer's own will be again."""
    if isinstance(value, torch.Tensor):
        return plain(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def to_cpu(value: Any) -> Any:
    """The same nest with tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(item) for item in value)
    return value


def _other_masters() -> SMPError:
    return SMPError(
        "the master weights that optimizer.load_state_dict has loaded are not those of the model's "
        "parameters: load the model's state of the same moment too, or call "
        "optimizer.reload_model_params() after loading, to go on from the parameters"
    )
