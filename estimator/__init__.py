"""The SageMaker side: estimators that check a job, show its request, and run it here or in the cloud.

    pytorch.py         the SDK's estimators, made strict
    model_trainer.py   model parallelism for version 3 of the SDK
    request/           a job before it is sent: checked, rehearsed, packed
    local/             a session in the place of AWS: runs jobs on this machine
    quiet.py           what the SDK says and sends unasked, stopped

Each imports only from those below it.

Public names load when first used (PEP 562): the SDK takes seconds to import, and `check_distribution`
does not need it. Nothing here imports torch. The SDK (version 2) is an extra of the package:
``pip install "smp-lite[sagemaker]"``; `SMPDistributed` is for version 3, which has no Estimator.
"""

from __future__ import annotations

import importlib
from typing import Any

from .quiet import quieten_sdk

quieten_sdk()

_HOME_OF = {
    "CheckedDistribution": "request.distribution",
    "Estimator": "pytorch",
    "LocalMPISession": "local.session",
    "PyTorch": "pytorch",
    "SMPDistributed": "model_trainer",
    "check_distribution": "request.distribution",
    "package_directory": "request.shipping",
    "request_of": "request.dry_run",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return __all__
