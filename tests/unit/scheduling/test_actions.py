"""Actions as text and back."""

from __future__ import annotations

import pytest

from smp_lite.plan.step.actions import Action, ActionKind


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, ActionKind.FORWARD, 0), "2F0"),
        (Action(0, ActionKind.FORWARD, 3, visit=1), "0F3.1"),
        (Action(12, ActionKind.BACKWARD, 34, visit=5), "12B34.5"),
        (Action(0, ActionKind.SEND_FORWARD, 3, value=12, peer=1), "0SEND_F3:v12>1"),
        (Action(1, ActionKind.RECV_FORWARD, 3, value=12, peer=0), "1RECV_F3:v12<0"),
        (Action(1, ActionKind.SEND_BACKWARD, 3, visit=2, value=0, peer=0), "1SEND_B3.2:v0>0"),
        (Action(0, ActionKind.RECV_BACKWARD, 3, value=0, peer=1), "0RECV_B3:v0<1"),
    ],
)
def test_text_round_trip(action: Action, text: str) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ", "2F0.", "0SEND_F3:v12", "2F-1"])
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action: write for example 2F0"):
        Action.parse(text)
