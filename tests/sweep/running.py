"""Runs models one after another, each in a process of its own, and keeps what came of them.

A child has a limit of time and of memory. It tells what it has found after each part, so that one that is
killed still shows how far it came. Results are appended to a file of JSON lines as they come: a sweep that
was stopped goes on where it was, and the last line of a name counts.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import smp_lite as smp
from tests.sweep.cases import cases, in_dtype
from tests.sweep.inputs import NoLabelsError
from tests.sweep.training import NUM_MICROBATCHES, differences, plain, train

__all__ = ["read_results", "sweep"]

MEMORY_BYTES = 12 << 30
LOG_CHARACTERS = 4000
SINGLE, DOUBLE = "single", "double"
LIMITS = {
    SINGLE: {"equal": 0.0, "1e-6": 1e-6, "1e-4": 1e-4},
    DOUBLE: {"equal": 0.0, "1e-9": 1e-9},
}
"""What deviates by more is different. Double precision tells another order of sums from other results."""

Result = dict[str, Any]


def sweep(
    names: Iterable[str], out: Path, *, num_stages: int, timeout_s: float, plain_only: bool = False
) -> None:
    """Runs models and appends a line for each to ``out``.

    Args:
        names: model types.
        out: the file of results.
        num_stages: of the library's run.
        timeout_s: for one run of one model.
        plain_only: do not run the library.
    """
    for name in names:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = _result_of(name, Path(folder), num_stages, timeout_s, plain_only)
        result = {
            "name": name,
            "stages": num_stages,
            **result,
            "total_s": round(time.monotonic() - started, 2),
        }
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{name:40} {result['status']:12} {result.get('error', '')[:120]}", flush=True)


def read_results(path: Path) -> dict[str, Result]:
    """The last result of each name."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["name"]: line for line in lines}


def _result_of(name: str, folder: Path, num_stages: int, timeout_s: float, plain_only: bool) -> Result:
    """Each run has a process of its own: what one leaves in caches of functions must not help another."""

    def child(work: Callable[..., None], *args: Any) -> Result:
        return _in_child(lambda report: work(*args, report), timeout_s)

    result = child(_find, name, folder)
    if result["status"] != "plain" or plain_only:
        return result
    result.update(child(_library, folder, SINGLE, num_stages))
    if result["status"] == "different":
        result["status"] = (
            "random" if result["draws"] else _kind_of_difference(result, child, folder, num_stages)
        )
    return result


def _kind_of_difference(result: Result, child: Callable[..., Result], folder: Path, num_stages: int) -> str:
    if child(_plain_in_double, folder)["status"] != "plain":
        return "different"
    in_double = child(_library, folder, DOUBLE, num_stages)
    result["in_double"] = in_double.get("error") or in_double.get("worst")
    return "rounding" if in_double["status"] in LIMITS[DOUBLE] else "different"


# Runs -------------------------------------------------------------------------------------------------------


def _find(name: str, folder: Path, report: Callable[..., None]) -> None:
    """Looks for a class of this model type that trains in plain torch, and is deterministic there."""
    report(status="no plain run")
    failures = []
    for case in cases(name):
        try:
            module = case.module()
            batch = case.batch(module)
            expected = train(plain(), case.module(), batch)
            _check_trained(expected)
            break
        except NoLabelsError:
            pass
        except Exception as error:
            failures.append(f"{case.architecture.__name__}{' with labels' * case.labels}: {describe(error)}")
            report(failures=failures[:4])
    else:
        report(error=failures[0] if failures else "no class of transformers takes this configuration")
        return
    report(
        architecture=case.architecture.__name__,
        labels=case.labels,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        plain_s=expected.seconds,
        draws=expected.draws,
        failures=[],
    )
    found = differences(train(plain(), case.module(), batch), expected)
    if found:
        report(status="not deterministic", error=_words(found))
        return
    torch.save((case, batch, expected), folder / SINGLE)
    report(status="plain")


def _plain_in_double(folder: Path, report: Callable[..., None]) -> None:
    case, batch, _ = torch.load(folder / SINGLE, weights_only=False)
    case, batch = replace(case, dtype=torch.float64), in_dtype(batch, torch.float64)
    torch.save((case, batch, train(plain(), case.module(), batch)), folder / DOUBLE)
    report(status="plain")


def _library(folder: Path, precision: str, num_stages: int, report: Callable[..., None]) -> None:
    case, batch, expected = torch.load(folder / precision, weights_only=False)
    smp.init_in_memory({"partitions": num_stages, "microbatches": NUM_MICROBATCHES})
    try:
        found = train(smp, case.module(), batch)
    except Exception as error:
        report(status="error", error=describe(error), traceback=traceback.format_exc()[-LOG_CHARACTERS:])
        return
    stages = list(smp.state.model.partition.stage_of.values())
    deviating = differences(found, expected)
    worst = deviating[0][0] if deviating else 0.0
    status = next((status for status, limit in LIMITS[precision].items() if worst <= limit), "different")
    report(
        status=status,
        library_s=found.seconds,
        modules=[stages.count(stage) for stage in range(num_stages)],
        **{"error" if status == "different" else "worst": _words(deviating)},
    )


def _words(deviating: list[tuple[float, str]]) -> str:
    """How many things deviate in each step, and the worst of them."""
    worst: dict[str, tuple[float, str]] = {}
    counts: Counter[str] = Counter()
    for deviation, name in deviating:
        kind, _, which = name.rpartition(" ")
        worst.setdefault(kind, (deviation, which))
        counts[kind] += 1
    return "; ".join(
        f"{counts[kind]} of {kind}: {d:.1e} {which}" for kind, (d, which) in sorted(worst.items())
    )


def _check_trained(run: Any) -> None:
    gradients = [value for name, value in run.values.items() if " gradient " in name and value is not None]
    if not gradients:
        raise ValueError("no parameter gets a gradient")
    bad = [
        name for name, v in run.values.items() if v is not None and v.is_floating_point() and v.isnan().any()
    ]
    if bad:
        raise ValueError(f"not a number: {', '.join(bad[:3])}")


def describe(error: BaseException) -> str:
    """The error with the lines of transformers and of the library that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frames[-1]] if frames else []
    for folder in ("/transformers/models/", "/smp_lite/"):
        found = [frame for frame in frames if folder in frame.filename]
        if found and found[-1] not in lines:
            lines.append(found[-1])
    places = "; ".join(f"{Path(f.filename).name}:{f.lineno} {f.line}" for f in lines)
    text = re.sub(r"\s+", " ", str(error))
    if len(text) > 600:
        text = f"{text[:300]} ... {text[-300:]}"
    return f"{type(error).__name__}: {text} [{places}]"


# Children ---------------------------------------------------------------------------------------------------


def _in_child(work: Callable[[Callable[..., None]], None], timeout_s: float) -> Result:
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _be_child(work, write_end)
    os.close(write_end)
    result: Result = {"status": "killed"}
    timed_out = False
    for line in _lines(read_end, started + timeout_s):
        if line is None:
            timed_out = True
            os.kill(pid, signal.SIGKILL)
        else:
            result.update(json.loads(line))
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    if timed_out:
        result.update(status="timeout", error=f"after {result['status']!r}")
    elif os.WIFSIGNALED(status):
        result.update(
            status="killed", error=f"{signal.Signals(os.WTERMSIG(status)).name} after {result['status']!r}"
        )
    return result


def _be_child(work: Callable[[Callable[..., None]], None], write_end: int) -> None:
    def report(**found: Any) -> None:
        os.write(write_end, (json.dumps(found) + "\n").encode())

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        torch.set_num_threads(1)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        work(report)
    except BaseException as error:
        report(status="failed", error=describe(error))
    finally:
        os._exit(0)


def _lines(read_end: int, deadline: float) -> Iterator[str | None]:
    """What the child writes; None at the deadline, after which it is read to its end."""
    rest = b""
    late = False
    while True:
        left = None if late else max(0.0, deadline - time.monotonic())
        if not select.select([read_end], [], [], left)[0]:
            late = True
            yield None
            continue
        data = os.read(read_end, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in lines)
