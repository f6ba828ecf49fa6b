"""What scripts of SMP v1 find: the package of its name, a job's variables, and CUDA where it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from .alias import add_alias

__all__ = [
    "CUDA_AS_CPU_VARIABLE",
    "add_cuda_argument",
    "asks_for_cpu",
    "job_variables",
    "prepare",
    "prepared_here",
]

CUDA_AS_CPU_VARIABLE = "SMP_LITE_CUDA_AS_CPU"
"""``1``: "cuda" means the CPU (:mod:`.cuda_as_cpu`), which ``smp-lite run --cuda-as-cpu`` sets."""

_SUBSCRIPT = re.compile(r"""\[\s*["'](SM_[A-Z_]+)["']\s*\]""")


def add_cuda_argument(parser: argparse.ArgumentParser) -> None:
    """The switch of the commands that run a script."""
    parser.add_argument(
        "--cuda-as-cpu",
        action="store_true",
        help="for scripts that speak of CUDA: its functions do nothing, and its devices mean the CPU",
    )


def job_variables(script: Path | None, folder: str, *, num_cpus: int, num_gpus: int) -> dict[str, str]:
    """The variables of a training job that a script takes for granted, where there is no job.

    AWS's scripts read ``os.environ["SM_MODEL_DIR"]`` while they are imported. A script that asks whether it
    is in a job (``os.environ.get``) is told that it is not, so only what is read without asking is there.

    Args:
        script: its file; the Python files beside it are its modules. None: not known.
        folder: below it, ``model``, ``output``, ``data/train`` and ``data/test`` stand for a job's folders;
            none of them is made.
        num_cpus, num_gpus: of this machine.
    """
    train, test = (f"{folder}/data/{name}" for name in ("train", "test"))
    values = {
        "SM_HOSTS": '["localhost"]',
        "SM_CURRENT_HOST": "localhost",
        "SM_NUM_CPUS": str(num_cpus),
        "SM_NUM_GPUS": str(num_gpus),
        "SM_MODEL_DIR": f"{folder}/model",
        "SM_OUTPUT_DATA_DIR": f"{folder}/output",
        "SM_OUTPUT_DIR": f"{folder}/output",
        "SM_CHANNEL_TRAIN": train,
        "SM_CHANNEL_TRAINING": train,
        "SM_CHANNEL_TEST": test,
        "SM_CHANNEL_TESTING": test,
    }
    read = _read_without_asking(script) if script is not None else set()
    # transformers takes this one, beside the parameters, for the sign of model parallelism.
    sign = {"SM_FRAMEWORK_PARAMS": '{"sagemaker_mpi_enabled":true}'}
    return {**sign, **{name: value for name, value in values.items() if name in read}}


def _read_without_asking(script: Path) -> set[str]:
    texts = map(_text_of, {script, *script.parent.glob("*.py")})
    return {name for text in texts for name in _SUBSCRIPT.findall(text)}


def _text_of(path: Path) -> str:
    """Empty where nothing can be imported from: a folder of such a name, an editor's lock (a link to
    nowhere), a file of somebody else's.
    """
    try:
        return path.read_bytes().decode(errors="replace") if path.is_file() else ""
    except OSError:
        return ""


@contextlib.contextmanager
def prepared_here(script: str, *, cuda_as_cpu: bool) -> Iterator[None]:
    """Within: this process, which runs a script itself, is ready as :func:`prepare` makes a rank.

    The environment is as it was afterwards.
    """
    found = job_variables(Path(script), os.getcwd(), num_cpus=os.cpu_count() or 1, num_gpus=int(cuda_as_cpu))
    found.pop("SM_FRAMEWORK_PARAMS")  # a Trainer of transformers would wait for ranks that are not there
    if cuda_as_cpu:
        found[CUDA_AS_CPU_VARIABLE] = "1"
    new = [name for name in found if name not in os.environ]
    os.environ.update({name: found[name] for name in new})
    try:
        prepare(os.environ)
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def prepare(environment: Mapping[str, str]) -> None:
    """Readies this process for a script of SMP v1.

    Raises:
        ValueError: another ``smdistributed.modelparallel`` is installed, or the variable is wrong.
    """
    add_alias()
    if asks_for_cpu(environment):
        from .cuda_as_cpu import turn_on  # imports torch

        turn_on()


def asks_for_cpu(environment: Mapping[str, str]) -> bool:
    """Whether the variable says that "cuda" means the CPU.

    Raises:
        ValueError: it says something else.
    """
    asked = environment.get(CUDA_AS_CPU_VARIABLE) or "0"
    if asked not in ("0", "1"):
        raise ValueError(f"{CUDA_AS_CPU_VARIABLE}={asked!r}: it must be '1' or '0'")
    return asked == "1"
