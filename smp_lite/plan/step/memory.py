"""How much memory each stage needs, and when: pure arithmetic over the lists of actions.

An action changes what its stage holds by as many bytes whatever the schedule, since a microbatch's tensors
are its own. So the memory of a stage at any moment is a sum along its list, and its peak is found without
running anything. What each action does to memory (:class:`ActionMemory`) is measured elsewhere.

One thing is not a sum: what is sent stays until the stage sends again after it has computed, since only a
send looks which earlier ones have left. A receiver that is late keeps the sender's memory for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..text_table import text_table
from ..units import human_bytes
from .actions import COMPUTE_KINDS, SEND_KINDS, Action

__all__ = ["ActionMemory", "StageMemory", "StagePeak", "format_memory_table", "step_peak"]


@dataclass(frozen=True, slots=True)
class ActionMemory:
    """What one action does to the memory of its stage, in bytes.

    ``kept`` is what its end leaves alive more than its beginning found (less: negative), gradients of
    parameters apart, which are ``gradients``. ``peak`` is the most that is alive while it runs, above its
    beginning.
    """

    kept: int = 0
    gradients: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class StagePeak:
    """The moment of a step at which a stage holds most, and what the step leaves behind, in bytes.

    ``kept`` and ``gradients`` are held when ``action`` begins (None: the list is empty), ``running`` is what
    it needs on top.
    """

    action: Action | None
    kept: int
    gradients: int
    running: int
    kept_at_end: int
    gradients_at_end: int


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one rank of a stage holds at its peak, in bytes, and when that is.

    Args:
        stage_index: the stage.
        when: the action that runs then without its stage, such as ``B3``, or another part of a training step.
        parameters: with the buffers.
        gradients: of the parameters, with the buckets of their reduction.
        optimizer: the optimizer's state.
        batch: the batch and what is made of it on every rank, and what the step function returned.
        kept: what forwards have left for their backwards, and messages.
        running: what runs at the peak needs that on top.
        graphs: what graphs of a device hold for good beside all this.
        not_counted: calls of which nobody knows what they keep: the figures are lower bounds.
    """

    stage_index: int
    when: str
    parameters: int
    gradients: int
    optimizer: int
    batch: int
    kept: int
    running: int
    not_counted: tuple[str, ...] = ()
    graphs: int = 0

    @property
    def total(self) -> int:
        always = self.parameters + self.optimizer + self.batch + self.graphs
        return always + self.gradients + self.kept + self.running

    @property
    def total_text(self) -> str:
        """``3.0 GiB``; ``> 3.0 GiB`` where something is not counted."""
        return f"{'> ' if self.not_counted else ''}{human_bytes(self.total)}"


def step_peak(
    actions: Sequence[Action],
    memory_of: Callable[[Action], ActionMemory],
    *,
    kept: int = 0,
    gradients: int = 0,
) -> StagePeak:
    """Finds the peak of one stage's list.

    Args:
        actions: the list, transfers included.
        memory_of: each action's effect; a send's is that of a message that leaves at once.
        kept: what the stage holds for the step when the list begins.
        gradients: those that are there by then.
    """
    sent = 0
    computed = False  # since the last send
    peak = StagePeak(None, kept, gradients, 0, 0, 0)
    most = kept + gradients
    for action in actions:
        memory = memory_of(action)
        if action.kind in SEND_KINDS and computed:
            sent, computed = 0, False
        held = kept + sent
        if held + gradients + memory.peak > most:
            most = held + gradients + memory.peak
            peak = StagePeak(action, held, gradients, memory.peak, 0, 0)
        kept += memory.kept
        gradients += memory.gradients
        if action.kind in SEND_KINDS:
            sent += max(0, -memory.kept)
        elif action.kind in COMPUTE_KINDS:
            computed = True
    return StagePeak(peak.action, peak.kept, peak.gradients, peak.running, kept, gradients)


def format_memory_table(stages: Sequence[StageMemory]) -> str:
    """A plain text table, one row a stage; its last columns add up to the peak. No newline at the end."""
    parts = ["parameters", "gradients", "optimizer", "batch", "kept", "running"]
    if any(stage.graphs for stage in stages):
        parts.append("graphs")
    rows = [
        (
            str(stage.stage_index),
            stage.total_text,
            stage.when,
            *[human_bytes(getattr(stage, part)) for part in parts],
        )
        for stage in stages
    ]
    return text_table(("stage", "peak", "when", *parts), rows, left={"when"})
