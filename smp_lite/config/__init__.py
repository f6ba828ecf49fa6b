"""Configuration: the parameters of a job, checked in plain Python (no torch, no processes)."""

from __future__ import annotations

from smp_lite.config.config import Config
from smp_lite.config.errors import ConfigError
from smp_lite.config.source import PARAMETERS_VARIABLE, load_config, parse_parameters

__all__ = ["PARAMETERS_VARIABLE", "Config", "ConfigError", "load_config", "parse_parameters"]
