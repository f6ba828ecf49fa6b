"""What the SDK (version 2) says and sends unasked, and how to stop just that.

At import and once for each class it tells that version 3 exists, as a warning and as a log line: no
news to somebody who chose version 2 for its Estimator. Its own switch is an environment variable,
narrower than a filter of warnings. It also prints, on standard output, where it found no configuration
of its own. After each ``fit()`` it sends a GET request that names class, versions and account; its own
switch for that is an entry of that configuration. It announces the request even where that is off.

Whoever has set the variable or the level of the logger has decided otherwise, and nothing is changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["TELEMETRY_OPT_OUT", "quieten_sdk", "quieten_telemetry"]

#: `sagemaker_config` of a session that sends no telemetry.
TELEMETRY_OPT_OUT: Mapping[str, Any] = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}


def quieten_sdk() -> None:
    """Keep the SDK from telling about version 3 and its configuration; to be called before its import."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    _warnings_only("sagemaker.config")


def quieten_telemetry() -> None:
    """Keep the SDK from announcing telemetry; for a process whose session has opted out of it."""
    _warnings_only("sagemaker.telemetry")


def _warnings_only(name: str) -> None:
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
