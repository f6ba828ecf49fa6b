"""What the mp ranks compare of a step that each has recorded: all of it must be the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...comm.groups.peers import Check
from ...record.commands.recording import Recording, describe_command

__all__ = ["ALL", "CUT_AT", "LOOKS", "ONE", "checks"]

_ONE_OPTIMIZER = (
    "Each rank steps the parameters of its stage, so all must do the same with the optimizer: leave out "
    "steps, set rates and call schedulers by what all ranks know (the results of a step), never by smp.rank()"
)
ALL, LOOKS, ONE, CUT_AT = 0, 1, 2, 3
"""Where a rank stands when it compares: at the end of recording, at a look at data, after one microbatch, or
(``CUT_AT + m``) at microbatch m, which is not like those before (:mod:`..stage.ahead`)."""


def checks(
    recordings: Mapping[int, Recording],
    where: int,
    contents: Sequence[tuple[tuple[int, ...], int]],
    inputs: tuple[int, Callable[[], list[str]]],
    random_state: int,
    between: tuple[int, Callable[[], list[str]]],
) -> list[Check]:
    """What is compared.

    Args:
        recordings: by microbatch.
        where: this rank stands.
        contents: shapes and digests of tensors of the script's own that its calls read.
        inputs: a digest of the batch and its description; 0: it is not compared.
        random_state: of the start, if the step function has drawn random numbers; 0: it is not compared.
        between: a digest of what the script has done between steps, and its description.
    """

    def calls() -> list[str]:
        return [
            f"recorded call {number} of microbatch {m} = {describe_command(command, recording)}"
            for m, recording in recordings.items()
            for number, command in enumerate(recording.commands)
        ]

    return [
        Check("what a step does", where, lambda: [_in_words(where)]),
        Check(
            "the recording of a step",
            hash(tuple(recording.digest for recording in recordings.values())),
            calls,
        ),
        Check(
            "what a step reads beside its batch",
            hash(tuple(contents)),
            lambda: [
                f"reads a tensor of shape {list(shape)} with digest {digest:x}" for shape, digest in contents
            ],
            of_batch=True,
        ),
        Check("the batch of a step", *inputs, of_batch=True),
        Check(
            "the random numbers drawn in a step function",
            random_state,
            lambda: [f"has the random state {random_state:x}"],
            of_batch=True,
        ),
        Check("what a script does between steps", *between, advice=_ONE_OPTIMIZER),
    ]


def _in_words(where: int) -> str:
    if where >= CUT_AT:
        return (
            f"does in microbatch {where - CUT_AT} what it did not do in those before, keeps another of its "
            "values, or looks at data"
        )
    return {
        ALL: "has recorded its step to the end",
        LOOKS: "looks at data while it records",
        ONE: "has recorded one microbatch",
    }[where]
