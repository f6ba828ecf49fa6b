"""The request that `fit` would send, without sending it.

The SDK itself builds the request, from a copy of the estimator whose session has no way out. So it is
the request of `fit` by construction, the estimator stays as it was, and nothing reaches the network: the
source is packed, which finds what cannot be read, and the archive is thrown away.

The client of a session with AWS compares each request with its model of the service before it sends it.
So does a dry run, for a local session too (`local.service_model`).

What the SDK would ask AWS for is taken from what is known. The account is part of the role's ARN (a role
of another account cannot be passed to a job), and gives the name of the default bucket. What cannot be
known is an error that says how to write it down.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from sagemaker.estimator import EstimatorBase, _TrainingJob
from sagemaker.session import Session
from sagemaker.utils import check_and_get_run_experiment_config
from sagemaker.workflow.pipeline_context import PipelineSession

from ..local.request import check_request
from ..local.service_model import check_form
from ..local.session import LocalMPISession

__all__ = ["request_of"]


def request_of(estimator: EstimatorBase, inputs: Any = None, job_name: str | None = None) -> dict[str, Any]:
    """Returns the CreateTrainingJob request that ``estimator.fit(inputs, job_name=job_name)`` would send.

    Args:
        estimator: of the SDK or of this package.
        inputs: as for `fit`.
        job_name: as for `fit`; None makes one up from the time, as `fit` does.

    Raises:
        ValueError: for what `fit` would raise before it sends, and for what only AWS could tell.
        botocore.exceptions.ClientError: a local session would refuse the job's name.
        botocore.exceptions.ParamValidationError: the client would not send the request, as `fit` would find
            after the upload.
    """
    if getattr(estimator, "git_config", None):
        raise ValueError(
            "dry_run makes no network call, and git_config needs one: clone the repository and give its "
            "folder as source_dir"
        )
    session = estimator.sagemaker_session
    offline = _offline_twin(session, _account_of(estimator.role))
    # The one other thing that holds a connection, and the request does not look at it.
    app = estimator.tensorboard_app
    twin = copy.deepcopy(estimator, {id(session): offline, id(app): app})
    twin.prepare_workflow_for_training(job_name)
    arguments = _TrainingJob.get_train_args(twin, inputs, check_and_get_run_experiment_config(None))
    request: dict[str, Any] = offline.get_train_request(**arguments)
    if isinstance(session, LocalMPISession):
        check_request(request)
    elif not isinstance(session, PipelineSession):  # whose variables have no values yet
        check_form(request, local=session.local_mode)
    return request


def _account_of(role: object) -> str | None:
    """The account in the ARN of a role: arn:aws:iam::123456789012:role/name."""
    parts = str(role).split(":")
    return parts[4] if len(parts) > 5 and parts[4].isdigit() else None


def _offline_twin(session: Session, account: str | None) -> Any:
    twin: Any = copy.copy(session)
    twin.__class__ = type(f"Offline{type(session).__name__}", (_Offline, type(session)), {})
    twin.account = account
    twin.s3_resource = _NoBuckets()
    twin.boto_session = twin.s3_client = twin.sagemaker_client = _NoNetwork()
    return twin


class _Offline(Session):
    """What a session asks AWS for before it sends a job, answered without asking.

    A local session has answers of its own.
    """

    account: str | None

    def default_bucket(self) -> str:
        if self.local_mode:
            return str(super().default_bucket())
        known = self._default_bucket or self._default_bucket_name_override
        if known:
            return str(known)
        if self.account is None:
            raise ValueError(
                "dry_run cannot know the name of the default bucket without asking AWS: give output_path="
                "'s3://...', Session(default_bucket=...), or the role as an ARN, which names the account"
            )
        return f"sagemaker-{self.boto_region_name}-{self.account}"

    def expand_role(self, role: str) -> str:
        if self.local_mode or "/" in role:
            return str(super().expand_role(role))
        raise ValueError(
            f"dry_run cannot know the ARN of role={role!r} without asking AWS: write the ARN, "
            f"arn:aws:iam::<account>:role/{role}"
        )

    def _get_account_id_if_default_bucket(self, bucket: str) -> None:
        """None leaves out an extra check of the upload, which does not happen."""


class _NoBuckets:
    """An S3 that takes every object and keeps none."""

    def Object(self, bucket: str, key: str) -> _NoBuckets:
        return self

    def upload_file(self, *_: object, **__: object) -> None:
        """Sends nothing."""


class _NoNetwork:
    """A boto3 session or client whose use is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(f"dry_run makes no network call, and this job needs one before it starts ({name})")
