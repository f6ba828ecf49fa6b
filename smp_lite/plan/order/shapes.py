"""In which order one microbatch visits the stages, as far as the literature has a name for that.

Only the segments' sequence counts: values may skip stages, and costs may differ. What has another shape (a
stage that is visited once more for a tied embedding, branches that are not in one row) has none here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..step.segments import SegmentGraph

__all__ = ["Shape", "shape_of"]


@dataclass(frozen=True)
class Shape:
    """All stages in a row, once or several times.

    Args:
        stages: in the order of their first visit; elsewhere a stage is its place here.
        num_visits: of each stage.
        is_v: whether the second visits go back, from the last stage to the first one; else each round is in
            the same order. The last stage's two visits may be one segment, since nothing comes between them.
    """

    stages: tuple[int, ...]
    num_visits: int
    is_v: bool = False


def shape_of(graph: SegmentGraph) -> Shape | None:
    """The shape of a microbatch's way, or None."""
    way = [segment.stage_index for segment in graph.segments]
    stages = tuple(dict.fromkeys(way))
    back = stages[::-1]
    if way in ([*stages, *back], [*stages, *back[1:]]) and len(stages) > 1:
        return Shape(stages, 2, is_v=True)
    num_visits, rest = divmod(len(way), len(stages) or 1)
    if rest or not way:
        return None
    return Shape(stages, num_visits) if way == list(stages) * num_visits else None
