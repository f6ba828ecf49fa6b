"""Variables for the network between GPUs of different hosts: EFA by libfabric, and NCCL on top of it.

They are defaults: whatever the container's environment or the user's `-x` says wins. What they are and why:

* `FI_PROVIDER=efa`: libfabric takes the adapter, and no other provider by mistake. sagemaker-training 5.1.4
  sets it on its types with EFA; `instance_types` knows more of them.
* `NCCL_PROTO=simple`: "to handle the out-of-order data delivery from EFA" (sagemaker-training, pull request
  196). NCCL's other protocols find the end of a message by flags among the data, which come before the data
  where packets overtake each other. Newer versions of AWS's NCCL plugin choose for themselves and may be
  faster; then say `NCCL_PROTO=` something else. Slow is better than wrong.
* `FI_EFA_USE_DEVICE_RDMA=1`: the adapter reads and writes the memory of GPUs (fi_efa(7)). On an adapter that
  cannot, a 1 ends the process, so it is set only where that is known; elsewhere libfabric looks for itself.
* `RDMAV_FORK_SAFE=1`: registered memory survives a fork (ibv_fork_init(3)), which a data loader with workers
  does. AWS's own drivers set it along with RDMA.
* `NCCL_SOCKET_IFNAME`: the interface that leads to the other hosts, by which NCCL's ranks find each other;
  AWS's toolkit sets it from the same `network_interface_name`. Only over several hosts: alone, nobody has
  promised that there is one of this name.

EFA also needs AWS's installer in the image (libfabric, aws-ofi-nccl), which AWS's own images have. Without it
these variables mean nothing to NCCL, and it goes over TCP.
"""

from __future__ import annotations

from ..container.instance_types import gpus_of_type

__all__ = ["fabric_environment"]


def fabric_environment(
    instance_type: str | None, *, interface: str | None, uses_gpus: bool
) -> dict[str, str]:
    """Variables for the ranks on hosts of `instance_type`; none where it is not known to have an adapter.

    Args:
        instance_type: of all hosts.
        interface: name of the network interface that leads to the other hosts; None where there are none.
        uses_gpus: whether the ranks compute on GPUs.
    """
    variables = {}
    gpus = gpus_of_type(instance_type)
    if gpus is not None and gpus.efa:
        variables |= {"FI_PROVIDER": "efa", "NCCL_PROTO": "simple"}
        if gpus.rdma:
            variables |= {"FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    if uses_gpus and interface is not None:
        variables["NCCL_SOCKET_IFNAME"] = interface
    return variables
