"""What every test starts from: the same random numbers, one torch thread, no session.

Tests of the pure parts never import torch, so nothing here imports it for them.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Iterator

import pytest

from smp_lite.entrypoints.mpi.mpirun import own_session_folder

# Before any test module imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # it is not there where only what needs a GPU is tested
    from hypothesis import HealthCheck, settings

    # Machines are shared, and nothing that is timed is asserted.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

_TOLD_OF_A_FAILURE = 1000
"""Characters; all of it is told at the end."""

# For tests that start mpirun without the launcher, beside another process of pytest that does so too.
_folders = [tempfile.TemporaryDirectory(prefix="smp-lite-tests-", ignore_cleanup_errors=True)]
os.environ.update(own_session_folder(_folders[0].name, (), {}))
if os.access("/dev/shm", os.W_OK):
    _folders.append(
        tempfile.TemporaryDirectory(prefix="smp-lite-tests-", dir="/dev/shm", ignore_cleanup_errors=True)
    )
    os.environ["SMP_LITE_TESTS_MEMORY"] = _folders[1].name  # see tests.harness, which imports torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what is marked slow or ci")
    parser.addoption(
        "--share",
        metavar="K/N",
        help="of what is marked slow only the K-th of N parts, from 0 (or K modulo N)",
    )
    parser.addoption(
        "--device",
        choices=["cuda", "pretended"],
        help="all tensors that tests make are on such a device, and what runs on a pretended one runs there",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if (reporter := config.pluginmanager.get_plugin("terminalreporter")) is not None:
        config.pluginmanager.register(_AtOnce(reporter))
    if config.getoption("--device"):
        os.environ["SMP_LITE_TESTS_DEVICE"] = config.getoption("--device")  # see tests.harness
        from tests.default_device import put_all_there

        put_all_there()  # before test modules make tensors


class _AtOnce:
    """Says which tests fail as they do: a run that a limit of time ends has said it too."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = report.longreprtext if crash is None else crash.message
            self._reporter.write_line(f"\nFAILED {report.nodeid} ({report.when}): {why[:_TOLD_OF_A_FAILURE]}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Not left to the interpreter's end: workers end without one."""
    for folder in _folders:
        folder.cleanup()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked ``thorough``, and all but each n-th case of what is marked ``sampled(n)``,
    unless all is asked for (``make test-all``); with ``--quick`` (``make test``) what is ``slow`` or ``ci``
    too, with ``--share`` (CI) all but a part of what is ``slow``."""
    if config.getoption("--device"):
        for item in items:
            if item.get_closest_marker("pretended") and config.getoption("--device") != "pretended":
                item.add_marker(pytest.mark.skip("it speaks of the pretended device"))
            if item.get_closest_marker("host"):
                item.add_marker(pytest.mark.skip("it speaks of the CPU"))
            if config.getoption("--device") == "pretended":
                if item.get_closest_marker("unpretended"):
                    item.add_marker(pytest.mark.skip("the pretended device cannot do it"))
                if item.path.stem.endswith("_on_device"):
                    item.add_marker(pytest.mark.skip("it runs on such devices in any case"))
    if os.environ.get("SMP_LITE_ALL_TESTS") == "1":
        return
    quick = config.getoption("--quick")
    part, num_parts = _share(config.getoption("--share"))
    num_slow = 0
    cases: dict[str, int] = {}
    kept, left_out = [], []
    for item in items:
        if item.get_closest_marker("thorough"):
            left_out.append(item)
            continue
        sampled = item.get_closest_marker("sampled")
        name = item.nodeid.partition("[")[0]
        place = cases[name] = cases.get(name, -1) + 1
        chosen = sampled is None or place % sampled.args[0] == 0
        slow = item.get_closest_marker("slow")
        if slow is not None and chosen:
            has_its_turn = not quick and num_slow % num_parts == part
            chosen = has_its_turn or place < slow.kwargs.get("keep", 0)
            num_slow += 1
        for_ci = item.get_closest_marker("ci")
        if for_ci is not None and quick and place >= for_ci.kwargs.get("keep", 0):
            chosen = False
        (kept if chosen else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _share(text: str | None) -> tuple[int, int]:
    """Which part, of how many."""
    if text is None:
        return 0, 1
    part, _, number = text.partition("/")
    if not (part.isdecimal() and number.isdecimal() and int(number)):
        raise pytest.UsageError(f"--share {text}: give K/N, two whole numbers")
    return int(part) % int(number), int(number)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """No test finds the environment of another, nor do the processes that it starts."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _session_ends() -> Iterator[None]:
    """No test finds the session of another: which tests share a process changes from run to run."""
    yield
    starting = sys.modules.get("smp_lite.lifecycle.starting")
    if starting is not None:
        starting.reset()
