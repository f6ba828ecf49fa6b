"""Tensors that have no memory yet, and know how they come to be.

While a model is built under :func:`deferring`, what would take memory is noted instead (``log``,
``dispatch``), and replayed for just those tensors that a rank keeps (``replay``), to the bits that plain
construction would have made. The idea is torchdistX's ``deferred_init`` (Meta, 2022), which replays whole
modules on one device; here a rank replays the slice of the log that its own tensors depend on, with the
generator's state of each draw. A room of its own: of the library it knows the errors alone.
"""

from .context import deferring, is_deferring
from .dispatch import DeferredTensor, constant, from_source, is_deferred
from .initialising import check_filled, initialise_meta, unfilled
from .log import origin_of
from .replay import value_of
from .taking_place import Waiting, has_deferred

__all__ = [
    "DeferredTensor",
    "Waiting",
    "check_filled",
    "constant",
    "deferring",
    "from_source",
    "has_deferred",
    "initialise_meta",
    "is_deferred",
    "is_deferring",
    "origin_of",
    "unfilled",
    "value_of",
]
