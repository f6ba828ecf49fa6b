"""The SDK's estimators, strict: a job that the container would refuse is refused here, before any upload.

`PyTorch` takes the place of ``sagemaker.pytorch.PyTorch``, `Estimator` that of
``sagemaker.estimator.Estimator`` (whose `distribution` the SDK drops in silence); one changed import is
all. Both are thin: `checks` run when the estimator is made and again whenever a job is prepared, for
users change attributes in between, and the rest is the SDK's.

The SDK's own check of the parameters refuses legal ones (``placement_strategy="DPT"``,
`pipeline_parallel_degree` with `default_partition`), so the hyperparameters of model parallelism are
written here, under the same names and in the same order.

Private names of the SDK that this relies on, held by tests: `_prepare_for_training`,
`_distribution_configuration`, `_script_mode_hyperparam_update`, `_json_encode_hyperparameters`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sagemaker.estimator
import sagemaker.pytorch
from sagemaker import instance_types_gpu_info
from sagemaker.workflow import is_pipeline_variable

from smp_lite.config import ConfigError
from smp_lite.config.errors import complaint
from smp_lite.estimator.distribution import CheckedDistribution, check_distribution
from smp_lite.estimator.dry_run import request_of
from smp_lite.estimator.rehearsal import rehearse_launch
from smp_lite.estimator.shipping import ARCHIVE, CONTAINER_ENTRY_POINT, check_source, package_directory

__all__ = ["LOCAL_IMAGE", "Estimator", "PyTorch"]

#: Stands for an image where none is used: the SDK knows none for the newest versions of PyTorch.
LOCAL_IMAGE = "smp-lite-local"

_LONGEST_HYPERPARAMETER = 2500
"""Characters of a value, by the service's limits."""


class _StrictJob:
    """What both estimators add to the SDK's, which comes after this class in the order of bases."""

    ship_package: bool

    def dry_run(self, inputs: Any = None, job_name: str | None = None) -> dict[str, Any]:
        """Returns the request that ``fit(inputs, job_name=job_name)`` would send; sends nothing.

        Raises:
            ValueError: for what `fit` would raise before it sends, and for what only AWS could tell.
        """
        return request_of(self, inputs, job_name)

    def _checked(self) -> CheckedDistribution:
        session = self.sagemaker_session
        return check_distribution(
            self.distribution,
            **_hosts(self.instance_type, self.instance_count, session.local_mode, session.boto_region_name),
        )

    def _prepare_for_training(self, job_name: str | None = None) -> None:
        """The SDK's step between `fit` and the request: uploads, and settles what depends on them."""
        own_entry_point = self._needs_entry_point()
        self._check_before_upload(own_entry_point)
        with tempfile.TemporaryDirectory() as folder:
            package = self._package(Path(folder))
            self.dependencies = [*self.dependencies, *package]
            try:
                super()._prepare_for_training(job_name)
            finally:
                self.dependencies = [name for name in self.dependencies if name not in package]
        if own_entry_point:
            self.container_entry_point = list(CONTAINER_ENTRY_POINT)
            self.code_uri = self.uploaded_code.s3_prefix
            self._script_mode_hyperparam_update(ARCHIVE, self.uploaded_code.script_name)
        elif self.container_entry_point == list(CONTAINER_ENTRY_POINT):
            self.container_entry_point = self.code_uri = None

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

    def _check_before_upload(self, own_entry_point: bool) -> None:
        """Raises all that can be known to be wrong; the SDK asks some of this only afterwards."""
        source = (self.entry_point, self.source_dir)
        if (
            self.entry_point is not None
            and not self.git_config
            and not any(map(is_pipeline_variable, source))
        ):
            check_source(*source, self.dependencies)
        if own_entry_point and str(self.source_dir).lower().startswith("s3://"):
            raise ConfigError(
                f"source_dir={self.source_dir!r} is packed already, so smp_lite cannot travel with it: give "
                "a local folder, or ship_package=False with an image that starts the job itself"
            )
        self.training_image_uri()
        checked = self._checked()
        _check_json(self._hyperparameters)
        if checked.config is not None and "mp_parameters" in self._hyperparameters:
            raise ConfigError(
                "mp_parameters are given twice, as a hyperparameter and by distribution: leave one out"
            )
        hyperparameters = self.hyperparameters()
        if not self.sagemaker_session.local_mode:
            _check_lengths(hyperparameters)
        if checked.processes_per_host is not None:
            rehearse_launch(
                hyperparameters,
                processes_per_host=checked.processes_per_host,
                num_hosts=_known_count(self.instance_count) or 1,
                local=self.sagemaker_session.local_mode,
            )


class PyTorch(_StrictJob, sagemaker.pytorch.PyTorch):
    """``sagemaker.pytorch.PyTorch`` whose `distribution` is checked whole, and which can dry-run.

    With ``instance_type="local"`` the session defaults to `LocalMPISession`, and versions may be left out.

    Args:
        entry_point: as the SDK's, like all arguments that are not named here.
        distribution: as the SDK's; `parameters` may be the path of a JSON file.
        ship_package: send smp_lite with the source. If image_uri is given and model parallelism is on,
            the container also starts with smp_lite's own entry point. False leaves both to the image.

    Raises:
        ConfigError: for a distribution that the launch would refuse; at `fit` also for a source that
            cannot be read.
    """

    def __init__(
        self,
        entry_point: str | None = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        source_dir: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        *,
        ship_package: bool = True,
        **kwargs: Any,
    ) -> None:
        session, instance_type = kwargs.get("sagemaker_session"), kwargs.get("instance_type")
        if instance_type == "local":
            from smp_lite.estimator.local_session import LocalMPISession

            if session is None:
                session = kwargs["sagemaker_session"] = LocalMPISession()
            if image_uri is None and isinstance(session, LocalMPISession):
                image_uri = LOCAL_IMAGE
        region = None if session is None else session.boto_region_name
        local = session is not None and session.local_mode
        check_distribution(distribution, **_hosts(instance_type, kwargs.get("instance_count"), local, region))
        self.ship_package = ship_package
        super().__init__(
            entry_point,
            framework_version,
            py_version,
            source_dir,
            hyperparameters,
            image_uri,
            distribution,
            **kwargs,
        )

    def _distribution_configuration(self, distribution: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters that carry the distribution, not yet encoded."""
        checked = self._checked()
        if checked.config is None:
            configuration: dict[str, Any] = super()._distribution_configuration(distribution)
            return configuration
        return {**checked.hyperparameters, self.INSTANCE_TYPE: self.instance_type}


class Estimator(_StrictJob, sagemaker.estimator.Estimator):
    """``sagemaker.estimator.Estimator``, for any image, whose `distribution` counts.

    Args:
        image_uri: the image, with Python 3.11 or newer, pip and torch.
        args: as the SDK's.
        distribution: smdistributed.modelparallel with mpi, as `PyTorch` takes it.
        ship_package: as of `PyTorch`.
        kwargs: as the SDK's.

    Raises:
        ConfigError: as `PyTorch`, and for a strategy of another library.
    """

    def __init__(
        self,
        image_uri: str,
        *args: Any,
        distribution: Mapping[str, Any] | None = None,
        ship_package: bool = True,
        **kwargs: Any,
    ) -> None:
        self.distribution = distribution
        self.ship_package = ship_package
        super().__init__(image_uri, *args, **kwargs)
        self._checked()

    def _checked(self) -> CheckedDistribution:
        checked = super()._checked()
        if checked.distribution and checked.config is None:
            raise ConfigError(
                f"Estimator takes distribution for smdistributed.modelparallel only. Got "
                f"{', '.join(checked.distribution)}: switch it on, leave distribution out, or use PyTorch"
            )
        return checked

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the user's hyperparameters and those that carry the distribution."""
        given: dict[str, Any] = super().hyperparameters()
        checked = self._checked()
        if checked.config is None:
            return given
        configuration = {**checked.hyperparameters, self.INSTANCE_TYPE: self.instance_type}
        return {**given, **self._json_encode_hyperparameters(configuration)}


def _hosts(instance_type: Any, instance_count: Any, local: bool, region: str | None) -> dict[str, Any]:
    """What the arguments of an estimator say about its hosts, as `check_distribution` wants it."""
    gpus = instance_types_gpu_info.retrieve(region or "us-east-1").get(str(instance_type), {})
    return {
        "instance_count": _known_count(instance_count),
        "gpus_per_host": gpus.get("Count"),
        "local": local,
    }


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
