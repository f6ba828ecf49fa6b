"""Where the parameters come from: the launcher's environment, a dictionary, or a JSON file.

A launcher passes them in ``SM_HP_MP_PARAMETERS``. That variable wins over what the script gives to
``smp.init`` and replaces it whole: merging the two would train a mixture that nobody wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from smp_lite.config.config import Config
from smp_lite.config.errors import ConfigError
from smp_lite.config.keys import unique_keys

__all__ = ["PARAMETERS_VARIABLE", "load_config", "parse_parameters"]

PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"


def load_config(parameters: str | Mapping[str, Any] | None, environ: Mapping[str, str]) -> Config:
    """Returns the checked Config of this process.

    Args:
        parameters: what the script gave: a dictionary, the path of a JSON file, or None.
        environ: the environment; ``SM_HP_MP_PARAMETERS`` (a JSON object) wins over ``parameters``.

    Raises:
        ConfigError: if neither is given, the JSON does not parse, or a parameter is wrong.
    """
    text = environ.get(PARAMETERS_VARIABLE)
    if text is not None:
        return Config.from_parameters(_parse_variable(text))
    if parameters is None:
        raise ConfigError(
            "no configuration: pass the parameters to smp.init, as in "
            "smp.init({'partitions': 2}), start the script with "
            "`smp-lite run --parameters '{\"partitions\": 2}'`, or set the environment variable "
            f"{PARAMETERS_VARIABLE} to a JSON object"
        )
    return Config.from_parameters(parse_parameters(parameters))


def parse_parameters(parameters: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters as a new dictionary; a str is the path of a JSON file that holds them.

    Raises:
        ConfigError: if there is no such file, or it does not hold a JSON object.
    """
    if isinstance(parameters, Mapping):
        return dict(parameters)
    if not isinstance(parameters, str) or not os.path.isfile(parameters):
        raise ConfigError(
            "Expected a string path to an existing modelparallel config, or a dictionary. "
            f"Received: {parameters!r} ({type(parameters).__name__})"
        )
    try:
        with open(parameters, encoding="utf-8") as file:
            parsed = json.load(file, object_pairs_hook=unique_keys)
    except ConfigError as error:
        raise ConfigError(f"{parameters}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{parameters} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise ConfigError(f"Cannot parse {parameters} as a json file. ({error})") from None
    if not isinstance(parsed, dict):
        raise ConfigError(
            f"Cannot parse {parameters} as a json file. (it must hold an object such as "
            f'{{"partitions": 2}}, and holds a {type(parsed).__name__})'
        )
    return parsed


def _parse_variable(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=unique_keys)
    except ConfigError as error:
        raise ConfigError(f"the environment variable {PARAMETERS_VARIABLE}: {error}") from None
    except ValueError as error:
        raise ConfigError(
            f"cannot parse the environment variable {PARAMETERS_VARIABLE} as JSON ({error}): it is "
            f'{text!r}; write an object such as {{"partitions": 2}}, or unset it'
        ) from None
    if not isinstance(parsed, dict):
        raise ConfigError(
            f"the environment variable {PARAMETERS_VARIABLE} must hold a JSON object such as "
            f'{{"partitions": 2}}, and is {text!r} ({type(parsed).__name__})'
        )
    return parsed
