"""SageMaker's example of model parallelism, run on this machine.

    python notebooks/fit.py

The estimator is the one that the SageMaker documentation shows for its modelparallel library. What
differs is the session: with `LocalMPISession` the same job request is run here, as MPI processes,
instead of being sent to AWS. Everything of the job is kept in the folder `smp_lite_jobs` beside this
one (inside, a session with AWS would send it along with the source).
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from smp_lite.estimator import LocalMPISession, PyTorch

here = Path(__file__).resolve().parent

mpi_options = {
    "enabled": True,
    "processes_per_host": 4,  # 2 partitions x 2 replicas
    "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none ",
}

smp_options = {
    "enabled": True,
    "parameters": {
        "microbatches": 4,
        "placement_strategy": "spread",
        "pipeline": "interleaved",
        "optimize": "speed",
        "partitions": 2,
        "ddp": True,
    },
}

estimator = PyTorch(
    entry_point="train_gpt.py",
    source_dir=str(here),
    role="SageMakerRole",  # not looked at by a local job
    instance_type="local",
    instance_count=1,
    sagemaker_session=LocalMPISession(here.parent / "smp_lite_jobs"),
    distribution={"smdistributed": {"modelparallel": smp_options}, "mpi": mpi_options},
    base_job_name="smp-lite-demo",
)

if __name__ == "__main__":
    text = Path(sysconfig.get_path("stdlib"))  # the Python library's own source
    estimator.fit({"train": text.as_uri()})
    print(f"trained weights: {estimator.model_data}")
