"""What the tests of LiBai's configurations run in the ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import smp_lite as smp
from smp_lite.nn.layout import layout_of, whole_of
from tests.tensor.plans.known_models import batch_of, build_known

NUM_STEPS, ROWS = 3, 2


def loader(name: str, num_batches: int, replica: int) -> list[dict[str, Any]]:
    """Microbatches of one replica, as a data loader gives them."""
    return [batch_of(name, 100 * replica + number, ROWS) for number in range(num_batches)]


def train(
    config: Any, name: str, overrides: tuple[str, ...] = (), dropout: float = 0.0
) -> dict[str, Any] | str:
    """Losses of this replica, whole parameters at the end, and where modules lie; or what was told."""
    smp.init(config, overrides=overrides)
    changes = {"attention_probs_dropout_prob": dropout} if dropout else {}
    net = build_known(name, **changes)
    if "partitions" in config:  # SageMaker's parameters leave it to the script
        smp.parallelize(net)
    try:
        model = smp.DistributedModel(net)
    except (smp.SMPError, ValueError) as error:
        return str(error)
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5))

    @smp.step
    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        model.backward(loss)
        return loss

    losses = []
    for batch in smp.batches(loader(name, NUM_STEPS * smp.state.cfg.microbatches, smp.rdp_rank())):
        optim.zero_grad()
        losses.append(step(batch).reduce_mean().item())
        optim.step()
    found, split = {}, []
    for parameter, tensor in model.local_named_parameters():
        layout = layout_of(tensor)
        found[parameter] = tensor.detach() if layout is None else whole_of(tensor, layout)
        if layout is not None and layout.axes:
            split.append(parameter)
    return {
        "losses": losses,
        "parameters": found,
        "split": split,
        "replica": smp.rdp_rank(),
        "stage": smp.pp_rank(),
    }


def sizes(config: Any, rows: list[int]) -> list[str]:
    """What steps with microbatches of so many rows are told: a warning, or nothing."""
    smp.init(config)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))

    @smp.step(input_split_axes={"x": 1})
    def step(x: torch.Tensor, scale: torch.Tensor, *, trains: bool) -> torch.Tensor:
        loss = (model(x.transpose(0, 1)) * scale).square().mean()
        if trains:
            model.backward(loss)
        return loss

    told = []
    for count in rows:
        loader = [torch.ones(count, 4)] * smp.state.cfg.microbatches
        for batch in smp.batches(loader):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(batch.transpose(0, 1), torch.tensor(2.0), trains=False)
                assert not caught
                step(batch.transpose(0, 1), torch.tensor(2.0), trains=True)
                told.append("".join(str(each.message) for each in caught))
    return told
