"""Training with stages of several ranks equals training the dense model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness import run_distributed
from tests.tensor.runtime_cases import Net, batches

BASE = {"microbatches": 2, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}


def dense(
    num_replicas: int = 1, *, tied: bool = False, optimizer: str = "AdamW", clip: float | None = None
) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net(tied=tied)
    optim = getattr(torch.optim, optimizer)(net.parameters(), lr=0.05)
    losses: list[list[float]] = [[] for _ in range(num_replicas)]
    norms = []
    data = [batches(3, replica) for replica in range(num_replicas)]
    for step in range(3):
        optim.zero_grad()
        for replica in range(num_replicas):
            x, y = data[replica][step]
            loss = F.cross_entropy(net(x), y)
            (loss / num_replicas).backward()
            losses[replica].append(loss.item())
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), clip)))
        optim.step()
    return {
        "losses": losses,
        "norms": norms,
        "parameters": dict(net.named_parameters()),
        "gradients": {name: parameter.grad for name, parameter in net.named_parameters()},
        "state": net.state_dict(),
        "optimizer": optim.state_dict(),
    }


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    seen = set()
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"][rank["replica"]], rel=1e-6)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for name, parameter in rank["parameters"].items():
            seen.add(name)
            torch.testing.assert_close(parameter, expected["parameters"][name], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                rank["gradients"][name], expected["gradients"][name], rtol=1e-4, atol=1e-6
            )
        assert list(rank["state"]) == list(expected["state"])
        for name, tensor in rank["state"].items():
            torch.testing.assert_close(tensor, expected["state"][name], rtol=1e-5, atol=1e-6)
        states = rank["optimizer"]["state"]
        assert states.keys() == expected["optimizer"]["state"].keys()
        for number, entries in states.items():
            for key, value in entries.items():
                torch.testing.assert_close(
                    value, expected["optimizer"]["state"][number][key], rtol=1e-4, atol=1e-6
                )
    assert seen == set(expected["parameters"])


GRID = [
    (4, {"partitions": 2}),
    (2, {"partitions": 1}),
    (4, {"partitions": 1}),
    (4, {"partitions": 2, "placement_strategy": "spread", "pipeline": "simple"}),
    (4, {"partitions": 2, "placement_strategy": "PTD", "optimize": "speed"}),
    (4, {"partitions": 1, "tensor_parallel_degree": 4}),
    (8, {"partitions": 2}),
]


@pytest.mark.parametrize(("world_size", "parameters"), GRID)
def test_training_equals_the_dense_model(world_size: int, parameters: dict[str, Any]) -> None:
    parameters = {**BASE, **parameters}
    found = run_distributed("tests.tensor.runtime_cases:train", world_size, kwargs={"parameters": parameters})
    mp_size = parameters["partitions"] * parameters["tensor_parallel_degree"]
    check(found, dense(world_size // mp_size))


def test_tied_weights_and_a_limit_on_the_norm() -> None:
    kwargs = {"parameters": {**BASE, "partitions": 2}, "tied": True, "clip": 0.5, "optimizer": "SGD"}
    found = run_distributed("tests.tensor.runtime_cases:train", 4, kwargs=kwargs)
    check(found, dense(tied=True, clip=0.5, optimizer="SGD"))
