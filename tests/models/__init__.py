"""The models that everything is tested on: plain torch, each with one difficulty.

They know nothing of the library under test. `CASES` maps a name to its `Case`; the files group
them by what is hard about them. Sizes are the smallest that still have a block for each of four
stages, so that one comparison of a model costs milliseconds.
"""

from __future__ import annotations

from tests.models import autograd, control_flow, huggingface, interfaces, language, losses, vision
from tests.models.case import Batch, Case, HookRecord, split_batch, zigzag_stages
from tests.models.reference import PlainStep, plain_step

__all__ = [
    "CASES",
    "Batch",
    "Case",
    "HookRecord",
    "PlainStep",
    "plain_step",
    "split_batch",
    "zigzag_stages",
]

CASES: dict[str, Case] = {
    case.name: case
    for group in (language, vision, control_flow, interfaces, losses, autograd, huggingface)
    for case in group.CASES
}
