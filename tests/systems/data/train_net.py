"""Trains a small model; how is said by options."""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F

import smp_lite as smp
from tests.systems.split_models import WIDTH, Net

parser = argparse.ArgumentParser()
parser.add_argument("--parameters", type=json.loads)
parser.add_argument("--split", type=json.loads)
parser.add_argument("--rate-by-rank", action="store_true")
parser.add_argument("--weights-by-rank", action="store_true")
args = parser.parse_args()

smp.init(args.parameters)
torch.manual_seed(smp.rank() if args.weights_by_rank else 0)
net = Net()
if args.split is not None:
    smp.parallelize(net, args.split)
model = smp.DistributedModel(net)
rate = 0.05 * (1 + smp.dp_size() * args.rate_by_rank)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=rate))


@smp.step
def step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


generator = torch.Generator().manual_seed(smp.rdp_rank())
loader = [
    (torch.randn(8, WIDTH, generator=generator), torch.randint(8, (8,), generator=generator))
    for _ in range(8)
]
for x, y in smp.batches(loader):
    optimizer.zero_grad()
    step(model, x, y)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
