"""What the strict estimators add to the SDK's: checks before anything is uploaded, and smp_lite itself.

Private names of the SDK that this relies on, held by tests: `_prepare_for_training`,
`_script_mode_hyperparam_update`.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sagemaker.estimator import EstimatorBase
from sagemaker.model import DIR_PARAM_NAME, SCRIPT_PARAM_NAME
from sagemaker.workflow import is_pipeline_variable

from smp_lite.config import PARAMETERS_VARIABLE, ConfigError
from smp_lite.config.errors import complaint
from smp_lite.entrypoints.container.gpus import (
    DEVICE_VARIABLE,
    LOCAL_GPU,
    SHARE_VARIABLE,
    count_gpus,
    gpus_for_ranks,
)
from smp_lite.entrypoints.hosts.secret import SECRET_VARIABLE, check_secret, new_secret
from smp_lite.smp_v1.before_script import CUDA_AS_CPU_VARIABLE

from ..local.request import (
    wrong_channel_name,
    wrong_checkpoint_path,
    wrong_max_wait,
    wrong_variable_name,
)
from ..local.session import LocalMPISession
from .arguments import check_dependencies, check_mapping, check_reserved
from .distribution import CheckedDistribution, check_distribution
from .dry_run import request_of
from .rehearsal import rehearse_launch
from .shipping import ARCHIVE, CONTAINER_ENTRY_POINT, check_source, package_directory

__all__ = ["StrictJob", "hosts_of"]

_LONGEST_HYPERPARAMETER = 2500
"""Characters of a value, by the service's limits."""


class StrictJob(EstimatorBase):
    """The first base of an estimator, before the SDK's class.

    distribution: as the SDK's; it may be changed until `fit`.
    ship_package: whether smp_lite goes with the job.
    environment: as the SDK's. A job over several hosts, in an image that smp_lite may start, gets a new
        `SMP_LITE_JOB_SECRET` with each request, unless there is one already.
    """

    distribution: Mapping[str, Any] | None
    ship_package: bool
    environment: dict[str, Any] | None
    _own_secret: str | None = None
    _earlier: Mapping[str, Any] = MappingProxyType({})  # hyperparameters of the last request

    def fit(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the SDK's.

        Raises:
            ConfigError: what the service would refuse, the names of channels among it.
        """
        _check_channels(inputs)
        return super().fit(inputs, *args, **kwargs)

    def dry_run(self, inputs: Any = None, job_name: str | None = None) -> dict[str, Any]:
        """Returns the request that ``fit(inputs, job_name=job_name)`` would send; sends nothing.

        Raises:
            ValueError: for what `fit` would raise before it sends, and for what only AWS could tell.
            botocore.exceptions.ParamValidationError: the client would not send the request.
        """
        _check_channels(inputs)
        return request_of(self, inputs, job_name)

    def _checked(self) -> CheckedDistribution:
        session = self.sagemaker_session
        return check_distribution(
            self.distribution,
            **hosts_of(self.instance_type, self.instance_count, session.local_mode, self.environment),
        )

    def _prepare_for_training(self, job_name: str | None = None) -> None:
        """The SDK's step between `fit` and the request: uploads, and settles what depends on them."""
        own_entry_point = self._needs_entry_point()
        self._check_before_upload(own_entry_point)
        if self.container_entry_point == list(CONTAINER_ENTRY_POINT) and not own_entry_point:
            self.container_entry_point = self.code_uri = None  # of an earlier job
        with tempfile.TemporaryDirectory() as folder:
            package = self._package(Path(folder))
            self.dependencies = [*self.dependencies, *package]
            try:
                super()._prepare_for_training(job_name)
            finally:
                self.dependencies = [name for name in self.dependencies if name not in package]
                self._earlier = dict(self._hyperparameters)
        if own_entry_point:
            self.container_entry_point = list(CONTAINER_ENTRY_POINT)
            self.code_uri = self.uploaded_code.s3_prefix
            self._script_mode_hyperparam_update(ARCHIVE, self.uploaded_code.script_name)
            self._earlier = dict(self._hyperparameters)
        self._settle_secret()

    def _package(self, folder: Path) -> list[str]:
        """What goes to the dependencies: a copy of smp_lite, if the job leaves this machine."""
        if not self.ship_package or self.entry_point is None or self.sagemaker_session.local_mode:
            return []
        return [str(package_directory(folder))]

    def _needs_entry_point(self) -> bool:
        """Whether the image is the user's own and nobody in it knows how to start the job."""
        return (
            self.image_uri is not None
            and self.ship_package
            and self.entry_point is not None
            and not self.sagemaker_session.local_mode
            and self.container_entry_point in (None, list(CONTAINER_ENTRY_POINT))
            and self._checked().config is not None
        )

    def _settle_secret(self) -> None:
        """Give the job's hosts what they prove themselves by; each job its own."""
        if self._own_secret is not None and self._given_secret() == self._own_secret:
            self.environment = {k: v for k, v in self.environment.items() if k != SECRET_VARIABLE} or None
        if self._needs_secret() and self._given_secret() is None:
            self._own_secret = new_secret()
            self.environment = {**(self.environment or {}), SECRET_VARIABLE: self._own_secret}

    def _given_secret(self) -> Any:
        return (self.environment or {}).get(SECRET_VARIABLE)

    def _needs_secret(self) -> bool:
        """Whether smp_lite's entry point may be what starts the job, over several hosts of a network."""
        return (
            self.image_uri is not None
            and not self.sagemaker_session.local_mode
            and _known_count(self.instance_count) != 1
        )

    def _check_before_upload(self, own_entry_point: bool) -> None:
        """Raises all that can be known to be wrong; the SDK asks some of this only afterwards."""
        check_dependencies(self.dependencies)
        source = (self.entry_point, self.source_dir)
        if (
            self.entry_point is not None
            and not self.git_config
            and not any(map(is_pipeline_variable, source))
        ):
            session = self.sagemaker_session
            jobs = session.directory if isinstance(session, LocalMPISession) else None
            check_source(str(self.entry_point), self.source_dir, self.dependencies, left_out=jobs)
        if own_entry_point and str(self.source_dir).lower().startswith("s3://"):
            raise ConfigError(
                f"source_dir={self.source_dir!r} is packed already, so smp_lite cannot travel with it: give "
                "a local folder, or ship_package=False with an image that starts the job itself"
            )
        if own_entry_point and self.input_mode == "Pipe":
            raise ConfigError(
                "input_mode='Pipe' would make a pipe of the channel that carries the source: use 'File' or "
                "'FastFile', and TrainingInput(input_mode='Pipe') for the channels that need it"
            )
        secret = self._given_secret()
        if self._needs_secret() and secret is not None and not is_pipeline_variable(secret):
            try:
                check_secret(secret)
            except ValueError as error:
                raise ConfigError(f"environment: {error}") from None
        limits = (self.max_wait, self.max_run)
        if not any(map(is_pipeline_variable, (self.use_spot_instances, *limits))):
            _refuse(wrong_max_wait(bool(self.use_spot_instances), *limits))
        _refuse(wrong_checkpoint_path(self.checkpoint_s3_uri, self.checkpoint_local_path))
        for name in self.environment or {}:
            _refuse(wrong_variable_name(name))
        self.training_image_uri()
        checked = self._checked()
        if checked.idle_gpus is not None:
            warnings.warn(checked.idle_gpus, stacklevel=2)
        check_mapping("hyperparameters", self._hyperparameters, "{'epochs': 3}")
        is_attached = self.latest_training_job is not None and not self._earlier
        if self.entry_point is not None and not is_attached:
            check_reserved(self._hyperparameters, self._earlier)
        _check_json(self._hyperparameters)
        twice = [name for name in checked.hyperparameters if name in self._hyperparameters]
        if twice:  # the SDK drops the user's in silence, and the container what the environment says
            raise ConfigError(
                f"{', '.join(twice)} are given twice, as a hyperparameter and by distribution: leave one out"
            )
        if checked.config is not None and PARAMETERS_VARIABLE in (self.environment or {}):
            raise ConfigError(
                f"environment gives {PARAMETERS_VARIABLE}, but the parameters of distribution take its place "
                "in the container: leave one out"
            )
        hyperparameters = {k: v for k, v in self.hyperparameters().items() if not is_pipeline_variable(v)}
        if not self.sagemaker_session.local_mode:
            _check_lengths(hyperparameters)
        self._rehearse(checked, hyperparameters, own_entry_point)

    def _rehearse(
        self, checked: CheckedDistribution, hyperparameters: Mapping[str, Any], own_entry_point: bool
    ) -> None:
        """Raises what the launch would, if it is one that this package knows: its own, or one by MPI."""
        local = isinstance(self.sagemaker_session, LocalMPISession)
        if not (local or own_entry_point or checked.distribution.get("mpi", {}).get("enabled")):
            return
        script = self.entry_point
        if is_pipeline_variable(script):
            script = "train.py"  # not known yet
        source = {SCRIPT_PARAM_NAME: str(script), DIR_PARAM_NAME: "not uploaded yet"} if script else {}
        rehearse_launch(
            {**hyperparameters, **{name: json.dumps(value) for name, value in source.items()}},
            processes_per_host=checked.processes_per_host or 1,
            num_hosts=_known_count(self.instance_count),
            local=local,
            own_entry_point=local or own_entry_point,
        )


def _check_channels(inputs: Any) -> None:
    for name in inputs if isinstance(inputs, Mapping) else ():
        wrong = wrong_channel_name(str(name))
        _refuse(wrong and f"inputs: {wrong}")


def _refuse(wrong: str | None) -> None:
    """
    Raises:
        ConfigError: there is something wrong.
    """
    if wrong is not None:
        raise ConfigError(wrong)


def hosts_of(
    instance_type: Any, instance_count: Any, local: bool, environment: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the arguments of an estimator say about its hosts, as arguments of `check_distribution`.

    Raises:
        ConfigError: the job is for the GPUs of this machine, which has none.
    """
    known_type = None if is_pipeline_variable(instance_type) else instance_type
    inherited = os.environ if local else {}
    known = {**inherited, **_known_environment(environment or {})}
    gpus = None
    if local and known_type == LOCAL_GPU:
        try:
            gpus = gpus_for_ranks(known_type, known, one_machine=True, found=count_gpus(known))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return {
        "instance_count": _known_count(instance_count),
        "instance_type": known_type,
        "gpus_per_host": gpus,
        "local": local,
        "environment": known,
    }


def _known_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Without the variables of a pipeline. One that decides about GPUs is left to the container."""
    known = {name: value for name, value in environment.items() if not is_pipeline_variable(value)}
    deciding = (DEVICE_VARIABLE, SHARE_VARIABLE, CUDA_AS_CPU_VARIABLE)
    undecided = [name for name in deciding if name in environment and name not in known]
    return {**known, SHARE_VARIABLE: "1"} if undecided else known


def _known_count(instance_count: Any) -> int | None:
    """The number of hosts; None for a variable of a pipeline."""
    return instance_count if isinstance(instance_count, int) else None


def _check_json(hyperparameters: Mapping[str, Any]) -> None:
    for key, value in hyperparameters.items():
        if is_pipeline_variable(value):
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            text = f"hyperparameter {key!r} cannot be written as JSON ({error})."
            way_out = "give a str, a number, a bool, or a list or dict of these"
            raise ConfigError(complaint(text, key, value, way_out)) from None


def _check_lengths(hyperparameters: Mapping[str, Any]) -> None:
    for key, value in hyperparameters.items():
        if len(str(value)) > _LONGEST_HYPERPARAMETER:
            raise ConfigError(
                f"hyperparameter {key!r} is {len(str(value))} characters long, and the service takes "
                f"{_LONGEST_HYPERPARAMETER}: put it into a file of source_dir"
            )
