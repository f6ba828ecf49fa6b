"""Steps of smp_lite over MPI against every schedule of torch.distributed.pipelining over gloo.

In each round every contestant makes a step, in turn, beginning with another one each time. What counts is
the ratio of torch's fastest schedule to ours within a round: its median and quartiles over the rounds.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.table import Table

from tests.benchmarks.contestants import BY_HAND, NUM_STAGES, OURS, THEIRS
from tests.benchmarks.spread import Spread
from tests.benchmarks.workload import Workload
from tests.harness import WorldPool

__all__ = ["table"]

_WARM_UP_STEPS = 3
_WARM_UP_STEPS_OF_AUTO = 10
"""It has decided by then."""
_TOLERANCE = 1e-6
"""Times are worth comparing only where all compute the same."""
_TIMEOUT_S = 300.0


def table(quick: bool) -> Table:
    """Runs the comparison and describes it."""
    # (workload, number of rounds)
    plan = [
        (Workload(d_model, 8, length, 16, num_microbatches), 16 if d_model == 128 else 10)
        for d_model, length in ((128, 64), (512, 256))
        for num_microbatches in (4, 8)
    ]
    if quick:
        plan = [(Workload(64, 4, 32, 16, 4), 4)]
    result = Table(
        "workload",
        "contestant",
        "step ms",
        "torch's fastest / it",
        "by hand / it",
        title=f"Step time of all schedules, {NUM_STAGES} ranks, in turn: median (quartiles)",
    )
    for workload, num_rounds in plan:
        times = _rounds(workload, num_rounds)
        fastest = min(THEIRS, key=lambda name: statistics.median(times[name]))
        for name in (*OURS, BY_HAND, *THEIRS):
            against = [
                Spread.of([a / b for a, b in zip(times[other], times[name], strict=True)]).text(digits=3)
                for other in (fastest, BY_HAND)
            ]
            mark = " (torch's fastest)" if name == fastest else ""
            what = f"{workload}, M {workload.num_microbatches}"
            result.add_row(what, name + mark, Spread.of(times[name]).text(1e-3), *against)
        result.add_section()
    return result


def _rounds(workload: Workload, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant's steps, by round."""
    names = [*OURS, BY_HAND, *THEIRS]
    module = "tests.benchmarks.contestants"
    with TemporaryDirectory() as directory, ExitStack() as stack:
        pools = {}
        for name in names:
            pool = pools[name] = WorldPool(NUM_STAGES, keeps_sessions=True)
            stack.callback(pool.close)
            kwargs = {
                "name": name,
                "workload": workload,
                "store": str(Path(directory, name)),
                "num_warm_up": _WARM_UP_STEPS_OF_AUTO if name.startswith("auto") else _WARM_UP_STEPS,
            }
            pool.run(f"{module}:set_up", kwargs, None, _TIMEOUT_S)
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(num_rounds):
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                found[name].append(max(pools[name].run(f"{module}:step_time", {}, None, _TIMEOUT_S)))
        gradients = {
            name: _whole(pools[name].run(f"{module}:gradients", {}, None, _TIMEOUT_S)) for name in names
        }
    for name in names:
        _check(f"{workload}, {name}", gradients[name], gradients[BY_HAND])
    return found


def _whole(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: gradient for part in parts for name, gradient in part.items()}


def _check(what: str, ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    if ours.keys() != other.keys():
        raise RuntimeError(f"{what}: gradients of {sorted(ours.keys() ^ other.keys())[:3]} are missing")
    for name, gradient in ours.items():
        difference = float((gradient - other[name]).abs().max() / other[name].abs().max())
        if not difference <= _TOLERANCE:
            raise RuntimeError(f"{what}: the gradient of {name} differs by {difference:.1e} relative")
