"""Model parallelism for version 3 of the SDK, which has no Estimator: a launch strategy of `ModelTrainer`.

    ModelTrainer(distributed=SMPDistributed(process_count_per_node=8, parameters={"partitions": 2}), ...)

Version 3 has a seam for this. It copies `driver_dir` into the job and runs `driver_script` there on
every host, whatever the image. Ours is the whole package with `entrypoints/sdk_v3_driver.py`, which
starts the same launch as everywhere: one mpirun over all hosts, `-np` hosts times processes. (The SDK's
own MPI driver passes the number of one host.)

Versions 2 and 3 cannot be installed together. The request and the container's scripts were tried with
version 3.27 in an environment of its own (an opt-in test, ``SMP_LITE_SDK_V3_PYTHON``); no test ran in a
container or in the service. The number of hosts belongs to the trainer, so whether the ranks are whole
replicas is only checked when the job starts.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, StrictInt, field_validator, model_validator

from smp_lite.entrypoints.hosts.secret import new_secret
from smp_lite.entrypoints.sdk_v3_driver import SECRET_FILE

from .request.distribution import check_parameters
from .request.rehearsal import rehearse_launch
from .request.shipping import package_directory

try:
    from sagemaker.train.distributed import DistributedConfig
except ImportError as error:
    raise ImportError(
        "SMPDistributed needs version 3 of the SageMaker SDK, in an environment without version 2: "
        'pip install "sagemaker>=3.20,<4"; with version 2, use smp_lite.estimator.PyTorch'
    ) from error

__all__ = ["SMPDistributed"]


class SMPDistributed(DistributedConfig):
    """Model parallelism as the launch strategy of a ModelTrainer.

    Args:
        process_count_per_node: ranks on each host.
        parameters: of model parallelism; a dictionary, or the path of a JSON file.
        custom_mpi_options: options for mpirun, as on its command line.

    Raises:
        ValueError: for what the launch would refuse.
    """

    process_count_per_node: StrictInt = Field(ge=1)
    parameters: dict[str, Any]
    custom_mpi_options: str = ""

    _staging: tempfile.TemporaryDirectory[str] | None = PrivateAttr(None)

    @field_validator("parameters", mode="before")
    @classmethod
    def _check_parameters(cls, given: object) -> dict[str, Any]:
        return check_parameters(given)[0]

    @model_validator(mode="after")
    def _check_options(self) -> SMPDistributed:
        options = {"sagemaker_mpi_custom_mpi_options": json.dumps(self.custom_mpi_options)}
        rehearse_launch(options, processes_per_host=self.process_count_per_node, num_hosts=1)
        return self

    @property
    def driver_dir(self) -> str:
        """A folder that goes into the job: a copy of this package, and each time a new secret for the job's
        hosts (`entrypoints.hosts.secret`). It lasts as long as this object."""
        if self._staging is None:
            self._staging = tempfile.TemporaryDirectory()
            package_directory(Path(self._staging.name))
        Path(self._staging.name, SECRET_FILE).write_text(new_secret())
        return self._staging.name

    @property
    def driver_script(self) -> str:
        """The file of `driver_dir` that the container runs."""
        return "smp_lite/entrypoints/sdk_v3_driver.py"
