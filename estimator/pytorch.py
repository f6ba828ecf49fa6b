"""The SDK's estimators, strict: a job that the container would refuse is refused here, before any upload.

`PyTorch` takes the place of ``sagemaker.pytorch.PyTorch``, `Estimator` that of
``sagemaker.estimator.Estimator`` (whose `distribution` the SDK drops in silence); one changed import is
all. Both are thin: checks run when the estimator is made and again whenever a job is prepared, for users
change attributes in between (`request.strict_job`), and the rest is the SDK's.

The SDK's own check of the parameters refuses legal ones (``placement_strategy="DPT"``,
`pipeline_parallel_degree` with `default_partition`), so the hyperparameters of model parallelism are
written here, under the same names and in the same order.

Private names of the SDK that this relies on, held by tests: `_distribution_configuration`,
`_json_encode_hyperparameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sagemaker.estimator
import sagemaker.pytorch

from smp_lite.config import ConfigError

from .local.session import LocalMPISession
from .request.arguments import check_arguments
from .request.distribution import CheckedDistribution, check_distribution
from .request.strict_job import StrictJob, hosts_of

__all__ = ["LOCAL_IMAGE", "Estimator", "PyTorch"]

#: Stands for an image where none is used: the SDK knows none for the newest versions of PyTorch.
LOCAL_IMAGE = "smp-lite-local"


class PyTorch(StrictJob, sagemaker.pytorch.PyTorch):
    """``sagemaker.pytorch.PyTorch`` whose `distribution` is checked whole, and which can dry-run.

    With ``instance_type="local"``, or "local_gpu" for the GPUs of this machine, the session defaults to
    `LocalMPISession`, and versions may be left out.

    Args:
        entry_point: as the SDK's, like all arguments that are not named here.
        distribution: as the SDK's; `parameters` may be the path of a JSON file.
        ship_package: send smp_lite with the source. If image_uri is given and model parallelism is on,
            the container also starts with smp_lite's own entry point. False leaves both to the image.

    Warns where the instance type has more GPUs than the job has ranks for them, and of an argument that the
    SDK does not have and would drop.

    Raises:
        ConfigError: for a distribution that the launch would refuse, and an argument whose name is misspelt;
            at `fit` also for a source that cannot be read.
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
        check_arguments(type(self), {"hyperparameters": hyperparameters, **kwargs})
        session, instance_type = kwargs.get("sagemaker_session"), kwargs.get("instance_type")
        if instance_type in ("local", "local_gpu"):
            if session is None:
                session = kwargs["sagemaker_session"] = LocalMPISession()
            if image_uri is None and isinstance(session, LocalMPISession):
                image_uri = LOCAL_IMAGE
        local = session is not None and session.local_mode
        check_distribution(
            distribution,
            **hosts_of(instance_type, kwargs.get("instance_count"), local, kwargs.get("environment")),
        )
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


class Estimator(StrictJob, sagemaker.estimator.Estimator):
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
        check_arguments(type(self), kwargs)
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
