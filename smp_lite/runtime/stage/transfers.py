"""What one stage sends and receives in one step.

Receives are posted where the list says; what is posted is found in the states of the microbatches until an
action takes it. A stage that gives up, or leaves microbatches out, goes on with transfers of zeros: other
stages have posted their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ...comm.wires.wire import Transfer, Wire
from ...plan.step.actions import COMPUTE_KINDS, RECV_KINDS, Action, ActionKind
from ...record.values.placed import TensorMeta
from .ahead import Ahead
from .microbatch import MicrobatchState
from .starts import sum_latest_first

__all__ = ["Transfers"]


class Transfers:
    """The transfers of one stage.

    Args:
        stage_index: which stage.
        wire: to the other stages.
        states: of the microbatches of the step.
        may_change: whether a value's memory may change before it has been sent, so that a copy is.
    """

    def __init__(
        self,
        stage_index: int,
        wire: Wire,
        states: Mapping[int, MicrobatchState],
        may_change: Callable[[torch.Tensor], bool],
    ) -> None:
        self._may_change = may_change
        self.stage_index = stage_index
        self.wire = wire
        self._states = states
        self._sends: list[tuple[Action, Transfer]] = []

    # Actions ----------------------------------------------------------------------------------------------

    def send_forward(self, action: Action, state: MicrobatchState) -> None:
        value, peer = action.value, action.peer
        assert value is not None and peer is not None
        tensor = state.data[value]
        if self._may_change(tensor):
            tensor = tensor.detach().clone()
        self._send(action, tensor, state.recording.values[value].meta, peer)
        state.sent.add((value, peer))
        state.used(value)

    def receive_forward(self, action: Action, state: MicrobatchState) -> None:
        value, peer = action.value, action.peer
        assert value is not None and peer is not None
        state.arriving[value] = self.wire.receive(state.recording.values[value].meta, peer)
        state.sent.add((value, self.stage_index))

    def send_backward(self, action: Action, state: MicrobatchState) -> None:
        value, peer = action.value, action.peer
        assert value is not None and peer is not None
        gradient = sum_latest_first(state.outgoing.pop(value))
        self._send(action, gradient, state.recording.values[value].meta, peer)

    def receive_backward(self, action: Action, state: MicrobatchState) -> None:
        value, peer = action.value, action.peer
        assert value is not None and peer is not None
        transfer = self.wire.receive(state.recording.values[value].meta, peer)
        state.arriving_gradients[value, peer] = transfer

    def _send(self, action: Action, tensor: torch.Tensor, meta: TensorMeta, peer: int) -> None:
        """Starts a send, and lets go of what earlier ones have sent."""
        self._sends.append((action, self.wire.send(tensor, meta, peer)))
        self._sends[:] = [(sent, transfer) for sent, transfer in self._sends if not transfer.done()]

    # Waiting ----------------------------------------------------------------------------------------------

    def sends_end(self) -> Iterator[str]:
        """Yields until all that was sent has arrived."""
        for action, transfer in self._sends:
            while not transfer.done():
                yield f"stage {action.peer} has not received {action}"
        self._sends.clear()

    def receives_end(self) -> Iterator[str]:
        """Yields until all that was posted has arrived."""
        pending = [transfer for state in self._states.values() for transfer in state.receives()]
        for transfer in pending:
            while not transfer.done():
                yield f"a value for stage {self.stage_index}, which has given up, has not arrived"

    def under_way(self) -> list[Transfer]:
        """Transfers that have not ended; their memory must outlive them."""
        posted = [transfer for _, transfer in self._sends]
        for state in self._states.values():
            posted += state.receives()
        return [transfer for transfer in posted if not transfer.done()]

    def forget(self) -> None:
        """The step has ended; what has not is in :meth:`under_way`."""
        self._sends.clear()

    # Without computing ------------------------------------------------------------------------------------

    def given_up(self, actions: Sequence[Action], ahead: Ahead | None) -> Iterator[str]:
        """Of the rest of a list what the other stages count on: zeros for what is not there."""
        yield from self.receives_end()
        for action in actions:
            if action.kind not in COMPUTE_KINDS:
                yield from self.without_need(action, ahead)

    def without_need(self, action: Action, ahead: Ahead | None) -> Iterator[str]:
        """A transfer that nobody here needs.

        Both ends of a transfer stand side by side in the order of all actions (:mod:`..plan.step.lowering`),
        so each receive can be waited for as soon as it is posted, and its memory freed.
        """
        value, peer = action.value, action.peer
        assert value is not None and peer is not None
        state = self._states.get(action.microbatch_index)
        if ahead is not None:
            meta = ahead.meta(value)
        else:
            assert state is not None
            meta = state.recording.values[value].meta
        if action.kind in RECV_KINDS:
            transfer = self.wire.receive(meta, peer)
            while not transfer.done():
                yield f"{action} for stage {self.stage_index}, which does not need it, has not arrived"
            return
        tensor = None
        if state is not None and action.kind is ActionKind.SEND_FORWARD:
            tensor = state.data.get(value)
        if tensor is None:
            tensor = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        self._sends.append((action, self.wire.send(tensor, meta, peer)))
