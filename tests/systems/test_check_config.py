"""``smp-lite check --config``: ranks that share stages against one process, on whole values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from smp_lite import session
from smp_lite.check.dense_run import plan_of_one_process
from smp_lite.check.in_ranks import file_of_failure, file_of_setting, file_of_step
from smp_lite.check.module_calls import ModuleCalls, outlines_differ
from smp_lite.check.rank_notes import RankNotes
from smp_lite.check.whole_values import Comparison
from smp_lite.cli import main
from smp_lite.systems import load_plan
from smp_lite.systems.showing.text_parts import WIDTH as SCREEN

ROOT = Path(__file__).parents[2]
MODELS = "tests.systems.split_models"
SCRIPT = str(Path(__file__).parent / "data" / "train_net.py")
SHARED = {"partitions": 1, "tensor_parallel_degree": 2, "prescaled_batch": True, "ddp": True}
Check = Callable[..., str]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Check:
    """Runs the command from the repository's root with a configuration; its output."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(ROOT))

    def run(config: str | dict[str, Any] | None, *words: str, code: int = 0) -> str:
        given: tuple[str, ...] = ()
        if config is not None:
            is_python = isinstance(config, str) and " = " in config
            path = tmp_path / (
                "config.py" if is_python else "config.json" if isinstance(config, dict) else "c.yaml"
            )
            path.write_text(config if isinstance(config, str) else json.dumps(config))
            given = ("--config", str(path))
        environment = dict(os.environ)
        found = main(["check", *given, *words])
        assert os.environ == environment
        out, err = capfd.readouterr()
        assert found == code, out + err
        assert not session.is_initialized()
        return " ".join((out + err).split())

    return run


COLOSSAL = "parallel = dict(tensor=dict(size=2, mode='1d'))\n"


@pytest.mark.slow
def test_a_derived_plan_is_proved_in_one_command(check: Check) -> None:
    text = check(COLOSSAL, "--world-size", "2", f"{MODELS}:net")
    assert "plan of the layers: derived, since none came with it" in text
    assert "blocks.*.up: colwise (4 modules) blocks.*.down: rowwise (4 modules)" in text
    assert "equal over 2 steps on 2 ranks (tp 2), up to rounding" in text
    assert "results of 1 batch a step, 28 gradients, put together where ranks have parts, and what" in text


@pytest.mark.slow
def test_a_wrong_plan_is_red_and_names_the_module(check: Check) -> None:
    text = check(COLOSSAL, "--world-size", "2", f"{MODELS}:wrong_plan", code=1)
    assert "step 0 differs from one process" in text
    assert (
        "1.down is the first module that gives something else (its call 0), after 1.up, of which each rank "
        "has a part" in text
    )
    assert "the gradient of 0.up.weight differs by" in text
    assert "plan of the layers: the one that comes with the model" in text


@pytest.mark.slow
def test_layers_of_a_grid_are_dense_in_one_process(check: Check) -> None:
    grid = {"parallel": {"tensor": {"size": 4, "mode": "2d"}}}
    text = check(grid, "--world-size", "4", f"{MODELS}:on_a_grid")
    assert "equal over 2 steps on 4 ranks (tp_row 2 x tp_col 2), up to rounding" in text
    text = check(grid, "--world-size", "4", f"{MODELS}:across_a_grid", code=1)
    assert "step 0 differs from one process" in text


@pytest.mark.slow
def test_rowwise_without_its_colwise_names_the_module(check: Check) -> None:
    plan = json.dumps({"blocks.*.down": "rowwise"})
    words = ("--parameters", json.dumps(SHARED), "--split", plan)
    text = check(None, SCRIPT, *words, code=1)
    assert "refused in step 0 on rank 0 in blocks.0.down" in text or (
        "refused in step 0 on rank 1 in blocks.0.down" in text
    )
    assert "shapes cannot be multiplied" in text


@pytest.mark.thorough
def test_replicas_and_what_the_optimizer_does(check: Check) -> None:
    """LiBai's, with two replicas that have batches of their own; and an optimizer that depends on them."""
    libai = {"train": {"num_accumulation_steps": 2, "train_micro_batch_size": 8, "dist": {}}}
    wrong = check(libai, "--world-size", "2", SCRIPT, "--rate-by-rank", code=1)
    assert "step 1 differs from one process" in wrong and "the optimizer changes" in wrong


@pytest.mark.parametrize("mode", ["pipeline", "simple"])
def test_what_one_process_can_play_is_compared_to_the_bit(mode: str, check: Check) -> None:
    if mode == "pipeline":
        config: dict[str, Any] = {"mode": "pipeline", "sharding_size": 1, "stage_cnt": 2, "accum_degree": 2}
    else:
        config = {"partitions": 2, "microbatches": 2, "pipeline": "simple"}
    text = check(config, f"{MODELS}:net")
    assert "equal to the bit over 2 steps" in text and "2 stages" in text


CASES: dict[str, tuple[str | dict[str, Any], tuple[str, ...], str]] = {
    "sagemaker": (
        {**SHARED, "partitions": 2},
        ("--world-size", "4", SCRIPT, "--split", "null"),
        "pp 2 x tp 2",
    ),
    "enflame": (
        {"mode": "hybrid", "sharding_size": 2, "sharding_dim": 0, "stage_cnt": 2, "accum_degree": 2},
        (f"{MODELS}:net",),
        "pp 2 x tp 2",
    ),
    "colossal": (
        "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\nnum_microbatches = 2\n",
        ("--world-size", "4", SCRIPT),
        "pp 2 x tp 2",
    ),
    "libai": (
        {"train": {"dist": {"tensor_parallel_size": 2}, "train_micro_batch_size": 8}},
        ("--world-size", "4", SCRIPT),
        "dp 2 x tp 2",
    ),
    "torchprime": (
        "ici_mesh: {fsdp: 2, tensor: 2}\n"
        "sharding:\n"
        "  blocks.*.up.weight: [tensor, fsdp]\n"
        "  blocks.*.down.weight: [fsdp, tensor]\n",
        (SCRIPT,),
        "fsdp 2 x tensor 2",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_every_dialect_is_checked(name: str, check: Check) -> None:
    config, words, axes = CASES[name]
    text = check(config, *words)
    assert f"equal over 2 steps on 4 ranks ({axes})" in text
    assert "put together where ranks have parts" in text


@pytest.mark.thorough
def test_weights_that_differ_by_rank_are_red(check: Check) -> None:
    text = check(COLOSSAL, "--world-size", "2", SCRIPT, "--weights-by-rank", code=1)
    assert " more begin with other numbers than in one process" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--world-size", "2", "nothing.py"), "'nothing.py' is not a file"),
        (("--world-size", "3", "parallel.pipeline=2", f"{MODELS}:net"), "3 ranks are not a multiple"),
        (("--world-size", "2", "--input", "int64[2]", SCRIPT), "--input is for a package:function"),
        (("--world-size", "2", "--steps", "0", f"{MODELS}:net"), "--steps 0"),
        ((f"{MODELS}:net",), "the number of ranks is not known"),
    ],
)
def test_errors_come_before_ranks(words: tuple[str, ...], told: str, check: Check) -> None:
    assert told in check(COLOSSAL, *words, code=2)


# The parts --------------------------------------------------------------------------------------------------


def test_one_process_has_all_of_a_plan_but_its_ranks() -> None:
    given = {"train": {"dist": {"tensor_parallel_size": 2}, "num_accumulation_steps": 3}}
    plan = load_plan(given, world_size=8)
    one = plan_of_one_process(plan)
    assert (plan.world_size, one.world_size, one.pp_size, one.tp_size, one.dp_size) == (8, 1, 1, 1, 1)
    assert one.microbatches == plan.microbatches and one.microbatches.source == "consume"
    assert one.shard_axes == () and one.data_parallel.policy == "none"


def test_whole_values_are_compared_up_to_rounding() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2), "c": None, "d": torch.ones(1)}
    compared = Comparison()
    near = {**one, "a": torch.tensor([1.0, 2.00001]), "b": torch.tensor([1e-7, 0.0])}
    assert compared.all_of("the gradient", one, near) == [] and compared.texts == []
    assert 0 < compared.largest < 1e-4
    far = {"a": torch.tensor([1.0, 2.01]), "b": torch.zeros(3), "c": torch.zeros(1), "e": torch.ones(1)}
    assert compared.all_of("the gradient", one, far) == ["a", "b", "c", "d", "e"]
    assert [text.split(" of ")[1].split()[0] for text in compared.texts] == ["a", "b", "c", "d", "e"]
    assert "2.01 instead of 2" in compared.texts[0] and "on the ranks only" in compared.texts[2]
    for found in (torch.tensor([float("nan"), 2.0]), torch.tensor([float("inf"), 2.0])):
        assert not Comparison().tensors("x", one["a"], found)  # type: ignore[arg-type]
    assert Comparison().tensors("x", torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not Comparison().tensors("x", torch.tensor([1]), torch.tensor([2]))


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("mine")


def test_calls_of_modules_are_outlined_and_the_failing_one_is_known() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), _Fails()))
    calls, again = ModuleCalls(model), ModuleCalls(model)
    x = torch.randn(2, 4)
    for each in (calls, again):
        with each.listening(), pytest.raises(ArithmeticError) as caught:
            model(x)
    assert list(calls.outlines) == ["0", "1.0"] and calls.outlines["0"][0][0].shape == (2, 4)
    assert not outlines_differ(calls.outlines["0"][0], again.outlines["0"][0], 0.0)
    wrapped = RuntimeError("around")
    wrapped.__cause__ = caught.value
    assert again.module_of(wrapped) == "1.1" and again.module_of(ValueError()) == ""
    swapped = ModuleCalls(model)
    with swapped.listening():
        model[0](x.flip(0))  # the same norm
    assert outlines_differ(calls.outlines["0"][0], swapped.outlines["0"][0], 1e-3)


def test_the_notes_of_ranks_are_put_together(tmp_path: Path) -> None:
    """Two stages of two ranks: whole tensors from the first of each, norms from the other."""
    for rank in range(4):
        speaks = rank % 2 == 0
        name = "front" if rank < 2 else "back"
        tensors = {name: torch.full((2,), float(rank))} if speaks else {name: 1.0}
        notes: dict[str, Any] = {"replica": (0,), "weights": tensors, "gradients": tensors}
        if speaks:
            notes |= {"buffers": {}, "calls": {}}
        if rank == 0:
            notes |= {"inputs": [[None]], "random": (), "result": []}
        torch.save(notes, file_of_step(tmp_path, rank, 0))
    found = RankNotes(tmp_path, 4)
    assert (found.num_steps, found.failure, found.setting) == (1, None, None)
    step = found.step(0)
    assert {name: value.tolist() for name, value in step.weights.items()} == {
        "front": [0.0, 0.0],
        "back": [2.0, 2.0],
    }
    assert sorted(step.others) == [1, 3] and len(step.replicas) == 1
    for rank, is_of_another in ((1, True), (3, False)):
        said = {"step": 1, "text": f"E: {rank}", "module": "m", "is_of_another": is_of_another, "trace": ""}
        file_of_failure(tmp_path, rank).write_text(json.dumps(said))
    torch.save({"plan": None}, file_of_setting(tmp_path))
    failure = RankNotes(tmp_path, 4).failure
    assert failure is not None and (failure.rank, failure.text) == (3, "E: 3")


def test_screens_are_narrow() -> None:
    from smp_lite.check.over_ranks import _wrapped

    assert max(map(len, _wrapped("word " * 60, "  ").splitlines())) <= SCREEN
