"""``smp-lite plan --config``: stages, pictures and memory for a file of any system, without ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from smp_lite import session
from smp_lite.cli import main
from smp_lite.systems.showing.text_parts import WIDTH as SCREEN

MODELS = "tests.systems.split_models"
SCRIPT = str(Path(__file__).parent / "data" / "train_net.py")
Plan = Callable[..., str]


def mapping(stages: int, shards: int) -> dict[str, dict[str, str]]:
    return {f"stage_{s}": {f"shard_{k}": f"dtu:{5 * s + k}" for k in range(shards)} for s in range(stages)}


FILES = {
    "sagemaker.json": json.dumps({"partitions": 2, "microbatches": 4}),
    "enflame.json": json.dumps(
        {
            "mode": "sharding",
            "sharding_size": 4,
            "sharding_dim": -1,
            "stage_cnt": 8,
            "accum_degree": 1,
            "device_mapping": mapping(8, 4),
        }
    ).replace("}}}", "}},}"),
    "colossal.py": "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))\nnum_microbatches = 4\n",
    "libai.py": "from .common.train import train\n"
    "train.dist.pipeline_parallel_size = 4\n"
    "train.dist.tensor_parallel_size = 2\n"
    "train.dist.pipeline_num_layers = 8\n"
    "train.num_accumulation_steps = 2\n"
    "train.train_micro_batch_size = 8\n",
    "torchprime.yaml": "ici_mesh: {data: 2, tensor: 2}\n"
    "sharding:\n"
    "  blocks.*.up.weight: [tensor, null]\n"
    "  blocks.*.down.weight: [null, tensor]\n",
}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the command where the files are; its output, or its error."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")

    def run(*words: str, code: int = 0) -> str:
        assert main(["plan", *words]) == code
        out, err = capsys.readouterr()
        assert not session.is_initialized()
        return err if code else out

    return run


def parameter_bytes(text: str) -> list[str]:
    """Of the memory table, by stage."""
    table = text[text.index("memory of one rank") :]
    return re.findall(r"^ +\d+ +[\d.]+ \w+  \S.*?  ([\d.]+ \w+)  ", table, re.MULTILINE)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("words", "ranks", "stages", "said"),
    [
        (("sagemaker.json",), 2, 2, "partitions, sagemaker.json"),
        (("enflame.json",), 32, 8, "sharding_dim, enflame.json"),
        (("colossal.py", "--world-size", "16"), 16, 2, "num_microbatches, colossal.py"),
        (("libai.py", "--world-size", "16"), 16, 4, "libai.py:2"),
        (("torchprime.yaml",), 4, 1, "ici_mesh.tensor, torchprime.yaml"),
    ],
)
def test_every_dialect_is_planned(
    words: tuple[str, ...], ranks: int, stages: int, said: str, plan: Plan
) -> None:
    text = plan("--config", *words, f"{MODELS}:net8")
    assert re.search(rf"^ranks +{ranks} ", text, re.MULTILINE)
    assert said in text
    assert len(re.findall(r"^stage \d+  .*F0", text, re.MULTILINE)) == stages
    assert len(parameter_bytes(text)) == stages
    shared = re.search(r"each stage is shared by (\d+) ranks", text)
    assert (int(shared[1]) if shared else 1) == {2: 1, 32: 4, 16: 8 // stages, 4: 2}[ranks]
    assert max(map(len, text.splitlines())) <= SCREEN


def test_split_parameters_are_counted_by_rank(plan: Plan) -> None:
    """Four blocks of 16 x 64: 2 x 1024 weights and 64 biases each are split, the rest is not."""
    per_block, whole = 2 * 16 * 64 + 64, 4 * (16 + 2 * 16) + (16 * 16 + 16) + (8 * 16 + 8)
    for size in (1, 2, 4):
        tensor = f", tensor=dict(size={size}, mode='1d')" if size > 1 else ""
        Path("one.py").write_text(f"parallel = dict(pipeline=1{tensor})\n")
        text = plan("--config", "one.py", "--world-size", str(size), f"{MODELS}:net")
        num_bytes = 4 * (4 * per_block // size + whole)
        assert parameter_bytes(text) == [f"{num_bytes / 1024:.1f} KiB"]
        assert "gradients reduced" not in text  # there is one replica
        assert "every rank holds the whole model as it was built: 35.3 KiB" in text
        if size > 1:
            assert f"of all stages are {num_bytes / 1024:.1f} KiB of the model's 35.3 KiB" in " ".join(
                text.split()
            )
            assert "16 modules" not in text and "blocks.*.up: colwise (4 modules)" in text
            assert "derived, since none came with it" in text


def test_replicas_need_buckets(plan: Plan) -> None:
    text = plan("--config", "colossal.py", "--world-size", "16", f"{MODELS}:net")
    assert "gradients reduced" in text and "replicas are assumed" not in text
    assert "gradients reduced" not in plan("--config", "colossal.py", "--world-size", "8", f"{MODELS}:net")


@pytest.mark.slow
def test_what_a_step_takes_from_the_loader(plan: Plan) -> None:
    """A configuration that consumes batches gets as many of them; one that cuts a batch gets that."""
    work = []
    for count in (1, 2):
        text = plan("--config", "libai.py", "--world-size", "8", f"train.num_accumulation_steps={count}",
                    f"{MODELS}:net8")  # fmt: skip
        found = re.search(r"^work of all stages +([\d.]+) GFLOP", text, re.MULTILINE)
        assert found
        work.append(float(found[1]))
    assert work[1] == pytest.approx(2 * work[0], rel=0.01)


@pytest.mark.slow
def test_changes_and_options_may_stand_anywhere_before_the_model(plan: Plan) -> None:
    first = plan("--config", "colossal.py", "parallel.pipeline=4", "--world-size", "16", f"{MODELS}:net8")
    assert first == plan("--config", "colossal.py", "--world-size", "16", f"{MODELS}:net8",
                         "parallel.pipeline=4")  # fmt: skip
    assert "parallel.pipeline, command line" in first
    assert len(parameter_bytes(first)) == 4


def test_a_script_may_bring_the_configuration(plan: Plan) -> None:
    given = json.dumps({"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}})
    text = plan("--world-size", "4", SCRIPT, "--parameters", given)
    assert "Colossal-AI: given by the script" in text
    assert "each stage is shared by 2 ranks (tp 2)" in text and len(parameter_bytes(text)) == 2


@pytest.mark.slow
def test_the_order_in_which_things_run_is_told_where_it_is_another(plan: Plan) -> None:
    text = plan("--config", "enflame.json", "accum_degree=2", f"{MODELS}:net8")
    assert "- mode: one stage at a time is asked for" in text
    few = {f"stage_{s}": {f"shard_{k}": f"dtu:{k + 2 * (s // 2)}" for k in range(2)} for s in range(4)}
    Path("few.json").write_text(json.dumps({"mode": "hybrid", "sharding_size": 2, "stage_cnt": 4,
                                            "device_mapping": few}))  # fmt: skip
    text = plan("--config", "few.json", f"{MODELS}:net")
    assert "the 4 stages are on 2 ranks of a pipeline" in text


def test_sharded_parameters_are_told_to_be_counted_whole(plan: Plan) -> None:
    Path("sharded.yaml").write_text("ici_mesh: {fsdp: 4}\nsharding: {embed.weight: [fsdp, null]}\n")
    text = plan("--config", "sharded.yaml", f"{MODELS}:net")
    assert "sharding (the rules use fsdp): sharded parameters are counted whole" in text
    assert "one of 4 pieces" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--config", "colossal.py", f"{MODELS}:net"), "the number of ranks is not known"),
        (
            ("--config", "colossal.py", "--world-size", "12", f"{MODELS}:net"),
            "12 ranks are not a multiple of",
        ),
        (
            ("--config", "colossal.py", "parallel.pipelin=4", "--world-size", "8", f"{MODELS}:net"),
            "unknown key 'parallel.pipelin': did you mean 'pipeline'? [command line]",
        ),
        (
            ("parallel.pipeline=4", f"{MODELS}:net"),
            "parallel.pipeline=4 changes a configuration, but there is",
        ),
        (("--config", "colossal.py", "parallel.pipeline=4"), "no script after parallel.pipeline=4"),
        (("--dialect", "libai", f"{MODELS}:net"), "--dialect libai says whose configuration"),
        (("--config", "sagemaker.json", "--parameters", "{}", f"{MODELS}:net"), "are two configurations"),
        (("--config", "nofile.json", f"{MODELS}:net"), "'nofile.json' is not a file"),
        (
            ("--config", "colossal.py", "--dialect", "libai", "--world-size", "8", f"{MODELS}:net"),
            "colossal.py defines no train",
        ),
        (
            ("--config", "colossal.py", "--world-size", "8", f"{MODELS}:nothing_safe"),
            "no plan can be derived that is certainly safe: give one",
        ),
        (
            ("--config", "libai.py", "--world-size", "8", f"{MODELS}:net"),
            "the configuration is for 8 layers, and no lists of the model have so many",
        ),
        (("--config", "enflame.json", "sharding_dim=1", f"{MODELS}:net"), "Got sharding_dim=1 (int)"),
    ],
)
def test_errors_quote_the_users_key(words: tuple[str, ...], told: str, plan: Plan) -> None:
    text = plan(*words, code=2)
    assert text.startswith("smp-lite plan: ") and told in text


def test_another_configuration_in_the_environment_is_refused(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 2}')
    assert "SM_HP_MP_PARAMETERS is set too: unset it" in plan(
        "--config", "sagemaker.json", f"{MODELS}:net", code=2
    )
    parameters = ("--parameters", '{"partitions": 2}')
    said = "--parameters, but the environment variable {} is set too: unset it"
    assert said.format("SM_HP_MP_PARAMETERS") in plan(*parameters, f"{MODELS}:net", code=2)
    monkeypatch.delenv("SM_HP_MP_PARAMETERS")
    monkeypatch.setenv("SMP_LITE_CONFIG", "{}")
    assert said.format("SMP_LITE_CONFIG") in plan(*parameters, f"{MODELS}:net", code=2)
