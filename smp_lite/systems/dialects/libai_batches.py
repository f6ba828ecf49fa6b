"""LiBai's arithmetic of batch sizes: global = microbatch x data-parallel size x accumulation steps."""

from __future__ import annotations

from ...config.errors import ConfigError
from ..plan.parallel_plan import Said
from ..reading.written import Written

__all__ = ["batch_sizes", "said_size"]


def batch_sizes(micro: int | None, global_: int | None, steps: int | None, dp: int) -> tuple[int, int, int]:
    """Returns the samples of a microbatch and of a step, and the microbatches of a step.

    Args:
        micro: ``train_micro_batch_size``; None: not said.
        global_: ``global_batch_size``; None: not said.
        steps: ``num_accumulation_steps``; None: not said.
        dp: data-parallel size.

    Raises:
        ConfigError: the three do not agree, or two of them are missing.
    """
    if micro is None and global_ is None:
        raise ConfigError(
            "train.train_micro_batch_size and train.global_batch_size are both None: set one, or both"
        )
    if global_ is None:
        assert micro is not None
        return micro, micro * dp * (steps or 1), steps or 1
    if micro is None:
        micro, rest = divmod(global_, dp * (steps or 1))
        if rest or micro < 1:
            raise ConfigError(
                f"train.global_batch_size={global_} is not a multiple of data-parallel size {dp} x "
                f"num_accumulation_steps {steps or 1}: use a multiple of {dp * (steps or 1)}"
            )
        return micro, global_, steps or 1
    if steps is None:
        steps, rest = divmod(global_, micro * dp)
        if rest or steps < 1:
            raise ConfigError(
                f"train.global_batch_size={global_} is not a multiple of train_micro_batch_size {micro} x "
                f"data-parallel size {dp}: use a multiple of {micro * dp}"
            )
        return micro, global_, steps
    if global_ != micro * dp * steps:
        raise ConfigError(
            f"train.global_batch_size={global_} is not train_micro_batch_size {micro} x data-parallel size "
            f"{dp} x "
            f"num_accumulation_steps {steps} = {micro * dp * steps}: leave one of the three out (None)"
        )
    return micro, global_, steps


def said_size(written: Written, global_: int, dp: int, steps: int) -> Said:
    """Who said how many samples a microbatch has; what LiBai's own common/train.py says is a default."""
    path = ("train", "train_micro_batch_size")
    if written.get("train", "global_batch_size") is not None:
        how = f"{global_} samples, {dp} x {steps} microbatches"
        return written.said("train", "global_batch_size", how=how)
    if written.is_own(*path):
        return written.said(*path)
    return Said(written.dialect, None, ".".join(path), is_default=True)
