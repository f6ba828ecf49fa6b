"""What the hosts of a job know and strangers do not: `SMP_LITE_JOB_SECRET`, a random text made for each job.

Who reaches a host's port and knows the secret may start mpirun's daemon there, so it must come by a channel
that strangers lack. A stranger here is whoever can send packets to a host: another job in the same network, a
notebook in the same VPC. What a container of SageMaker has, and why most of it is no secret:

* The job's name and ARN (`TRAINING_JOB_ARN`) and the names of the hosts can be guessed, and are in every log.
* Hyperparameters are known to whoever knows the script. They also become the script's command line, which
  every process of a machine can read, and go into the notes of experiment trackers.
* The role's credentials are secret, but not shared: each container fetches its own, and they change.
* **The job's environment** is whatever the request said, the same on all hosts. Reading it takes the right to
  describe the job in the account, which strangers on the network do not have. It is on no command line.

So the secret travels in the environment. `smp_lite.estimator.PyTorch` makes a new one for each request of a
job over several hosts; every other way to start a job can set it likewise (``environment={...}``). A launch
strategy of version 3 of the SDK cannot add to the environment: `SMPDistributed` leaves the secret in the
folder that travels with the job, where reading it takes the right to read the job's bucket, and
`sdk_v3_driver` takes it from there. Where there is none, a job over several hosts is refused, and nothing
listens beyond this machine. Hosts that are all played by one machine meet in a folder and need no secret
(`one_machine`); clusters with launchers of their own do not use the port.

The variable is taken out of the environment before the user's code is fetched, so neither ranks nor what
they start and log have it. The first host hands the key on to mpirun's agent in a file that only its user can
read.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import MutableMapping

from ..container.job import Job

__all__ = ["SECRET_VARIABLE", "check_secret", "job_key", "new_secret", "take_secret"]

SECRET_VARIABLE = "SMP_LITE_JOB_SECRET"

_SHORTEST = 32
"""Characters: with fewer, who has listened to a handshake could try all of them."""
_WAY_OUT = (
    "smp_lite.estimator.PyTorch makes one for each job; elsewhere give the estimator environment="
    f"{{{SECRET_VARIABLE!r}: secrets.token_urlsafe(32)}}, made anew for each job"
)


def new_secret() -> str:
    """A text of 43 characters that nobody guesses: 256 random bits."""
    return secrets.token_urlsafe(32)


def take_secret(environment: MutableMapping[str, str]) -> str | None:
    """The secret of the job, which is then no more in `environment`; None where there is none."""
    return environment.pop(SECRET_VARIABLE, None) or None


def check_secret(secret: str) -> None:
    """Raises ValueError for a secret that could be guessed, without showing it."""
    if len(secret) < _SHORTEST:
        raise ValueError(
            f"{SECRET_VARIABLE} is {len(secret)} characters long, and needs {_SHORTEST} or more that nobody "
            f"can guess: {_WAY_OUT}"
        )


def job_key(job: Job, secret: str | None) -> bytes:
    """The key of a job over several hosts: of the job and its secret, so that two jobs which were given one
    secret remain strangers.

    Raises:
        ValueError: there is no secret, or it could be guessed.
    """
    if secret is None:
        raise ValueError(
            f"a job over {len(job.hosts)} hosts needs {SECRET_VARIABLE}, by which they know each other from "
            f"strangers: {_WAY_OUT}"
        )
    check_secret(secret)
    known = [
        dict(job.hyperparameters),
        dict(job.framework_parameters),
        job.hosts,
        os.environ.get("TRAINING_JOB_ARN", ""),
    ]
    return hmac.digest(os.fsencode(secret), json.dumps(known, sort_keys=True).encode(), "sha256")
