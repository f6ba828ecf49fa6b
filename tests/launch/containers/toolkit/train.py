"""The user's script of the test: two steps of a tiny model, and how far it is from one process."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import smp_lite as smp


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(count)]


@smp.step
def train_step(model, inputs, targets):
    loss = F.mse_loss(model(inputs), targets)
    model.backward(loss)
    return loss


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--fail", type=int, default=None, help="the rank that fails")
parser.add_argument("--mp_parameters", help="the toolkit always passes them")
args = parser.parse_args()

smp.init()
model = smp.DistributedModel(make_model())
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
losses = []
for inputs, targets in make_batches(args.steps):
    optimizer.zero_grad()
    losses.append(train_step(model, inputs, targets).reduce_mean().item())
    optimizer.step()
    if smp.rank() == args.fail:
        raise RuntimeError("this rank was told to fail")

plain = make_model()
plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
plain_losses = []
for inputs, targets in make_batches(args.steps):
    plain_optimizer.zero_grad()
    loss = F.mse_loss(plain(inputs), targets)
    loss.backward()
    plain_losses.append(loss.item())
    plain_optimizer.step()

result = {"size": smp.size(), "pp_rank": smp.pp_rank(), "losses": losses, "plain_losses": plain_losses}
with open(os.path.join(os.environ["SM_MODEL_DIR"], f"rank{smp.rank()}.json"), "w") as file:
    json.dump(result, file)
