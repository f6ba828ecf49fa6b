"""A training job as one of its hosts sees it: the files that SageMaker puts into the container.

SageMaker describes a job to its containers in three JSON files under `/opt/ml/input/config`:
`hyperparameters.json`, `resourceconfig.json` and `inputdataconfig.json`. The Python SDK adds its own
settings to the user's hyperparameters, under names that begin with `sagemaker_`, and writes each
value as JSON inside a string. `Job.read` takes all that apart once, and checks it once: a `Job` that
exists has hosts, knows which of them it is on, and says how to start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DEFAULT_ROOT", "Job", "decode_value"]

DEFAULT_ROOT = "/opt/ml"

_HYPERPARAMETERS = "hyperparameters.json"
_RESOURCES = "resourceconfig.json"
_CHANNELS = "inputdataconfig.json"

_FRAMEWORK_PREFIX = "sagemaker_"
#: The service's and the SDK's own, although their names do not say so.
_FRAMEWORK_NAMES = frozenset({"_tuning_objective_metric", "default_user_module_name"})

_ONE_HOST = {"current_host": "algo-1", "hosts": ["algo-1"]}
"""The resource configuration where there is no file: a container run by hand."""


@dataclass(frozen=True)
class Job:
    """The decoded files of `<root>/input/config`.

    hyperparameters: the user's, with `mp_parameters` among them where the job has any.
    framework_parameters: those of the SDK (`sagemaker_...`).
    resource_config: hosts, network interface, instance groups.
    input_data_config: channel name to its settings.
    root: the folder that SageMaker mounts.

    Raises ValueError, naming file, key and way out, where a value that the launch needs is wrong.
    """

    hyperparameters: Mapping[str, Any]
    framework_parameters: Mapping[str, Any]
    resource_config: Mapping[str, Any]
    input_data_config: Mapping[str, Any]
    root: str = DEFAULT_ROOT

    def __post_init__(self) -> None:
        _check_hosts(self.resource_config)
        _check_instance_groups(self.resource_config)
        _check_framework(self.framework_parameters)
        _parse_mp_parameters(self.hyperparameters)

    @classmethod
    def read(cls, root: str | os.PathLike[str] = DEFAULT_ROOT) -> Job:
        """Read the job below `root`. Files that are absent count as empty, and a job without
        `resourceconfig.json` as one of a single host.

        Raises ValueError where the folder is missing, a file is not a JSON object, or a value in
        it is wrong.
        """
        config = Path(root) / "input" / "config"
        if not config.is_dir():
            raise ValueError(
                f"there is no job in {os.fspath(root)}: the folder {config} is missing; in a container of "
                f"SageMaker it is in {DEFAULT_ROOT}, elsewhere give the folder that holds input/config"
            )
        given = {name: decode_value(value) for name, value in _read_object(config / _HYPERPARAMETERS).items()}
        return cls(
            hyperparameters={name: value for name, value in given.items() if not _is_framework(name)},
            framework_parameters={name: value for name, value in given.items() if _is_framework(name)},
            resource_config=_read_object(config / _RESOURCES) or _ONE_HOST,
            input_data_config=_read_object(config / _CHANNELS),
            root=os.fspath(root),
        )

    # Hosts.

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts, in the order of their ranks."""
        return tuple(self.resource_config["hosts"])

    @property
    def current_host(self) -> str:
        """Name of the host that this description was given to."""
        return str(self.resource_config["current_host"])

    @property
    def first_host(self) -> str:
        """Name of the host that starts mpirun and runs rank 0."""
        return self.hosts[0]

    @property
    def is_first_host(self) -> bool:
        return self.current_host == self.first_host

    @property
    def network_interface(self) -> str:
        """Name of the network interface that leads to the other hosts."""
        return str(self.resource_config.get("network_interface_name", "eth0"))

    @property
    def instance_type(self) -> str | None:
        """The instance type of this host, for example `ml.p3.16xlarge`; None where nobody said."""
        given = self.resource_config.get("current_instance_type")
        return given or self.framework_parameters.get("sagemaker_instance_type")

    # What to run.

    @property
    def program(self) -> str | None:
        """The entry point, as the SDK names it: a file of the source folder."""
        return self.framework_parameters.get("sagemaker_program")

    @property
    def submit_directory(self) -> str | None:
        """Where the source is: a URI of an archive, or a folder."""
        return self.framework_parameters.get("sagemaker_submit_directory")

    @property
    def job_name(self) -> str | None:
        return self.framework_parameters.get("sagemaker_job_name")

    @property
    def mp_parameters(self) -> dict[str, Any] | None:
        """The parameters of model parallelism; None where the job has none."""
        return _parse_mp_parameters(self.hyperparameters)

    # How to start it.

    @property
    def mpi_enabled(self) -> bool:
        return bool(self.framework_parameters.get("sagemaker_mpi_enabled"))

    @property
    def processes_per_host(self) -> int | None:
        """The number of ranks on each host; None leaves it to the launcher."""
        return self.framework_parameters.get("sagemaker_mpi_num_of_processes_per_host")

    @property
    def custom_mpi_options(self) -> str:
        """The user's own options of mpirun, as one line of text; "" where there are none."""
        return self.framework_parameters.get("sagemaker_mpi_custom_mpi_options") or ""

    # Folders and files.

    @property
    def input_dir(self) -> Path:
        return Path(self.root) / "input"

    @property
    def code_dir(self) -> Path:
        """Where the source is unpacked: the working directory of the ranks."""
        return Path(self.root) / "code"

    @property
    def model_dir(self) -> Path:
        """What lies here when the job ends becomes `model.tar.gz`."""
        return Path(self.root) / "model"

    @property
    def output_dir(self) -> Path:
        return Path(self.root) / "output"

    @property
    def output_data_dir(self) -> Path:
        """What lies here when the job ends becomes `output.tar.gz`."""
        return self.output_dir / "data"

    def channel_dir(self, name: str) -> Path:
        """The folder of the data of channel `name`."""
        return self.input_dir / "data" / name


def _is_framework(name: str) -> bool:
    return name.startswith(_FRAMEWORK_PREFIX) or name in _FRAMEWORK_NAMES


def decode_value(value: Any) -> Any:
    """The value that was encoded; one that is not JSON was meant as the text that it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} where there is no such file."""
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(
            f"cannot parse {path} as JSON ({error}); write an object, as SageMaker does"
        ) from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object, and holds a {type(parsed).__name__}")
    return parsed


def _check_hosts(resource_config: Mapping[str, Any]) -> None:
    hosts = resource_config.get("hosts")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ValueError(f'{_RESOURCES}: hosts={hosts!r} must list the names of the hosts, as in ["algo-1"]')
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"{_RESOURCES}: hosts={hosts!r} names a host twice; give each its own name")
    current = resource_config.get("current_host")
    if current not in hosts:
        raise ValueError(
            f"{_RESOURCES}: current_host={current!r} is none of hosts={hosts!r}; "
            "write the name under which the other hosts know this one"
        )


def _check_instance_groups(resource_config: Mapping[str, Any]) -> None:
    groups = resource_config.get("instance_groups", [])
    needed = ("instance_group_name", "hosts")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and all(name in group for name in needed) for group in groups
    ):
        raise ValueError(
            f"{_RESOURCES}: instance_groups={groups!r} must be a list of objects with {', '.join(needed)}"
        )


def _check_framework(parameters: Mapping[str, Any]) -> None:
    _expect(parameters, "sagemaker_mpi_enabled", bool, "write true or false, without quotes")
    _expect(parameters, "sagemaker_mpi_custom_mpi_options", str, "write the options as one string")
    for name in ("sagemaker_program", "sagemaker_submit_directory", "sagemaker_job_name"):
        _expect(parameters, name, str, "write it as a string")
    name = "sagemaker_mpi_num_of_processes_per_host"
    way_out = "set processes_per_host to a whole number of 1 or more, without quotes"
    _expect(parameters, name, int, way_out)
    count = parameters.get(name)
    if count is not None and count < 1:
        raise ValueError(f"{_HYPERPARAMETERS}: {name}={count} must be a positive integer; {way_out}")


def _expect(parameters: Mapping[str, Any], name: str, kind: type, way_out: str) -> None:
    """Raise ValueError unless the parameter is absent, null or a `kind`; True is no integer here."""
    value = parameters.get(name)
    if value is not None and type(value) is not kind:
        raise ValueError(
            f"{_HYPERPARAMETERS}: {name}={value!r} must be of type {kind.__name__}, "
            f"and is of type {type(value).__name__}; {way_out}"
        )


def _parse_mp_parameters(hyperparameters: Mapping[str, Any]) -> dict[str, Any] | None:
    given = hyperparameters.get("mp_parameters")
    parameters = decode_value(given)
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError(
            f"{_HYPERPARAMETERS}: mp_parameters={given!r} must be a JSON object "
            'such as {"partitions": 2}, and is of type ' + type(parameters).__name__
        )
    return parameters
