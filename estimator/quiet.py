"""What the SDK (version 2) says and sends unasked, and how to stop just that.

At import and once for each class it tells that version 3 exists, as a warning and as a log line: no
news to somebody who chose version 2 for its Estimator. Its own switch is an environment variable,
narrower than a filter of warnings. After each ``fit()`` it sends a GET request that names class,
versions and account; its own switch for that is an entry of the SDK's configuration.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["TELEMETRY_OPT_OUT", "silence_v2_warnings"]

#: `sagemaker_config` of a session that sends no telemetry.
TELEMETRY_OPT_OUT: Mapping[str, Any] = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}


def silence_v2_warnings() -> None:
    """Keep the SDK from telling that version 3 exists; who has set its variable to '' still hears it."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
