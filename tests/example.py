"""The example of the SageMaker SDK's documentation of model parallelism, as several tests need it."""

from __future__ import annotations

PARAMETERS = {
    "microbatches": 4,
    "placement_strategy": "spread",
    "pipeline": "interleaved",
    "optimize": "speed",
    "partitions": 2,
    "ddp": True,
}
SMP_OPTIONS = {"enabled": True, "parameters": PARAMETERS}
MPI_OPTIONS = {
    "enabled": True,
    "processes_per_host": 8,
    "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none ",
}
