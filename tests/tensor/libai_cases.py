"""What the tests of LiBai's configurations run in the ranks."""

from __future__ import annotations

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
