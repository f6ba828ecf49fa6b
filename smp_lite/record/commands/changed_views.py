"""Views of what changes in place, whose gradients would be added up in another order than in one process.

A change in place hangs under the *base* in autograd, which is what the views are views of, and what had been
made of it before hangs under the base anew, at its next use. So base and views have their gradients added up
together, each view's own first, in the order in which all of them were used. Values are summed in such an
order here (:mod:`...plan.step.segments`), but ``x`` and its view are two values of one command, and a base
that nobody holds is none: no segment can take in the gradient of one between two of another. Two gradients
are the same sum in either order; of three the last bits could differ. And where a segment changes what
another one has made, it changes a copy. That is laid out like a base of which the view shows all; how a base
lies of which it shows a part, nobody outside of the call knows that made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from ...errors import SMPError
from ...plan.step.segments import SegmentGraph
from ..values.placed import TensorMeta
from .recording import Command, Recording

__all__ = ["refuse_views_summed_apart"]


def refuse_views_summed_apart(recording: Recording, graph: SegmentGraph) -> None:
    """
    Raises:
        SMPError: what changes in place and views of it get three gradients or more, before the change or
            after it, some of them from another segment.
    """
    commands = [command for command in recording.commands if command.changes_views or command.hides_base]
    if not commands or not recording.backwards:
        return
    exported = {value for segment in graph.segments for value in segment.gradient_exports}
    uses = _uses(recording)
    imports = {index: segment.imports for segment in graph.segments for index in segment.commands}
    for command in commands:
        is_part = _is_part(recording, command, uses, imports[command.index])
        if is_part or _of_new(command, uses, exported) > 2 or _of_old(command, uses, exported) > 2:
            raise SMPError(
                f"{command.label} changes a tensor in place that is a view, or of which views are held, and "
                f"{'it was made' if is_part else 'they are used several times'} on another stage, or in "
                "another part of the step: autograd would "
                f"{'lay out its gradient' if is_part else 'add up gradients'} otherwise than in one "
                "process. Change a copy (tensor.clone()), or make views anew after the "
                "change and let go of earlier ones"
            )


def _is_part(recording: Recording, command: Command, uses: Counter[int], imports: Sequence[int]) -> bool:
    """Whether it changes a copy of a part of a base that nobody holds."""
    if not command.hides_base:
        return False
    cut = [old for old, new in command.changes if uses[new] and uses[old] and old in imports]
    return any(not _is_dense(recording.values[old].meta) for old in cut)


def _is_dense(meta: TensorMeta) -> bool:
    expected = 1
    for stride, length in sorted(zip(meta.stride, meta.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _of_new(command: Command, uses: Counter[int], exported: AbstractSet[int]) -> int:
    """How many gradients are added up for the base after the change, if some come from elsewhere."""
    used = [new for _, new in command.changes if uses[new]]
    if len(used) < 2 or exported.isdisjoint(used):
        return 0
    base = command.changes[0][1]  # or, where nobody holds it, the eldest view
    return uses[base] + len(used) - (base in used)


def _of_old(command: Command, uses: Counter[int], exported: AbstractSet[int]) -> int:
    """How many are added up for a base that nobody holds before the change, if some come from elsewhere."""
    olds = [old for old, new in command.changes if uses[new]]
    if not command.hides_base or exported.isdisjoint(olds):
        return 0
    return sum(uses[old] for old in olds) - (len(olds) - 1)  # the change itself counts for each


def _uses(recording: Recording) -> Counter[int]:
    """How many gradients are added up for each value, at most."""
    uses = Counter(recording.roots())
    for command, links in zip(reversed(recording.commands), reversed(recording.links), strict=True):
        reached = [linked for output, linked in zip(command.outputs, links, strict=True) if uses[output]]
        # A change has one gradient function, whatever it gives new versions.
        once = command.changes and {value for linked in reached for value in linked}
        uses.update(once or [value for linked in reached for value in linked])
    return uses
