"""The service's own description of its calls, as it comes with botocore; the client checks requests by it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ParamValidationError
from botocore.loaders import create_loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

__all__ = ["check_form", "described_members"]


def check_form(request: Mapping[str, Any], *, local: bool) -> None:
    """Raises ParamValidationError, as the client would, for a CreateTrainingJob request of a wrong form.

    Args:
        request: as the SDK has built it.
        local: whether it stays on this machine: the SDK's FileDataSource, which the service does not know,
            is as good as an S3DataSource then.
    """
    shape = _service().operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(_with_buckets(request) if local else request, shape)
    if report.has_errors():
        raise ParamValidationError(report=report.generate_report())


@functools.cache
def described_members() -> frozenset[str]:
    """The members of DescribeTrainingJob's answer."""
    return frozenset(_service().operation_model("DescribeTrainingJob").output_shape.members)


@functools.cache
def _service() -> ServiceModel:
    return ServiceModel(create_loader().load_service_model("sagemaker", "service-2"), "sagemaker")


def _with_buckets(request: Mapping[str, Any]) -> dict[str, Any]:
    channels = request.get("InputDataConfig")
    if not isinstance(channels, list):
        return dict(request)
    return {**request, "InputDataConfig": [_with_bucket(channel) for channel in channels]}


def _with_bucket(channel: Mapping[str, Any]) -> Mapping[str, Any]:
    file = channel.get("DataSource", {}).get("FileDataSource")
    if file is None:
        return channel
    return {**channel, "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": file["FileUri"]}}}
