"""``config.yaml``: what it holds, that it reads back, and that a reader never sees half of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from smp_lite.cli import main
from smp_lite.config import ConfigError
from smp_lite.errors import SMPError
from smp_lite.systems import load_plan
from smp_lite.systems.dialects.libai_saved import config_tree, config_yaml, save_config

DATA = Path(__file__).parent / "data"


def train(dist: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"train": {"dist": dist or {}, **keys}}


def pipeline(layers: int, stages: int) -> dict[str, Any]:
    return {"pipeline_parallel_size": stages, "pipeline_num_layers": layers}


def test_both_lists_are_there_and_read_back(tmp_path: Path) -> None:
    plan = load_plan(DATA / "libai.py", world_size=8)
    path = save_config(plan, tmp_path)
    saved = yaml.safe_load(path.read_text())["train"]["dist"]
    assert saved["auto_pipeline_stage_id"] == [0] * 6 + [1] * 7 + [2] * 7 + [3] * 4
    assert saved["actual_pipeline_stage_id"] == saved["custom_pipeline_stage_id"]
    again = load_plan(path)
    assert (again.topology, again.stages, again.microbatches) == (
        plan.topology,
        plan.stages,
        plan.microbatches,
    )
    with pytest.raises(ConfigError, match="auto_pipeline_stage_id belongs to another configuration"):
        load_plan(
            path, overrides=["train.dist.pipeline_num_layers=12", "train.dist.custom_pipeline_stage_id=null"]
        )


def test_an_automatic_table() -> None:
    saved = config_tree(load_plan(train(pipeline(8, 4)), world_size=4))["train"]["dist"]
    assert saved["auto_pipeline_stage_id"] == saved["actual_pipeline_stage_id"] == [0, 0, 1, 1, 2, 2, 2, 3]
    assert saved["custom_pipeline_stage_id"] is None


def test_layers_of_the_model() -> None:
    plan = load_plan(train(), world_size=2)
    assert config_tree(plan)["train"]["dist"]["pipeline_num_layers"] is None
    assert "actual_pipeline_stage_id" not in config_tree(plan)["train"]["dist"]
    known = config_tree(plan, (0, 0, 0))["train"]["dist"]
    assert (known["pipeline_num_layers"], known["auto_pipeline_stage_id"]) == (3, [0, 0, 0])
    placed = config_tree(load_plan(train(pipeline(4, 2)), world_size=2), (0, 1, 1, 1))["train"]["dist"]
    assert (placed["auto_pipeline_stage_id"], placed["actual_pipeline_stage_id"]) == (
        [0, 0, 1, 1],
        [0, 1, 1, 1],
    )


def test_every_value_of_train_is_resolved(tmp_path: Path) -> None:
    config = train(
        {"tensor_parallel_size": 2},
        train_micro_batch_size=4,
        global_batch_size=32,
        output_dir=str(tmp_path / "a" / "b"),
        train_iter=10,
        evaluation={"enabled": True, "evaluator": {}, "periods": [1, 2]},
        amp={"enabled": True},
    )
    plan = load_plan(config, world_size=4, overrides=["train.global_batch_size=64"])
    assert plan.notes == ("not about parallelism, left alone: train.evaluation, train.train_iter",)
    path = save_config(plan, tmp_path / "a" / "b")
    saved = yaml.safe_load(path.read_text())["train"]
    assert saved["dist"]["data_parallel_size"] == 2
    assert (saved["num_accumulation_steps"], saved["global_batch_size"]) == (8, 64)
    assert saved["train_iter"] == 10 and saved["amp"] == {"enabled": True}
    assert saved["evaluation"] == {"enabled": True, "evaluator": {}, "periods": [1, 2]}
    assert saved["output_dir"] == str(path.parent) == dict(plan.others)["train.output_dir"]
    assert load_plan(path).others == plan.others


def test_what_is_no_plain_value_is_saved_as_its_text(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        "from libai.scheduler import WarmupCosineLR\n"
        "train = dict(dist=dict(data_parallel_size=1), scheduler=WarmupCosineLR,\n"
        "    betas=(0.9, 0.99))\n"
    )
    saved = yaml.safe_load(config_yaml(load_plan(file, world_size=1)))["train"]
    assert "WarmupCosineLR" in str(saved["scheduler"]) and saved["betas"] == [0.9, 0.99]


@pytest.mark.parametrize("value", [3, "", ["a"], True])
def test_a_folder_is_text(value: object) -> None:
    with pytest.raises(ConfigError, match="output_dir must be the path of a folder"):
        load_plan(train(output_dir=value), world_size=1)


def test_names_beside_train() -> None:
    plan = load_plan({**train(), "model": {"layers": 3}, "optim": None}, world_size=1)
    assert plan.notes == ("not about parallelism, left alone: model, optim",)
    assert load_plan({**train(), "compat": "none"}, world_size=1).notes == ()
    with pytest.raises(ConfigError, match="unknown key 'compatt': did you mean 'compat'"):
        load_plan({**train(), "compatt": "libai"}, world_size=1)
    with pytest.raises(ConfigError, match=r"unknown key 'train.output_dri': did you mean 'output_dir'"):
        load_plan(train(output_dri="x"), world_size=1)


def test_an_earlier_file_is_replaced_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_plan(train(), world_size=1)
    path = save_config(plan, tmp_path)
    first = path.read_text()
    second = load_plan(train(train_micro_batch_size=7), world_size=1)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(SMPError, match=r"config.yaml cannot be written \(No space left on device\)"):
        save_config(second, tmp_path)
    assert path.read_text() == first and os.listdir(tmp_path) == ["config.yaml"]
    monkeypatch.undo()
    (tmp_path / f".config.yaml.{os.getpid()}").write_text("of a process that was killed")
    save_config(second, tmp_path)
    assert "train_micro_batch_size: 7" in path.read_text() and os.listdir(tmp_path) == ["config.yaml"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    plan = load_plan(train(), world_size=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SMPError, match=r"train.output_dir='.*/file/x': .*/config.yaml cannot be written \(Not a "
    ):
        save_config(plan, tmp_path / "file" / "x")
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(SMPError, match="leave output_dir out"):
        save_config(plan, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "file"]


def test_explain_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "libai.yaml"
    file.write_text(yaml.safe_dump(train()))
    model = ("--model", "tests.systems.models:llama")
    assert main(["explain", str(file), "--world-size", "2", "--config-yaml", *model]) == 0
    saved = yaml.safe_load(capsys.readouterr().out)["train"]["dist"]
    assert saved["data_parallel_size"] == 2
    assert saved["auto_pipeline_stage_id"] == [0] * saved["pipeline_num_layers"]
    assert main(["explain", str(file), "--world-size", "2", "--config-yaml", "--as", "colossal"]) != 0
    assert "leave --as out" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text('{"partitions": 2}')
    assert main(["explain", str(other), "--config-yaml", "--world-size", "2"]) != 0
    assert "is SageMaker" in capsys.readouterr().err
