"""A process that trains keeps what it frees; one whose user has spoken to malloc is left alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys, torch
import smp_lite as smp
if sys.argv[1] == "init":
    smp.init({"partitions": 1})

def work():
    kept = [torch.ones(1 << 20) for _ in range(16)]  # 4 MiB each
    del kept

for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_NUM_PAGES = 10 * 16 * (4 << 20) // resource.getpagesize()


def page_faults(how: str, **environment: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(ran.stdout.split()[-1])


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_what_is_freed_is_used_again() -> None:
    # None, most often; the heap may still grow by half a round.
    assert page_faults("init") < _NUM_PAGES / 5


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_the_users_word_counts() -> None:
    given = page_faults("init", MALLOC_MMAP_THRESHOLD_="1000000")
    assert given > _NUM_PAGES / 2
