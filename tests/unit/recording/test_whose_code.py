"""Which code is the user's: neither torch's, nor this library's, wherever they are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import smp_lite
from smp_lite.record.code.watch import is_users_code
from smp_lite.source_files import folders_of

SCRIPT = """
import torch
from torch import nn
import smp_lite as smp

torch.set_num_threads(1)
smp.init_in_memory({"partitions": 2, "microbatches": 2})
model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

@smp.step
def step(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss

step(model, torch.ones(2, 4))
print(torch.__file__)
"""


def _code_in(file: Path) -> object:
    namespace: dict[str, object] = {"__name__": file.stem}
    exec(compile("def function(): pass", str(file), "exec"), namespace)
    return namespace["function"]


def test_what_lies_in_a_package_is_its_own_and_nothing_beside_it() -> None:
    for package in (torch, smp_lite):
        folder = Path(package.__file__).parent
        own, beside = (_code_in(folder / "x.py"), _code_in(folder.with_name(f"{folder.name}_x") / "x.py"))
        assert not is_users_code(own.__code__, own.__globals__)  # type: ignore[attr-defined]
        assert is_users_code(beside.__code__, beside.__globals__)  # type: ignore[attr-defined]


def test_folders_by_both_ways(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "package" / "inner").mkdir(parents=True)
    link.symlink_to(real)
    expected = tuple(f"{each / 'package'}{os.sep}" for each in (link, real))
    assert folders_of(str(link / "package" / "inner" / "x.py"), 1) == expected
    assert folders_of(str(real / "package" / "x.py")) == expected[1:]


@pytest.mark.ci
def test_an_environment_behind_a_link(tmp_path: Path) -> None:
    link = tmp_path / "packages"
    link.symlink_to(Path(torch.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(link), *sys.path])}
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1].startswith(str(link))
