"""Every field of ``TrainingArguments`` is decided, and what is refused is refused by name."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

import smp_lite as smp
from smp_lite.integrations.transformers.table import NO_EFFECT, OPTIMIZERS, REFUSED, WORKS
from tests.harness import run_distributed
from tests.integrations.comparing import CASES
from tests.integrations.trainer_cases import refusal
from tests.integrations.trainer_models import gpt2

ALONE = {"partitions": 1}


def test_each_field_is_decided_once() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    decided = [*WORKS, *NO_EFFECT, *REFUSED]
    assert sorted(fields - set(decided)) == []
    assert len(decided) == len(set(decided))
    assert sorted(set(decided) - fields) == []


def test_optimizers_that_are_taken_are_transformers_own() -> None:
    assert {optimizer.value for optimizer in OptimizerNames} > OPTIMIZERS


ON = {
    "auto_find_batch_size": True,
    "bf16_full_eval": True,
    "ddp_backend": "gloo",
    "ddp_timeout": 60,
    "debug": "underflow_overflow",
    "enable_jit_checkpoint": True,
    "fp16": True,
    "fp16_full_eval": True,
    "torch_compile": True,
    "use_cache": True,
    "use_liger_kernel": True,
}


@pytest.mark.parametrize("name", sorted(ON))
def test_a_refused_argument_is_named_with_a_way_out(tmp_path: Path, name: str) -> None:
    values = {name: ON[name], "use_cpu": True}
    told = refusal(ALONE, str(tmp_path), **values)
    assert told.startswith(f"TrainingArguments({name}=")
    assert told.endswith(REFUSED[name])


def test_what_needs_packages_that_are_not_there_is_refused_as_well() -> None:
    # TrainingArguments themselves do not take these without accelerate's plugins.
    assert {"deepspeed", "fsdp", "parallelism_config"} == REFUSED.keys() - ON.keys()


@pytest.mark.parametrize("optimizer", ["lomo", "galore_adamw", "adamw_bnb_8bit"])
def test_other_optimizers_are_refused(tmp_path: Path, optimizer: str) -> None:
    told = refusal(ALONE, str(tmp_path), optim=optimizer)
    assert f"optim='{optimizer}'" in told and "adamw_torch" in told


def test_a_field_that_is_not_known_may_be_at_its_default_alone(tmp_path: Path) -> None:
    from smp_lite.integrations.transformers import Trainer

    @dataclasses.dataclass
    class More(TrainingArguments):
        warp: int = 1

    smp.init(ALONE)
    net = gpt2()
    Trainer(net, More(output_dir=str(tmp_path)))
    with pytest.raises(smp.SMPError, match=re.escape("TrainingArguments(warp=2)")):
        Trainer(net, More(output_dir=str(tmp_path), warp=2))


@pytest.mark.parametrize(
    ("model", "parameters", "what"),
    [
        ("contrastive", {"partitions": 1, "microbatches": 2}, "the loss of this model over two rows"),
        ("batch-norm", {"partitions": 1, "microbatches": 2}, "norm (BatchNorm1d) takes the statistics"),
    ],
)
def test_a_loss_that_is_not_made_of_rows_is_refused(
    tmp_path: Path, model: str, parameters: dict[str, Any], what: str
) -> None:
    told = refusal(parameters, str(tmp_path), model=model, trains=True)
    assert what in told and '"microbatches": 1' in told
    smp.reset()
    assert refusal({"partitions": 1}, str(tmp_path), model=model, trains=True) == ""


def test_a_job_without_init_is_told() -> None:
    from smp_lite.integrations.transformers import Trainer

    with pytest.raises(smp.SMPError, match=re.escape("call smp.init() first")):
        Trainer(None)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("sys.modules['transformers'] = None", "transformers"),
        ("import transformers; transformers.__version__ = '4.57.1'", "4.57.1 is installed"),
    ],
)
def test_without_transformers_5_the_trainer_says_so(program: str, what: str) -> None:
    hidden = (
        "import importlib.util as u; f = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'transformers' else f(n, *a)"
    )
    first = hidden if what == "transformers" else program
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\n{first}\nfrom smp_lite.integrations.transformers import Trainer",
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "SMPError" in result.stderr and what in result.stderr


@pytest.mark.ci
def test_importing_the_library_imports_no_transformers() -> None:
    program = (
        "import sys, smp_lite, smp_lite.integrations.transformers\nsmp_lite.DistributedModel\n"
        "print({'transformers', 'accelerate'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


@pytest.mark.slow
def test_transformers_own_branch_for_smp_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a SageMaker job transformers takes a branch of its own, which is broken."""
    program = (
        "import smp_lite.integrations.transformers as own\nown.Trainer\n"
        "import transformers.trainer, transformers.training_args\n"
        "print(transformers.trainer.is_sagemaker_mp_enabled(), "
        "transformers.training_args.is_sagemaker_mp_enabled())"
    )
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 2}')
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", '{"sagemaker_mpi_enabled": true}')
    on_path = Path(smp.__file__).parent / "on_path"
    monkeypatch.setenv("PYTHONPATH", f"{on_path}:{Path(smp.__file__).parents[1]}")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False"], result.stderr


@pytest.mark.thorough
def test_arguments_made_before_init_are_told() -> None:
    """accelerate would make of the job's processes replicas of its own."""
    found = run_distributed(f"{CASES}:made_too_early", 2, fresh=True)
    assert all("made before smp.init()" in told for told in found)
