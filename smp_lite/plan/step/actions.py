"""What a rank does in one step: a list of actions, as data.

A schedule is a list of actions for each stage. Forward and backward actions run one *segment* of one
microbatch (see :mod:`.segments`); the lowering pass adds the transfers. Nothing else happens in a step,
so printing the lists is reading the program. The notation follows
``torch.distributed.pipelining``: ``2F0`` is stage 2, forward, microbatch 0. A stage that a microbatch
visits more than once has several segments, and the later visits carry their number: ``0F3.1``.
A transfer names the value and the other stage: ``0SEND_F3:v12>1``, ``1RECV_F3:v12<0``.

``W`` is the part of a backward that nobody waits for: the gradients of parameters, of those modules that can
give them later than the gradients of their inputs (zero bubble: Qi et al., "Zero Bubble Pipeline
Parallelism", 2023). A list that has a ``W`` for a backward has it after that backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import NamedTuple


class ActionKind(StrEnum):
    """The seven things a stage can do."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"  # gradients of parameters that the backward has left for later
    SEND_FORWARD = "SEND_F"  # an activation leaves
    RECV_FORWARD = "RECV_F"  # the receive of an activation is posted
    SEND_BACKWARD = "SEND_B"  # the gradient of a received activation leaves
    RECV_BACKWARD = "RECV_B"  # the receive of a gradient is posted

    # An Enum's own hash is a call of Python, and every look-up of an action makes one.
    __hash__ = str.__hash__


COMPUTE_KINDS = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT})
SEND_KINDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECV_KINDS = frozenset({ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD})

_PATTERN = re.compile(
    r"(?P<stage>\d+)(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|F|B|W)(?P<microbatch>\d+)"
    r"(?:\.(?P<visit>\d+))?(?::v(?P<value>\d+)[<>](?P<peer>\d+))?"
)


class Action(NamedTuple):
    """One entry of a stage's list; a tuple, since a large step has millions of them.

    ``visit`` numbers the segments that one microbatch has on this stage, from 0. ``value`` and ``peer``
    (a stage) are set for transfers only.
    """

    stage_index: int
    kind: ActionKind
    microbatch_index: int
    visit: int = 0
    value: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage_index}{self.kind.value}{self.microbatch_index}"
        if self.visit:
            text += f".{self.visit}"
        if self.value is not None:
            arrow = "<" if self.kind in RECV_KINDS else ">"
            text += f":v{self.value}{arrow}{self.peer}"
        return text

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str(action)``."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action: write for example 2F0, 0B3.1, 0SEND_F3:v12>1")
        value, peer = match["value"], match["peer"]
        return cls(
            stage_index=int(match["stage"]),
            kind=ActionKind(match["kind"]),
            microbatch_index=int(match["microbatch"]),
            visit=int(match["visit"] or 0),
            value=None if value is None else int(value),
            peer=None if peer is None else int(peer),
        )


new_action: Callable[[tuple[int, ActionKind, int, int, int | None, int | None]], Action]
new_action = partial(tuple.__new__, Action)  # type: ignore[assignment]
"""An action of all six fields, without the call of Python that a NamedTuple's own constructor makes."""
