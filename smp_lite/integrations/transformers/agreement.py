"""Decisions that all ranks take alike.

Callbacks run on every rank. What they decide (to stop, to save, to evaluate) the ranks put together before
it is acted upon, and any rank's yes counts: a callback that looks at the clock, or at a file of one host,
stops all. Metrics are rank 0's everywhere, since the best checkpoint, learning rates and callbacks go by
them. What the script says on each rank (arguments, lengths of datasets) must be the same, and is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ...errors import SMPMismatch
from ...session import Session

__all__ = ["agreeing", "exchange", "of_rank_0", "same_arguments", "same_everywhere"]

_OF_EACH_RANK = """
output_dir disable_tqdm report_to run_name project log_level log_level_replica log_on_each_node
local_rank push_to_hub hub_model_id hub_token trackio_space_id trackio_bucket_id trackio_static_space_id
dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor skip_memory_metrics
"""
OF_EACH_RANK = frozenset(_OF_EACH_RANK.split())
"""Fields of ``TrainingArguments`` that change no number: files, prints, how fast rows come."""

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")

ACTED_UPON_AFTER = ("on_step_end", "on_substep_end", "on_epoch_end", "on_log", "on_evaluate", "on_save")
"""Events after which the Trainer reads what callbacks have decided."""


def agreeing(session: Session, call_event: Callable[..., Any]) -> Callable[..., Any]:
    """``CallbackHandler.call_event``, after which all ranks hold the same decisions."""

    def call(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = call_event(event, args, state, control, **kwargs)
        if event in ACTED_UPON_AFTER:
            own = [bool(getattr(control, flag)) for flag in FLAGS]
            found = exchange(session, own, "WORLD", f"what callbacks decided in {event}")
            for flag, decided in zip(FLAGS, zip(*found, strict=True), strict=True):
                setattr(control, flag, any(decided))
        return control

    return call


def exchange(session: Session, value: Any, kind: str, what: str) -> list[Any]:
    """The values of the ranks of a group. Collective over it.

    Args:
        session: with the ranks.
        value: picklable.
        kind: of the group; one of this rank alone needs nobody.
        what: names the call in errors.
    """
    if session.world is None or len(session.group(kind)) == 1:
        return [value]
    return session.world.exchange(value, kind, what)


def of_rank_0(session: Session, value: Any, what: str) -> Any:
    """Rank 0's value, on all ranks. Collective over all ranks."""
    return exchange(session, value if session.rank == 0 else None, "WORLD", what)[0]


def same_everywhere(session: Session, values: dict[str, str], what: str) -> None:
    """Checks that all ranks were given the same. Collective over all ranks.

    Args:
        session: with the ranks.
        values: by name.
        what: names the call in errors.

    Raises:
        SMPMismatch: naming what differs, the ranks and their values.
    """
    found = exchange(session, values, "WORLD", what)
    for rank, theirs in enumerate(found):
        for name in sorted(found[0].keys() | theirs.keys()):
            mine, other = (side.get(name, "nothing") for side in (found[0], theirs))
            if mine != other:
                raise SMPMismatch(
                    f"{what}: {name} is {mine} on rank 0 and {other} on rank {rank}; every rank must be "
                    "given the same arguments and datasets"
                )


def same_arguments(session: Session, args: Any, resume_from_checkpoint: Any) -> None:
    """:func:`same_everywhere` of what ``train`` goes by."""
    names = [field.name for field in dataclasses.fields(args) if field.name not in OF_EACH_RANK]
    values = {f"TrainingArguments.{name}": repr(getattr(args, name)) for name in names}
    values["resume_from_checkpoint"] = repr(resume_from_checkpoint)
    values = {name: text for name, text in values.items() if " at 0x" not in text}  # addresses differ anyway
    same_everywhere(session, values, "Trainer.train")
