"""A manifest for Kubernetes: `smp-lite launch --on kubernetes`.

An `MPIJob` of the Kubeflow MPI operator (API v2beta1, operator 0.5 or later): worker pods that run sshd,
and a launcher pod whose mpirun reaches them by ssh. The image needs Python with smp_lite, Open MPI 4.1
or 5, an ssh client and sshd, and the script. Fields and their types: the operator's resource definition,
https://github.com/kubeflow/mpi-operator/blob/master/manifests/base/kubeflow.org_mpijobs.yaml

Why these fields:

* `--hostfile`: the operator names its host file in variables that only Open MPI 4 reads; Open MPI 5 would
  start every rank inside the launcher. `-x PATH`: a session over ssh has none of the image's environment,
  so a Python outside /usr/bin would not be found.
* `launcherCreationPolicy`: a launcher that starts before its workers cannot resolve their names, and fails.
* `backoffLimit: 0`: a failed run is not started again by itself, so that its first failure is its last word.
* `requests`: one CPU for each rank, for the scheduler to spread the workers by.
* `limits` of `nvidia.com/gpu`: the resource of NVIDIA's device plugin. Kubernetes takes GPUs as limits only,
  and the request is the same then.
* `/dev/shm` in memory, where there are GPUs: NCCL exchanges data between ranks of a host there, and a
  container's own has 64 MiB.

No shell is involved, but Kubernetes itself replaces `$(NAME)` in arguments and values, and reads `$$` as
`$`: each dollar sign is doubled. User text is always quoted, since YAML readers disagree on whether a bare
`1e-3` or `y` is text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from smp_lite.config import PARAMETERS_VARIABLE

from .cluster_job import ClusterJob

__all__ = ["kubernetes_manifest"]

_DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST_LABEL = 63
_HOST_FILE = "/etc/mpi/hostfile"  # where the operator mounts it
_SHARED_MEMORY = "shared-memory"


def kubernetes_manifest(job: ClusterJob, *, image: str) -> str:
    """The text of a file for `kubectl apply`: one MPIJob whose pods run the container `image`.

    Raises ValueError for a name that cannot name pods, or an image that cannot be one.
    """
    _check_name(job)
    if not image or any(character.isspace() or not character.isprintable() for character in image):
        raise ValueError(f"image {image!r} is none: write one such as registry.example.com/train:1")
    run_policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": 0}
    if job.time_limit_s is not None:
        run_policy["activeDeadlineSeconds"] = job.time_limit_s
    workers = {
        "name": "worker",
        "image": _Quoted(image),
        "resources": {"requests": {"cpu": _Quoted(job.processes_per_host)}},
    }
    if job.gpus_per_host:
        workers["resources"]["limits"] = {"nvidia.com/gpu": _Quoted(job.gpus_per_host)}
        workers["volumeMounts"] = [{"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]
    manifest = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": _Quoted(job.name)},
        "spec": {
            "slotsPerWorker": job.processes_per_host,
            "mpiImplementation": "OpenMPI",
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": run_policy,
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, _launcher(job, image)),
                "Worker": _replicas(job.hosts, workers, shared_memory=job.gpus_per_host > 0),
            },
        },
    }
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=float("inf"))


def _launcher(job: ClusterJob, image: str) -> dict[str, Any]:
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **job.gpu_environment}
    if job.parameters_json is not None:
        environment[PARAMETERS_VARIABLE] = job.parameters_json
    options = ["--allow-run-as-root", "--hostfile", _HOST_FILE, "-np", str(job.num_ranks)]
    options += ["--bind-to", "none", "--map-by", "slot", "--tag-output"]
    for name in ("PATH", *environment):
        options += ["-x", name]
    return {
        "name": "launcher",
        "image": _Quoted(image),
        "command": ["mpirun"],
        "args": [_Quoted(_literal(argument)) for argument in (*options, *job.command)],
        "env": [{"name": name, "value": _Quoted(_literal(value))} for name, value in environment.items()],
    }


def _replicas(count: int, container: dict[str, Any], *, shared_memory: bool = False) -> dict[str, Any]:
    pod: dict[str, Any] = {"containers": [container]}
    if shared_memory:
        pod["volumes"] = [{"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}


def _check_name(job: ClusterJob) -> None:
    """The operator names pods after the job, and a pod's name is a DNS label (RFC 1123)."""
    longest = f"{job.name}-worker-{job.hosts - 1}"
    if not _DNS_LABEL.fullmatch(job.name):
        raise ValueError(
            f"name {job.name!r}: Kubernetes takes lower-case letters, digits and - here, a letter first"
        )
    if len(longest) > _LONGEST_LABEL:
        raise ValueError(
            f"name {job.name!r} is too long by {len(longest) - _LONGEST_LABEL}: its pods would be called "
            f"{longest}, and Kubernetes takes at most {_LONGEST_LABEL} characters"
        )


def _literal(text: str) -> str:
    """`text` so that Kubernetes passes it on as it is."""
    return text.replace("$", "$$")


class _Quoted(str):
    """Text that is written in quotes."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Quoted` text, and lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Dumper.add_representer(
    _Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)
