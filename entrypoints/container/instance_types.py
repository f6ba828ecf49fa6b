"""What the instance types of SageMaker training are: their GPUs, and how these reach other hosts.

Nothing can be asked before a job is paid for, so this is a table. It has the types with NVIDIA GPUs that
CreateTrainingJob takes (botocore 1.44's model of the service), but for those whose number of GPUs was found
in no document of AWS: `ml.g7.*`. A type that is not here is not known, and nothing is guessed about it: the
estimator then asks for the number of ranks, and the container counts for itself.

Sources, read in November 2026, none tried on an instance:

* numbers of GPUs: the SDK's `instance_gpu_info.json` (p2 to p5, g4dn, g5), and the list of AWS's
  sagemaker-hyperpod-cli, `quota_allocation_util.py` (p5.4xlarge and later, g6, g6e, g7e);
* EFA: the list that AWS's SageMaker launcher for Ray falls back to, which came from EC2's
  DescribeInstanceTypes; g7e, sagemaker-hyperpod-cli; p5e and p6e, sagemaker-training 5.1.4;
* RDMA: the types for which sagemaker-training 5.1.4 switches it on, and those for which AWS's NCCL plugin
  (aws-ofi-nccl, `platform-aws.cpp`, `gdr_required`) refuses to run without;
* kind and memory of a GPU: AWS's pages of the families. They are for messages, not for planning.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["INSTANCE_TYPES", "InstanceGpus", "gpus_of_type"]


@dataclass(frozen=True)
class InstanceGpus:
    """The GPUs of a host.

    count: number of them.
    kind: their name.
    memory_gb: of each, in GB as AWS rounds it.
    efa: whether the host has an Elastic Fabric Adapter.
    rdma: whether that reads and writes the memory of GPUs; False also where that was not found.
    """

    count: int
    kind: str
    memory_gb: int
    efa: bool = False
    rdma: bool = False

    def __str__(self) -> str:
        return f"{self.count} GPU{'s' if self.count > 1 else ''} ({self.kind}, {self.memory_gb} GB each)"


def gpus_of_type(instance_type: str | None) -> InstanceGpus | None:
    """The GPUs of `instance_type`, such as `ml.p4d.24xlarge`; None where it has none, or is not known."""
    return None if instance_type is None else INSTANCE_TYPES.get(instance_type)


def _family(
    family: str, kind: str, memory_gb: int, counts: dict[str, int], efa: str = "", rdma: bool = False
) -> dict[str, InstanceGpus]:
    """The types of a family: size to number of GPUs; `efa` are the sizes with an adapter."""
    with_efa = efa.split()
    return {
        f"ml.{family}.{size}": InstanceGpus(
            count, kind, memory_gb, size in with_efa, size in with_efa and rdma
        )
        for size, count in counts.items()
    }


_ONE_TO_EIGHT = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
    **{"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
}
_FROM_8XLARGE = "8xlarge 12xlarge 16xlarge 24xlarge 48xlarge"

INSTANCE_TYPES: dict[str, InstanceGpus] = {
    **_family("p2", "K80", 12, {"xlarge": 1, "8xlarge": 8, "16xlarge": 16}),
    **_family("p3", "V100", 16, {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    **_family("p3dn", "V100", 32, {"24xlarge": 8}, "24xlarge"),
    **_family("p4d", "A100", 40, {"24xlarge": 8}, "24xlarge", rdma=True),
    **_family("p4de", "A100", 80, {"24xlarge": 8}, "24xlarge", rdma=True),
    **_family("p5", "H100", 80, {"4xlarge": 1, "48xlarge": 8}, "4xlarge 48xlarge", rdma=True),
    **_family("p5e", "H200", 141, {"48xlarge": 8}, "48xlarge", rdma=True),
    **_family("p5en", "H200", 141, {"48xlarge": 8}, "48xlarge", rdma=True),
    **_family("p6-b200", "B200", 180, {"48xlarge": 8}, "48xlarge", rdma=True),
    **_family("p6-b300", "B300", 268, {"48xlarge": 8}, "48xlarge", rdma=True),
    **_family("p6e-gb200", "GB200", 185, {"36xlarge": 4}, "36xlarge", rdma=True),
    **_family(
        "g4dn",
        "T4",
        16,
        {**dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1), "12xlarge": 4},
        "8xlarge 12xlarge 16xlarge",
    ),
    **_family("g5", "A10G", 24, _ONE_TO_EIGHT, _FROM_8XLARGE),
    **_family("g6", "L4", 24, _ONE_TO_EIGHT, _FROM_8XLARGE),
    **_family("g6e", "L40S", 48, _ONE_TO_EIGHT, _FROM_8XLARGE),
    **_family(
        "g7e",
        "RTX PRO 6000",
        96,
        {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8},
        "8xlarge 12xlarge 24xlarge 48xlarge",
    ),
}
"""By the name that the estimator's `instance_type` has."""
