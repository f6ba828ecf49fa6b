"""What `smp-lite plan` says a stage needs, against what training took.

The peak of a step is that of torch's own allocator in each rank, as its profiler saw it, on top of what the
rank held when the step began; the nearer of two steps, since messages leave a little earlier or later.
"""

from __future__ import annotations

from rich.table import Table

from tests.harness import run_distributed
from tests.transparency.schedules.planned_peaks import JOBS, planned_memory

__all__ = ["table"]


def table(quick: bool) -> Table:
    """Plans and trains the four models of the tests."""
    result = Table(
        "model",
        "stages",
        "pipeline",
        "planned MiB",
        "trained MiB",
        "planned / trained",
        title="Peak memory of each stage, M 8, AdamW: planned and as torch allocated it",
    )
    for name in JOBS:
        for num_stages in (2,) if quick else (2, 4):
            for pipeline in ("interleaved", "simple"):
                parameters = {"partitions": num_stages, "microbatches": 8, "pipeline": pipeline}
                planned = [stage.total for stage in planned_memory(name, parameters)]
                measured = dict(
                    run_distributed(
                        "tests.transparency.schedules.planned_peaks:measured_peaks",
                        num_stages,
                        kwargs={"name": name},
                        parameters=parameters,
                        timeout_s=300.0,
                    )
                )
                trained = [
                    min(measured[stage], key=lambda peak, total=total: abs(peak - total))
                    for stage, total in enumerate(planned)
                ]
                result.add_row(
                    name,
                    str(num_stages),
                    pipeline,
                    ", ".join(f"{total / 2**20:.1f}" for total in planned),
                    ", ".join(f"{peak / 2**20:.1f}" for peak in trained),
                    ", ".join(f"{a / b:.3f}" for a, b in zip(planned, trained, strict=True)),
                )
    return result
