"""``smp-lite check`` says "equal" of what is equal, and names the first call of what is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_lite.check.report import StepReport
from smp_lite.check.stepping import CheckEnded, StepChecker
from smp_lite.lifecycle import starting
from smp_lite.record.buffers import module_buffers
from smp_lite.record.code.watch import Names
from smp_lite.record.describe import effects, signature
from smp_lite.record.parameters import tables
from smp_lite.record.state import parts, python_state
from smp_lite.record.state.places import PlacesRead
from smp_lite.record.step import module_calls
from tests.models import CASES, Case
from tests.models.layers import WIDTH, regression_batch
from tests.sampling import one_in
from tests.transparency.comparison import NUM_MICROBATCHES, smp_run
from tests.transparency.schedules.weight_gradients import Around
from tests.transparency.users_code.state_cases import CASES as STATE_CASES

pytestmark = [pytest.mark.sampled(3), pytest.mark.host]  # it forks

NUM_STEPS = 2


def check(case: Case, placement: str = "zigzag") -> list[StepReport]:
    """The reports of a case's training."""
    parameters = {"partitions": 2, "microbatches": NUM_MICROBATCHES}
    if placement == "zigzag":
        parameters |= {"auto_partition": False, "default_partition": 0}
    checker = StepChecker(NUM_STEPS)
    with starting.checking(parameters, checker):
        starting.init()
        try:
            smp_run(case, stages=case.manual_stages(2) if placement == "zigzag" else None)
        except CheckEnded:
            pass
    return checker.reports


@pytest.mark.parametrize("name", one_in(4, [name for name, case in CASES.items() if case.available]))
def test_every_model_is_equal(name: str) -> None:
    reports = check(CASES[name])
    assert [report.texts for report in reports] == [[]] * NUM_STEPS
    assert [report.refused for report in reports] == [""] * NUM_STEPS
    assert reports[0].num_calls > 0
    if CASES[name].exact:
        assert [report.rounded for report in reports] == [[]] * NUM_STEPS


@pytest.mark.parametrize("name", one_in(3, STATE_CASES))
def test_every_state_is_equal(name: str) -> None:
    reports = check(STATE_CASES[name])
    assert [(report.texts, report.refused) for report in reports] == [([], "")] * NUM_STEPS


class _Hooked(nn.Module):
    """Runs Python in its backward, and computes a part of its forward again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return checkpoint(torch.tanh, y, use_reentrant=False)


def test_hooks_and_checkpoints_are_equal() -> None:
    case = Case("hooked", lambda: Around(_Hooked), regression_batch, "Python that a backward runs")
    assert [(report.texts, report.refused) for report in check(case)] == [([], "")] * NUM_STEPS


def _attributes_unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_calls.ModuleCalls, "attribute_set", lambda *_: None)
    patch.setattr(signature.ModuleSignatures, "unheard", lambda *_: None)


def _no_effects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(effects.Effects, "found", lambda self: None)
    patch.setattr(effects, "iterator_among", lambda *_: None)
    for place in (parts, python_state):
        patch.setattr(place, "is_opaque", lambda value: False)


def _no_places(patch: pytest.MonkeyPatch) -> None:
    from smp_lite.record.describe import descriptions

    def none(module: Any, names: Names) -> PlacesRead:
        return PlacesRead([])

    patch.setattr(descriptions, "places_read", none)


def _strangers_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tables.ParameterTable, "_look", lambda self: None)


def _state_out_of_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_buffers.ModuleBuffers, "touched", lambda *_: ())


def _hooks_unnoticed(patch: pytest.MonkeyPatch) -> None:
    original = module_calls._Subtree.look_again

    def look_again(self: Any) -> None:
        original(self)
        self.inner_hooks = []

    patch.setattr(module_calls._Subtree, "look_again", look_again)
    _no_effects(patch)


def _buffers_unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_buffers.ModuleBuffers, "read", lambda self, module, name, value: value)
    patch.setattr(module_buffers.ModuleBuffers, "set", lambda *_: None)


def _defaults_not_carried(patch: pytest.MonkeyPatch) -> None:
    from smp_lite.record.state import ambient

    patch.setattr(ambient, "_SWITCHES", ())
    patch.setattr(ambient, "_GETTERS", ())


SWITCHED_OFF: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "attribute": (_attributes_unheard, "attribute scale is 2.0 when it runs, and was 0.5 when it was called"),
    "attributes": (_attributes_unheard, ""),
    "forward_replaced": (_attributes_unheard, "attribute forward"),
    "mutable_arguments": (_no_effects, ""),
    "auxiliary": (_no_effects, ""),
    "global_log": (_no_effects, ""),
    "generators": (_no_effects, ""),
    "flags": (_no_places, ""),
    "functional_call": (_strangers_unnoticed, ""),
    "hooked_by_forward": (_hooks_unnoticed, ""),
    "moving_twice": (_state_out_of_order, ""),
    "statistics_read": (_buffers_unheard, ""),
    "default_dtype": (_defaults_not_carried, ""),
}


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_a_fix_that_is_switched_off_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch, cause = SWITCHED_OFF[name]
    switch(monkeypatch)
    try:
        reports = check(STATE_CASES[name])
    except Exception as error:  # a fault may also end the step
        pytest.fail(f"{type(error).__name__}: {error}")
    last = reports[-1]
    assert last.differs
    assert cause in last.refused + " ".join(last.texts)


SCRIPT = """
import sys
import torch
import smp_lite as smp
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = [1.0]

    def forward(self, x):
        return self.linear(x) * {scale}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

smp.init({{"partitions": 2, "microbatches": 2}})
model = smp.DistributedModel(Model())
optimizer = {optimizer}

@smp.step
def step(model, x):
    loss = model(x).square().mean()
    {before}
    model.backward(loss)
    return loss

for _ in range(int(sys.argv[2])):
    optimizer.zero_grad()
    step(model, torch.randn(4, 4))
    optimizer.step()
print("not reached" if int(sys.argv[2]) > 2 else "ended")
"""


SGD = "smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=float(sys.argv[1])))"


def run_check(
    tmp_path: Path, *args: str, scale: str = "self.scale[0]", before: str = "pass", optimizer: str = SGD
) -> tuple[int, str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(scale=scale, before=before, optimizer=optimizer))
    command = [sys.executable, "-m", "smp_lite.cli", "check", *args[:-2], str(script), *args[-2:]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    code, text = run_check(tmp_path, "0.1", "5")
    assert code == 0
    assert "equal to the bit over 2 steps: 16 calls, 2 stages" in text
    assert "not reached" not in text


@pytest.mark.slow
def test_steps_and_parameters(tmp_path: Path) -> None:
    code, text = run_check(tmp_path, "--steps", "1", "--parameters", '{"partitions": 4}', "0.1", "5")
    assert code == 0
    assert "equal to the bit over 1 step: 4 calls, 4 stages" in text


@pytest.mark.slow
def test_fewer_steps_than_asked(tmp_path: Path) -> None:
    code, text = run_check(tmp_path, "--steps", "3", "0.1", "2")
    assert code == 0
    assert "equal to the bit over 2 steps" in text


@pytest.mark.slow
def test_a_difference_names_the_call_and_its_line(tmp_path: Path) -> None:
    """What the library cannot see: blocks read a file, which changes after they were called."""
    number = tmp_path / "number.txt"
    number.write_text("1")
    code, text = run_check(
        tmp_path,
        "0.1",
        "5",
        scale=f"float(open({str(number)!r}).read())",
        before=f"n = float(open({str(number)!r}).read()); open({str(number)!r}, 'w').write(str(4 - n))",
    )
    assert code == 1
    assert "step 0 differs from one process" in text
    assert "blocks.0 in microbatch 1 at" in text
    line = (tmp_path / "train.py").read_text().splitlines().index("            x = block(x)") + 1
    assert f"train.py:{line} gives another result" in text
    assert "reads something else that has changed since (a file" in text


@pytest.mark.ci
def test_a_refusal(tmp_path: Path) -> None:
    code, text = run_check(tmp_path, "0.1", "5", before="loss.retain_grad()")
    assert code == 1
    assert "refused in step 0: SMPError: retain_grad() was called inside an smp.step" in text


@pytest.mark.ci
def test_a_script_that_fails_in_plain_torch_too(tmp_path: Path) -> None:
    code, text = run_check(tmp_path, "0.1", "5", before="raise KeyError('mine')")
    assert code == 1
    assert "step 0 fails in one process too: KeyError: 'mine'" in text


@pytest.mark.slow
def test_an_error_between_steps_keeps_its_traceback(tmp_path: Path) -> None:
    code, text = run_check(tmp_path, "0.1", "five")
    line = (tmp_path / "train.py").read_text().splitlines().index("for _ in range(int(sys.argv[2])):") + 1
    assert code == 1
    assert f'train.py", line {line}' in text and "ValueError: invalid literal for int()" in text


@pytest.mark.slow
def test_nobody_has_loaded_numpys_random_numbers_before_the_first_step(tmp_path: Path) -> None:
    """An optimizer of torch's loads them, which another one does not."""
    none = "__import__('types').SimpleNamespace(zero_grad=model.zero_grad, step=bool)"
    code, text = run_check(tmp_path, "0.1", "5", optimizer=none)
    assert code == 0 and "equal to the bit over 2 steps" in text


@pytest.mark.slow
def test_a_script_without_a_step(tmp_path: Path) -> None:
    code, text = run_check(tmp_path, "0.1", "0")
    assert code == 1
    assert "ended without a step" in text


def test_bad_arguments(tmp_path: Path) -> None:
    code, text = run_check(tmp_path, "--steps", "0", "0.1", "5")
    assert code == 2
    assert "--steps 0: compare at least one step" in text


def test_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_LITE_DEVICE", "cuda:0")
    code, text = run_check(tmp_path, "0.1", "5")
    assert code == 2
    assert "SMP_LITE_DEVICE='cuda:0': check compares on the CPU" in text
