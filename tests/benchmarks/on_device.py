"""Steps and messages on an accelerator: ranks that share one, against one process with the same microbatches.

Two ranks on one device can at best take what one process takes: what they take more the library costs.
`host` is the time in which a rank's Python had queued the step; while that is shorter than the step, it is
hidden behind the device's work. Messages: one way, there and back in turn, against a copy within the device,
which one rank does while the other waits; and of many under way at the same time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from typing import Any

import torch
from mpi4py import MPI
from rich.console import Group
from rich.table import Table
from torch import Tensor

import smp_lite as smp
from smp_lite.comm.waiting import wait_until
from smp_lite.lifecycle.starting import planning
from smp_lite.preview.memory_preview import preview_memory
from smp_lite.preview.step_preview import PlanReady, stop_when_planned
from smp_lite.record.values.placed import TensorMeta
from smp_lite.session import current
from tests.benchmarks.spread import Spread
from tests.benchmarks.workload import Workload, next_byte_loss
from tests.harness import DEVICES_VARIABLE, REAL, WorldPool

__all__ = ["messages", "set_up", "step_times", "table"]

_NUM_STAGES = 2
_ROUNDS = 10
_WARM_UP_STEPS = 6
"""The fourth makes the graphs."""
_TIMEOUT_S = 120.0
_WIRES = ("ipc", "mpi")
_MOST_REPEATED = 20
_REPEATED_BYTES = 1 << 26
_MANY = 8
"""Messages under way in one direction, as of a pipeline with so many microbatches."""

#: Name, number of ranks, parameters.
_CONTESTANTS: list[tuple[str, int, dict[str, Any]]] = [
    ("one process", 1, {}),
    ("ipc", _NUM_STAGES, {"pipeline": "interleaved"}),
    ("ipc, zero_bubble", _NUM_STAGES, {"pipeline": "zero_bubble"}),
    ("ipc, static_mode", _NUM_STAGES, {"pipeline": "interleaved", "static_mode": True}),
    ("ipc, static_mode, graphs", _NUM_STAGES, {"pipeline": "interleaved", "static_mode": True}),
    ("mpi", _NUM_STAGES, {"pipeline": "interleaved"}),
]

_step: Callable[[], Any] | None = None


def table(quick: bool) -> Group:
    """Measures and describes both; with `quick`, on the pretended device where there is no other."""
    is_pretended = not torch.accelerator.is_available()
    if is_pretended and not quick:
        raise SystemExit("there is no accelerator here; --quick runs the same on a pretended one")
    devices = 1 if is_pretended else REAL
    sizes = [(2048, 16, 1024, 16), (256, 16, 128, 16)] if not quick else [(32, 2, 16, 8)]
    steps = Table(
        "workload",
        "contestant",
        "step ms",
        "/ one process",
        "host ms",
        "host us / action",
        "peak MiB by rank (planned)",
    )
    steps.title = "Steps in bf16, M 8, ranks that share a device: median (quartiles)"
    for d_model, num_blocks, length, batch_size in sizes:
        workload = Workload(d_model, num_blocks, length, batch_size, 8)
        for row in _rows(workload, devices, 2 if quick else _ROUNDS):
            steps.add_row(str(workload), *row)
        steps.add_section()
    return Group(steps, _message_table(devices, 2 if quick else 8))


def _rows(workload: Workload, devices: int, num_rounds: int) -> list[list[str]]:
    # The pretended device's own Python would have to be replayed.
    contestants = [each for each in _CONTESTANTS if not (devices > 0 and "static_mode" in each[2])]
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name, _, _ in contestants}
    with ExitStack() as stack, ThreadPoolExecutor(len(contestants)) as at_once:

        def started(name: str, num_ranks: int, parameters: dict[str, Any]) -> tuple[WorldPool, list[Any]]:
            pool = WorldPool(num_ranks, keeps_sessions=True, devices=devices)
            stack.callback(pool.close)
            kwargs = {"name": name, "workload": workload, "parameters": parameters}
            ready = pool.run(f"{__name__}:set_up", kwargs, None, _TIMEOUT_S)
            print(f"{workload}: {name} is ready", file=sys.stderr)
            return pool, ready

        ready = list(at_once.map(started, *zip(*contestants, strict=True)))
        pools = {name: pool for (name, _, _), (pool, _) in zip(contestants, ready, strict=True)}
        facts = {name: fact for (name, _, _), (_, fact) in zip(contestants, ready, strict=True)}
        for turn in range(num_rounds):
            names = list(pools)
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                found[name].append(pools[name].run(f"{__name__}:step_times", {}, None, _TIMEOUT_S))
    alone = [max(step for step, _ in ranks) for ranks in found["one process"]]
    rows = []
    for name, num_ranks, parameters in contestants:
        steps = [max(step for step, _ in ranks) for ranks in found[name]]
        hosts = [max(host for _, host in ranks) for ranks in found[name]]
        ratio = Spread.of([mine / other for mine, other in zip(steps, alone, strict=True)])
        num_actions = max(count for count, _ in facts[name])
        host_each = f"{statistics.median(hosts) / num_actions * 1e6:.0f}" if num_actions else ""
        peaks = ", ".join(f"{peak / 2**20:.0f}" for _, peak in facts[name])
        if num_ranks > 1:
            planned = _planned(workload, parameters)
            peaks += f" ({', '.join(f'{each / 2**20:.0f}' for each in planned)})"
        step, host = (Spread.of(times).text(1e-3) for times in (steps, hosts))
        texts = [step, ratio.text(digits=3), host, host_each, peaks]
        print(
            f"{workload}: {name}: {', '.join(texts)}", file=sys.stderr
        )  # should a limit come before the table
        rows.append([name, *texts])
    return rows


def _planned(workload: Workload, parameters: dict[str, Any]) -> list[int]:
    """Bytes at each stage's peak, as `smp-lite plan` says."""
    given = {**workload.parameters(_NUM_STAGES, "interleaved"), **parameters}
    with redirect_stdout(StringIO()), planning(given, stop_when_planned):
        smp.init()
        with torch.device("meta"):
            model = workload.distributed(_NUM_STAGES).to(torch.bfloat16)
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # it keeps nothing
        try:
            _step_function()(model, *workload.batch())
        except PlanReady as ready:
            found = preview_memory(current(), ready.batch, ready.recordings, ready.inputs)
            return [stage.total for stage in found.stages]
    raise AssertionError("a step with a backward is planned before it runs")


def _step_function() -> Callable[..., Any]:
    @smp.step
    def step(model: smp.DistributedModel, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = next_byte_loss(model(tokens), targets)
        model.backward(loss)
        return loss

    return step


def set_up(name: str, workload: Workload, parameters: dict[str, Any]) -> tuple[int, int]:
    """Runs in every rank; returns the number of actions of a step, and the device's peak in bytes."""
    global _step
    torch.set_num_threads(1)
    runner: Any = None
    tokens, targets = workload.batch()
    if name == "one process":
        device = torch.accelerator.current_accelerator()
        with device:
            model = workload.model().to(torch.bfloat16)
        parts = [
            (x.to(device), y.to(device))
            for x, y in zip(*(t.chunk(workload.num_microbatches) for t in (tokens, targets)), strict=True)
        ]

        def run() -> None:
            model.zero_grad()
            for x, y in parts:
                (next_byte_loss(model(x), y) / len(parts)).backward()

    else:
        os.environ["SMP_LITE_WIRE"] = name.split(",", maxsplit=1)[0]
        os.environ["SMP_LITE_CUDA_GRAPHS"] = str(int(name.endswith("graphs")))
        smp.init({**workload.parameters(_NUM_STAGES, "interleaved"), **parameters})
        with smp.state.device:  # the whole model is there until the first step
            wrapped = workload.distributed(_NUM_STAGES)
        wrapped.to(torch.bfloat16)

        step = _step_function()

        def run() -> None:
            wrapped.zero_grad()
            step(wrapped, tokens, targets)

    _step = run
    _as_users_have_it()
    run()
    torch.accelerator.synchronize()
    if not os.environ.get(DEVICES_VARIABLE):
        torch.accelerator.reset_peak_memory_stats()
    for _ in range(_WARM_UP_STEPS - 1):
        run()
    torch.accelerator.synchronize()
    if name != "one process":
        runner = wrapped.runtime
    count = 0 if runner is None else sum(len(spans) for spans in runner.runner.spans().values())
    peak = getattr(torch.accelerator, "max_memory_allocated", lambda: 0)
    return count, 0 if os.environ.get(DEVICES_VARIABLE) else peak()


def _as_users_have_it() -> None:
    """The pool's tests want deterministic algorithms, in each call; they fill all memory first."""
    torch.use_deterministic_algorithms(False)


def step_times() -> tuple[float, float]:
    """Seconds of a step, and until it was queued."""
    assert _step is not None
    _as_users_have_it()
    MPI.COMM_WORLD.Barrier()
    torch.accelerator.synchronize()
    start = time.perf_counter()
    _step()
    queued = time.perf_counter()
    torch.accelerator.synchronize()
    return time.perf_counter() - start, queued - start


def _message_table(devices: int, num_rounds: int) -> Table:
    kinds = [(wire, way) for wire in _WIRES for way in ("in turn", "of many")]
    names = [f"{wire}, {way}" for wire, way in kinds]
    result = Table(
        "bytes", *(f"{name}, us" for name in names), "copy us", *(f"{name} / copy" for name in names)
    )
    result.title = "Messages between two ranks on one device, one way: median"
    sizes = [64, 1 << 16, 1 << 20] + ([] if devices > 0 else [1 << 24, 1 << 28])
    times: dict[str, list[dict[int, dict[str, float]]]] = {wire: [] for wire in _WIRES}
    with ExitStack() as stack:
        pools = {}
        for wire in _WIRES:
            pools[wire] = WorldPool(2, keeps_sessions=True, devices=devices)
            stack.callback(pools[wire].close)
        for _ in range(num_rounds):
            for wire in _WIRES:
                kwargs = {"kind": wire, "sizes": sizes}
                ranks = pools[wire].run(f"{__name__}:messages", kwargs, None, _TIMEOUT_S)
                times[wire].append(ranks[0])
    for size in sizes:
        took = [statistics.median([found[size][way] for found in times[wire]]) for wire, way in kinds]
        copy = statistics.median([found[size]["copy"] for wire in _WIRES for found in times[wire]])
        texts = [f"{each * 1e6:.1f}" for each in (*took, copy)]
        result.add_row(str(size), *texts, *(f"{each / copy:.2f}" for each in took))
    return result


def messages(kind: str, sizes: list[int]) -> dict[int, dict[str, float]]:
    """For each size the seconds one way, in turn and of many under way, and of a copy within the device."""
    os.environ["SMP_LITE_WIRE"] = kind
    _as_users_have_it()
    if not smp.is_initialized():
        smp.init({"partitions": 2})
    session = current()
    wire = session.wire()
    assert wire is not None
    mine, peer = smp.pp_rank(), 1 - smp.pp_rank()
    found = {}
    for size in sizes:
        tensor = torch.zeros(size, dtype=torch.uint8, device=session.device)
        meta, target = TensorMeta.of(tensor), torch.empty_like(tensor)

        def passed(count: int, sender: int, meta: TensorMeta = meta, tensor: torch.Tensor = tensor) -> None:
            is_mine = sender == mine
            under_way = [
                wire.send(tensor, meta, peer) if is_mine else wire.receive(meta, peer) for _ in range(count)
            ]
            for transfer in under_way:
                wait_until(transfer.done, lambda: "the other rank's message")
                if not is_mine:
                    transfer.tensor()

        def there_and_back(count: int, passed: Callable[[int, int], None] = passed) -> None:
            for sender in (0, 1):
                passed(count, sender)

        times = min(_MOST_REPEATED, max(1, _REPEATED_BYTES // size))
        in_turn = _each_s(lambda run=there_and_back: run(1), times) / 2
        of_many = _each_s(lambda run=there_and_back: run(_MANY), times) / (2 * _MANY)
        copy = _each_s(lambda target=target, tensor=tensor: target.copy_(tensor), times, alone=mine == 0)
        found[size] = {"in turn": in_turn, "of many": of_many, "copy": copy}
    return found


def _each_s(run: Callable[[], Any], times: int, *, alone: bool | None = None) -> float:
    """Of both ranks at the same time; alone: of the one for which it is true, while the other waits."""
    seconds = 0.0
    if alone is not False:
        run()
    torch.accelerator.synchronize()
    MPI.COMM_WORLD.Barrier()
    if alone is not False:
        start = time.perf_counter()
        for _ in range(times):
            run()
        torch.accelerator.synchronize()
        seconds = (time.perf_counter() - start) / times
    MPI.COMM_WORLD.Barrier()
    return seconds
