"""Calls that repeat those of an earlier microbatch are the same commands as if recorded in full.

And where a microbatch does anything else than the one before, it is noticed: each of these differs in one
thing, from its third microbatch on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from smp_lite.record.step.recorder import Recorder
from smp_lite.record.step.repeated import RepeatedCalls
from tests.models import CASES
from tests.sampling import one_in
from tests.transparency.comparison import compare
from tests.transparency.conftest import OpenSession
from tests.transparency.schedules.differing import MICROBATCHES, STEPS, assert_equal_to_plain

NAMES = [name for name, case in CASES.items() if case.available and not case.random_in_blocks]


def _written(recorder: Recorder) -> tuple[Any, ...]:
    """What a microbatch's recording holds, without the tensors."""
    recording = recorder.recording
    assert recording is not None
    commands = [
        (
            command.index,
            command.stage_index,
            command.label,
            command.sources,
            command.ambient,
            command.epoch,
            command.function,
            None if command.module is None else recorder.placement.name(command.module),
            command.seed_key,
            command.touches,
            command.must_stay,
            command.outputs,
            command.changes,
            command.unit,
            command.meta,
            [leaf for leaf in command.arguments.leaves if isinstance(leaf, bool | int | float | str)],
            command.arguments.positions,
            [None if tensor is None else tuple(tensor.shape) for tensor in command.arguments.tensors],
        )
        for command in recording.commands
    ]
    return (recording.digest, recording.structure_digest, recording.draws, recording.links, commands)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[list[Any], list[Any]]]:
    """``watch(repeats)`` gives what is recorded from now on, and the calls that were known by then."""

    def start(repeats: bool) -> tuple[list[Any], list[Any]]:
        recordings: list[Any] = []
        known: list[Any] = []
        monkeypatch.undo()
        end, write = Recorder.end_microbatch, RepeatedCalls.write

        def noted(recorder: Recorder) -> None:
            recordings.append(_written(recorder))
            end(recorder)

        def counted(calls: RepeatedCalls, call: Any, *args: Any) -> Any:
            known.append(call[0].command.label)
            return write(calls, call, *args)

        monkeypatch.setattr(Recorder, "end_microbatch", noted)
        monkeypatch.setattr(RepeatedCalls, "write", counted)
        if not repeats:
            monkeypatch.setattr(RepeatedCalls, "find", lambda *_: None)
        return recordings, known

    return start


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_the_commands_are_those_of_a_full_recording(
    name: str, open_session: OpenSession, watch: Callable[[bool], tuple[list[Any], list[Any]]]
) -> None:
    found = []
    for repeats in (False, True):
        recordings, known = watch(repeats)
        open_session(2, "auto", pipeline="interleaved")
        compare(CASES[name], "auto")
        found.append(recordings)
    assert found[0] == found[1]
    assert len(found[0]) > MICROBATCHES
    if name.startswith("gpt"):
        assert known


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("name", STEPS)
def test_what_differs_is_noticed(
    name: str, open_session: OpenSession, watch: Callable[[bool], tuple[list[Any], list[Any]]]
) -> None:
    found = []
    for repeats in (False, True):
        recordings, _ = watch(repeats)
        open_session(2, "manual", auto_partition=False, default_partition=0)
        assert_equal_to_plain(name, [range(MICROBATCHES)] * 2)
        found.append(recordings)
    for full, repeated in zip(*found, strict=True):
        assert [row[-7:] for row in full[-1]] == [row[-7:] for row in repeated[-1]]  # from the outputs on
