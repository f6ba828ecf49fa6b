"""The script's ``TrainingArguments``, as the Trainer of one rank reads them.

transformers counts as in one process that trains on the batch of all replicas: ``train_batch_size`` is
``per_device_train_batch_size`` times the number of replicas. So number of steps, token counts, samplers,
random collators and logs are those of one process, and there is nothing to put together afterwards. What
goes by processes, files and prints, goes by ranks.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from typing import Any

import torch

from ... import api
from ...session import current

__all__ = ["of_this_rank"]


class OfThisRank:
    """What is read otherwise; before the script's own class in the order of bases."""

    __dict__: dict[str, Any]
    smp_written: type  # the script's class, under which they are pickled

    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size * data_size()  # type: ignore[attr-defined]

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size * data_size()  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        return current().device

    @property
    def n_gpu(self) -> int:
        return 0

    @property
    def place_model_on_device(self) -> bool:
        return False

    @property
    def should_save(self) -> bool:
        return (api.local_rank() if self.save_on_each_node else api.rank()) == 0  # type: ignore[attr-defined]

    @property
    def should_log(self) -> bool:
        return (api.local_rank() if self.log_on_each_node else api.rank()) == 0  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # training_args.bin is of the script's own class, and read without this library.
        rebuild: Any = copyreg._reconstructor  # type: ignore[attr-defined]
        return rebuild, (self.smp_written, object, None), self.__dict__


def of_this_rank(args: Any) -> Any:
    """A copy, of a class that is the script's with :class:`OfThisRank` before it."""
    own = copy.copy(args)
    own.__class__ = _class_of(type(args))
    return own


@functools.cache
def _class_of(written: type) -> type:
    if issubclass(written, OfThisRank):
        return written
    return type(written.__name__, (OfThisRank, written), {"smp_written": written})


def data_kind() -> str:
    """The group of the ranks that differ from this one in their rows of the batch alone."""
    return "+".join(current().batch_axes)


def data_size() -> int:
    """How many replicas there are, each with rows of its own."""
    return len(current().group(data_kind()))


def data_rank() -> int:
    return current().group_rank(data_kind())
