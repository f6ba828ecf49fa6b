"""A step whose plan is known runs while its later microbatches are still being recorded.

When the first microbatch has been recorded, and a step of as many microbatches like it has run before, the
list of actions is known. All ranks compare that first microbatch, and start. From then on recording and
running take turns on each rank: after one microbatch, then two, then four, the list goes on until its next
action would have to wait, or belongs to a microbatch that has not been recorded. So a rank records where it
would be idle, and several microbatches in a row, which takes a third of the time of one by one
(:meth:`.RunningList.is_due`).

Nothing is taken for granted of later microbatches. One that turns out different, or that looks at data,
*cuts* the list: of it and those after it only the transfers are made, of zeros, since other ranks may have
posted their ends; what had begun runs to its end, and the rest is planned as if nothing had been known. When
a list ends the ranks compare all that they have recorded, and where it was cut, so a script that does
something else on one rank is an error on all of them, as ever, and leaves nothing behind. A step function
that fails in a later microbatch makes the transfers in the same way before it tells the others.

Steps do not run ahead where code within backwards could see what is recorded after it, where ranks share a
stage or parameters are sharded, and in those few steps in which the batch is compared.
"""

from __future__ import annotations

from ...plan.step.actions import Action
from ...record.commands.recording import Recording
from ...record.values.placed import TensorMeta

__all__ = ["NOT_RECORDED", "NOT_RESUMED", "Ahead"]

NOT_RECORDED = "the next microbatch has not been recorded"
NOT_RESUMED = "the list has not been resumed"
"""What a list waits for between bursts, if its next action could run."""


class Ahead:
    """How far the recording of a step has come whose list runs already; shared by the stages played here.

    Args:
        first: the recording of the first microbatch, which the others must repeat.
        num_microbatches: how many there will be.

    Attributes:
        num_recorded: microbatches that the list may run.
        is_resumed: whether actions may compute now; between them it is recorded.
        cut: from this microbatch on only transfers are made; past the last one: all of them run.
    """

    def __init__(self, first: Recording, num_microbatches: int) -> None:
        self.first = first
        self.num_microbatches = self.cut = num_microbatches
        self.num_recorded = 1
        self.is_resumed = False

    def lacks(self, action: Action) -> bool:
        """Whether the action's microbatch may still be recorded."""
        return self.num_recorded <= action.microbatch_index < self.cut

    def leaves_out(self, action: Action) -> bool:
        """Whether nothing is computed for the action's microbatch: transfers are made of zeros."""
        return action.microbatch_index >= self.cut

    def meta(self, value: int) -> TensorMeta:
        """Of a value of any of the microbatches."""
        return self.first.values[value].meta

    def is_repeated_by(self, recording: Recording) -> bool:
        """Whether a complete recording is like the first."""
        first = self.first
        return recording.digest == first.digest and recording.plan_key() == first.plan_key()
