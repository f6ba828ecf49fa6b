"""What this relies on in transformers and accelerate, and what of them it keeps out of the way.

Every rank is, to transformers, a job of one process that trains on the whole batch; only the steps, the files
and the decisions are distributed, and that here. Two things would think otherwise:

- transformers has a branch of its own for SMP (``is_sagemaker_mp_enabled``), taken where a SageMaker job's
  variables are set. It is for SMP's original, goes through accelerate since 4.29, and is broken there.
- accelerate looks at the launcher's variables (``OMPI_COMM_WORLD_SIZE``, ``LOCAL_RANK``) as soon as
  ``TrainingArguments`` are made, and would start a process group of its own for ``use_cpu=True``.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from typing import Any

from ... import session as session_module
from ...errors import SMPError
from .table import REFUSED, refused

__all__ = ["alone", "prepare"]

LEAST_TRANSFORMERS = 5


def prepare() -> None:
    """To be called before :mod:`transformers.trainer` is used.

    Raises:
        SMPError: transformers or accelerate is missing, or of another kind than this is written for.
    """
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise SMPError(
                f"smp_lite.integrations.transformers needs {package}, which is not installed: "
                "pip install 'transformers>=5,<6' accelerate"
            )
    import transformers

    if int(transformers.__version__.split(".")[0]) != LEAST_TRANSFORMERS:
        raise SMPError(
            f"smp_lite.integrations.transformers is for transformers 5, and {transformers.__version__} is "
            "installed: pip install 'transformers>=5,<6'. (The Trainer of 4.28 has SMP v1 built in, and "
            "runs as "
            "it is)"
        )
    _leave_smp_branch()
    _leave_launcher_to_smp()


def _never() -> bool:
    return False


def _leave_smp_branch() -> None:
    """transformers asks that question by name in each of its modules."""
    import transformers.utils
    import transformers.utils.import_utils  # noqa: F401

    for name, module in sys.modules.copy().items():  # list() of items runs finalizers, which may import
        if name.partition(".")[0] == "transformers" and "is_sagemaker_mp_enabled" in vars(module):
            module.is_sagemaker_mp_enabled = _never  # type: ignore[attr-defined]


def _leave_launcher_to_smp() -> None:
    """In a job of smp, accelerate takes each rank for a job of one process."""
    from accelerate.state import DistributedType, PartialState

    original = getattr(PartialState, "_prepare_backend", None)
    if original is None:
        raise SMPError(
            "this accelerate finds out about other processes in a way not known here: use accelerate 1.15"
        )
    if hasattr(original, "smp_original"):
        return

    @functools.wraps(original)
    def prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: Any = None) -> Any:
        if not session_module.is_initialized():
            return original(self, cpu, sagemaker_dp, backend)
        if backend is not None:
            raise refused("ddp_backend", backend, REFUSED["ddp_backend"])
        return None, DistributedType.NO

    prepare_backend.smp_original = original  # type: ignore[attr-defined]
    PartialState._prepare_backend = prepare_backend
    # It tells to start the script by torch.distributed.launch.
    logging.getLogger("transformers.training_args").addFilter(
        lambda record: "process group is initialized" not in record.getMessage()
    )


def alone() -> None:
    """Checks that accelerate takes this rank for a job of one process.

    Raises:
        SMPError: it does not, since it was asked before ``smp.init()``.
    """
    from accelerate.state import PartialState

    if PartialState._shared_state and PartialState().num_processes > 1:
        raise SMPError(
            "accelerate has set up a job of its own, since TrainingArguments (or an Accelerator) were made "
            "before smp.init() or before smp_lite.integrations.transformers was imported: import it, call "
            "smp.init({...}), and make TrainingArguments then"
        )
