"""What every module takes in seconds: the model runs a few times on one microbatch, and only clocks watch it.

What :mod:`.tracing` watches besides, operations and what is kept, takes longer than a small module itself, so
that is found by a run of its own. The first run takes longer than the others (memory, threads, caches), so
the least seconds of each module count. Modules that are alike, as the layers of a transformer's blocks, have
the same: their mean.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from ...devices import home, synchronize
from ..parameters.moving import whole_on
from .metadata import MetadataInference
from .tracing import ModuleTrace, run_for_real, trace_model, without_hooks

__all__ = ["measured_trace"]

_MOST_RUNS = 4
_QUICK_S = 1.0


def measured_trace(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inference: MetadataInference
) -> ModuleTrace:
    """A trace with seconds; after a second the model does not run again."""
    trace = trace_model(root, args, kwargs, inference)
    begin = time.perf_counter()
    runs: list[dict[str, float]] = []
    with whole_on(root, home()), without_hooks(root):
        while not runs or (len(runs) < _MOST_RUNS and time.perf_counter() - begin < _QUICK_S):
            with run_for_real(root, args, kwargs):
                runs.append(_seconds(root, args, kwargs))
    for name in dict.fromkeys(name for run in runs for name in run):
        trace.of(name).seconds = min(run.get(name, 0.0) for run in runs)
    _level(root, trace)
    trace.measured = True
    return trace


def _level(root: nn.Module, trace: ModuleTrace) -> None:
    """What is alike takes the same time; what else was measured of it is chance."""
    alike: dict[Any, list[str]] = {}
    for name, module in root.named_modules():
        if name in trace.tallies:
            tally = trace.of(name)
            shapes = tuple([tuple(tensor.shape) for tensor in module.parameters(recurse=False)])
            key = (type(module), shapes, tally.flops, tally.kept_bytes, tally.output_bytes)
            alike.setdefault(key, []).append(name)
    for names in alike.values():
        mean = statistics.fmean([trace.of(name).seconds for name in names])
        for name in names:
            trace.of(name).seconds = mean


def _seconds(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Of each module's own code, all its calls together."""
    names = {id(module): name for name, module in root.named_modules()}
    found: dict[str, float] = {}
    # A container's own code counts at the child whose result it goes on with.
    running = [""]
    clock = time.perf_counter()

    def charge() -> None:
        nonlocal clock
        synchronize()
        now = time.perf_counter()
        found[running[-1]] = found.get(running[-1], 0.0) + now - clock
        clock = now

    original: Callable[..., Any] = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(module))
        if name is None:
            return original(module, *args, **kwargs)
        charge()
        running.append(name)
        try:
            return original(module, *args, **kwargs)
        finally:
            charge()
            running.pop()
            running[-1] = name

    nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
    try:
        root(*args, **kwargs)
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
    return found
