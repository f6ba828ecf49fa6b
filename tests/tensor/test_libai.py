"""LiBai's configurations train unmodified BERT, GPT-2, T5 and ViT of transformers; results equal dense."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.harness import run_distributed
from tests.tensor.libai_cases import NUM_STEPS, loader
from tests.tensor.plans.known_models import FAMILIES, build_known

pytestmark = [pytest.mark.timeout(300), pytest.mark.sampled(3)]

TRAIN = "tests.tensor.libai_cases:train"
LAYERS = {"bert": 2, "gpt2": 2, "t5": 4, "vit": 2}  # a stack of two; T5 has two stacks

BLOCK = re.compile(r"(?:en|de)coder\.block|(?<=layer)\.[01]\.|(?<=layers)\.[01]\.|(?<=\.h)\.[01]\.")

PYTHON = """
from .common.train import train

model = dict(cfg=dict(hidden_layers=2))
train.num_accumulation_steps = 2
train.train_micro_batch_size = 2
train.dist.tensor_parallel_size = 2
train.dist.pipeline_parallel_size = 2
train.dist.pipeline_num_layers = model["cfg"]["hidden_layers"]
"""
YAML = """
train:
  train_micro_batch_size: 2
  num_accumulation_steps: 2
  output_dir: ./output
  dist:
    tensor_parallel_size: 2
    pipeline_parallel_size: 2
    pipeline_num_layers: 4
    custom_pipeline_stage_id: [0, 0, 0, 1]  # the decoder's last block alone
"""


@functools.cache
def dense(name: str, num_replicas: int, num_microbatches: int) -> tuple[list[list[float]], dict[str, Any]]:
    """Losses by replica, and parameters after the last step."""
    model = build_known(name)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    data = [loader(name, NUM_STEPS * num_microbatches, replica) for replica in range(num_replicas)]
    losses: list[list[float]] = [[] for _ in data]
    for step in range(NUM_STEPS):
        optim.zero_grad()
        for found, batches in zip(losses, data, strict=True):
            total = 0.0
            for batch in batches[step * num_microbatches :][:num_microbatches]:
                loss = model(**batch).loss / num_microbatches
                (loss / num_replicas).backward()
                total += loss.item()
            found.append(total)
        optim.step()
    return losses, dict(model.named_parameters())


def check(found: list[dict[str, Any]], name: str, num_microbatches: int) -> None:
    num_replicas = len({rank["replica"] for rank in found})
    losses, parameters = dense(name, num_replicas, num_microbatches)
    assert len(set(losses[0])) == NUM_STEPS
    held = set()
    for rank in found:
        assert rank["losses"] == pytest.approx(losses[rank["replica"]], rel=1e-5)
        for parameter, value in rank["parameters"].items():
            held.add(parameter)
            expected = parameters[parameter]
            assert (value - expected).abs().max() <= 1e-5 * max(1, expected.abs().max()), parameter
    assert held == set(parameters)


def config(tp: int, pp: int, layers: int | None, dp: int | None = None, **train: Any) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "pipeline_num_layers": layers}
    if dp is not None:
        sizes["data_parallel_size"] = dp
    return {"train": {"dist": sizes, "train_micro_batch_size": 2, **train}}


def run(world_size: int, given: Any, name: str, *overrides: str, **more: Any) -> list[Any]:
    kwargs = {"config": given, "name": name, "overrides": overrides, **more}
    return run_distributed(TRAIN, world_size, kwargs=kwargs, timeout_s=30 * world_size)  # imports take long


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_and_pipeline(name: str) -> None:
    found = run(4, config(2, 2, LAYERS[name], num_accumulation_steps=2), name)
    check(found, name, 2)
    for rank in found:
        assert len(rank["split"]) >= 6  # attention and feed-forward of a layer
        blocks = {found[0] for each in rank["parameters"] if (found := BLOCK.search(each))}
        stage = rank["stage"]
        assert blocks == ({f"{('encoder', 'decoder')[stage]}.block"} if name == "t5" else {f".{stage}."})


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        *(
            pytest.param(each, 2, 1, marks=() if each == "gpt2" else pytest.mark.thorough)
            for each in FAMILIES
        ),
        *(pytest.param(each, 1, 2, marks=() if each == "vit" else pytest.mark.thorough) for each in FAMILIES),
    ],
)
def test_data_with_one_of_the_two(name: str, tp: int, pp: int) -> None:
    found = run(4, config(tp, pp, LAYERS[name] if pp > 1 else None, 2), name)
    check(found, name, 1)
    assert {rank["replica"] for rank in found} == {0, 1}
    assert all(bool(rank["split"]) == (tp > 1) for rank in found)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_script_of_another_system_splits_them_without_a_plan(name: str) -> None:
    given = {"partitions": 2, "tensor_parallel_degree": 2, "prescaled_batch": True, "ddp": True}
    found = run(4, given, name)
    check(found, name, 1)
    assert {rank["stage"] for rank in found} == {0, 1}
    assert any(rank["split"] for rank in found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_all_three(name: str) -> None:
    found = run(8, config(2, 2, LAYERS[name], 2, num_accumulation_steps=2), name)
    check(found, name, 2)
    assert {rank["replica"] for rank in found} == {0, 1}


@pytest.mark.ci
def test_a_python_file(tmp_path: Path) -> None:
    file = tmp_path / "bert.py"
    file.write_text(PYTHON)
    found = run(4, str(file), "bert")
    check(found, "bert", 2)
    assert found[0]["split"]


@pytest.mark.slow
def test_a_yaml_file_with_a_table_of_stages_and_changes(tmp_path: Path) -> None:
    """The bias of T5's scores is made on one stage and used on the next."""
    file = tmp_path / "t5.yaml"
    file.write_text(YAML)
    found = run(4, str(file), "t5", f"train.output_dir={tmp_path}/out", "train.num_accumulation_steps=1")
    check(found, "t5", 1)
    last = {each for rank in found if rank["stage"] == 1 for each in rank["parameters"]}
    blocks = {each for each in last if "block" in each}
    assert blocks and all(each.startswith("decoder.block.1.") for each in blocks)
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["train"]
    assert saved["dist"]["auto_pipeline_stage_id"] == [0, 0, 1, 1]
    assert saved["dist"]["actual_pipeline_stage_id"] == [0, 0, 0, 1]
    assert (saved["num_accumulation_steps"], saved["output_dir"]) == (1, f"{tmp_path}/out")


@pytest.mark.ci
def test_what_all_ranks_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = run(4, config(2, 2, 2, output_dir=str(tmp_path / "file")), "bert")
    assert len(set(told)) == 1 and re.search(r"train.output_dir='.*/file': .* cannot be written", told[0])
    told = run(4, config(2, 2, 2, output_dir=str(tmp_path / "out")), "bert", dropout=0.1)
    assert all(re.search(r"BertSelfAttention\) applies dropout \(self.dropout=0.1\)", each) for each in told)
    assert not (tmp_path / "out").exists()
    told = run(4, config(2, 2, 3), "bert")
    assert all("is for 3 layers, and no lists of the model have so many" in each for each in told)


@pytest.mark.parametrize(
    ("train", "first", "second"),
    [
        ({"train_micro_batch_size": 2}, "", "train.train_micro_batch_size means 2 samples in a microbatch"),
        (
            {"train_micro_batch_size": 2, "global_batch_size": 8},
            "",
            "train.global_batch_size (8 samples, 2 x 2 microbatches) means 2 samples in a microbatch, and "
            "those of this step have 3",
        ),
        (
            {"num_accumulation_steps": 2},
            "train.train_micro_batch_size is not said, and by default 32 samples in a microbatch, and those "
            "of this step have 2",
            "have 3",
        ),
    ],
)
def test_batch_sizes_are_held_against_the_loader(train: dict[str, Any], first: str, second: str) -> None:
    """In steps with a backward: evaluation may have others."""
    given = {"train": {"dist": {}, **train}}
    kwargs = {"config": given, "rows": [2, 3]}
    found = run_distributed("tests.tensor.libai_cases:sizes", 2, kwargs=kwargs)
    for rank, (one, other) in enumerate(found):
        if rank:  # a warning is rank 0's
            assert (one, other) == ("", "")
        else:
            assert first in one and bool(first) == bool(one)
            assert second in other
