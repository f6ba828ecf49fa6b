"""The secret of a job: the key that hosts make of it, and what is said where it is missing."""

from __future__ import annotations

from typing import Any

import pytest

from smp_lite.entrypoints.container.job import Job
from smp_lite.entrypoints.hosts.secret import SECRET_VARIABLE, job_key, new_secret, take_secret

SECRET = "a secret that strangers do not know"


def job(current: int = 1, num_hosts: int = 2, **hyperparameters: Any) -> Job:
    hosts = [f"algo-{number}" for number in range(1, num_hosts + 1)]
    return Job(hyperparameters, {}, {"current_host": f"algo-{current}", "hosts": hosts}, {})


def test_all_hosts_of_a_job_make_the_same_key() -> None:
    keys = {job_key(job(current, epochs=3), SECRET) for current in (1, 2)}
    assert len(keys) == 1
    assert len(keys.pop()) == 32


def test_other_jobs_and_other_secrets_make_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        job_key(job(epochs=3), SECRET),
        job_key(job(epochs=3), SECRET.swapcase()),
        job_key(job(epochs=4), SECRET),
        job_key(job(epochs=3, num_hosts=3), SECRET),
    ]
    monkeypatch.setenv("TRAINING_JOB_ARN", "arn:aws:sagemaker:us-west-2:123456789012:training-job/other")
    keys.append(job_key(job(epochs=3), SECRET))
    assert len(set(keys)) == len(keys)


def test_a_secret_is_taken_out_of_the_environment() -> None:
    environment = {SECRET_VARIABLE: SECRET, "OTHER": "stays"}
    assert take_secret(environment) == SECRET
    assert environment == {"OTHER": "stays"}
    assert take_secret(environment) is None
    assert take_secret({SECRET_VARIABLE: ""}) is None


def test_without_a_secret_the_way_out_is_told() -> None:
    with pytest.raises(
        ValueError, match="a job over 2 hosts needs SMP_LITE_JOB_SECRET, by which they know"
    ) as e:
        job_key(job(), None)
    assert "environment={'SMP_LITE_JOB_SECRET': secrets.token_urlsafe(32)}" in str(e.value)


@pytest.mark.parametrize("secret", ["hunter2", "é" * 31])
def test_a_short_secret_is_refused_and_not_shown(secret: str) -> None:
    text = f"SMP_LITE_JOB_SECRET is {len(secret)} characters long, and needs 32 or more"
    with pytest.raises(ValueError, match=text) as raised:
        job_key(job(), secret)
    assert secret not in str(raised.value)


def test_new_secrets_are_long_enough_and_differ() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    for secret in secrets:
        job_key(job(), secret)


def test_whatever_an_environment_can_hold_is_a_secret() -> None:
    job_key(job(), "\udcff" * 32)
