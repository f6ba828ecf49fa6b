"""What scripts of SMP v1 find: the package of its name, a job's variables, and CUDA where it is asked for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from .alias import add_alias

__all__ = ["CUDA_AS_CPU_VARIABLE", "add_cuda_argument", "job_variables", "prepare", "prepare_here"]

CUDA_AS_CPU_VARIABLE = "SMP_LITE_CUDA_AS_CPU"
"""``1``: "cuda" means the CPU (:mod:`.cuda_as_cpu`), which ``smp-lite run --cuda-as-cpu`` sets."""


def add_cuda_argument(parser: argparse.ArgumentParser) -> None:
    """The switch of the commands that run a script."""
    parser.add_argument(
        "--cuda-as-cpu",
        action="store_true",
        help="for scripts that speak of CUDA: its functions do nothing, and its devices mean the CPU",
    )


def job_variables(folder: str, *, num_cpus: int, num_gpus: int) -> dict[str, str]:
    """The variables of a training job that scripts read while they are imported, where there is no job.

    transformers takes SM_FRAMEWORK_PARAMS, beside the parameters, for the sign of model parallelism.

    Args:
        folder: below it, ``model``, ``output``, ``data/train`` and ``data/test`` stand for a job's folders;
            none of them is made.
        num_cpus, num_gpus: of this machine.
    """
    train, test = (f"{folder}/data/{name}" for name in ("train", "test"))
    return {
        "SM_FRAMEWORK_PARAMS": '{"sagemaker_mpi_enabled":true}',
        "SM_HOSTS": '["localhost"]',
        "SM_CURRENT_HOST": "localhost",
        "SM_NUM_CPUS": str(num_cpus),
        "SM_NUM_GPUS": str(num_gpus),
        "SM_MODEL_DIR": f"{folder}/model",
        "SM_OUTPUT_DATA_DIR": f"{folder}/output",
        "SM_CHANNEL_TRAIN": train,
        "SM_CHANNEL_TRAINING": train,
        "SM_CHANNEL_TEST": test,
        "SM_CHANNEL_TESTING": test,
    }


def prepare_here(*, cuda_as_cpu: bool) -> None:
    """Readies this process, which is going to run a script itself, as :func:`prepare` readies a rank."""
    if cuda_as_cpu:
        os.environ[CUDA_AS_CPU_VARIABLE] = "1"
    found = job_variables(os.getcwd(), num_cpus=os.cpu_count() or 1, num_gpus=int(cuda_as_cpu))
    for name, value in found.items():
        os.environ.setdefault(name, value)
    prepare(os.environ)


def prepare(environment: Mapping[str, str]) -> None:
    """Readies this process for a script of SMP v1.

    Raises:
        ValueError: another ``smdistributed.modelparallel`` is installed, or the variable is wrong.
    """
    add_alias()
    asked = environment.get(CUDA_AS_CPU_VARIABLE) or "0"
    if asked not in ("0", "1"):
        raise ValueError(f"{CUDA_AS_CPU_VARIABLE}={asked!r}: it must be '1' or '0'")
    if asked == "1":
        from .cuda_as_cpu import turn_on  # imports torch

        turn_on()
