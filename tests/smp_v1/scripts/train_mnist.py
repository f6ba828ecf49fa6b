"""Trains a small network on pictures: the calls of the container's mnist script for SMP v1, in its order."""

import argparse
import math
import random

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.cuda.amp import autocast
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.backends.cudnn.deterministic = True
torch.backends.cudnn.benchmark = False


class Net1(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return torch.flatten(F.max_pool2d(x, 2), 1)


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(128, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = Net1()
        self.net2 = Net2()

    def forward(self, x):
        return self.net2(self.net1(x))


@smp.step
def train_step(args, model, scaler, data, target):
    with autocast(args.amp > 0):
        output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(scaler.scale(loss) if args.amp else loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    pred = output.argmax(dim=1, keepdim=True)
    return loss, pred.eq(target.view_as(pred)).sum().item()


def train(args, model, scaler, device, loader, optimizer, epoch):
    model.train()
    for index, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        _, loss_mb = train_step(args, model, scaler, data, target)
        loss = loss_mb.reduce_mean()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        elif len(list(model.local_parameters())) > 0:
            optimizer.step()
        if smp.rank() == 0 and index % 4 == 0:
            print(f"epoch {epoch} {index}: {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            losses, corrects = test_step(model, data.to(device), target.to(device))
            loss += sum(losses)
            correct += sum(corrects)
    return loss / len(loader.dataset), correct


def pictures(count, seed):
    """One bright row or column for each class."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (count,), generator=generator)
    data = torch.rand(count, 1, 12, 12, generator=generator) * 0.3
    for i, label in enumerate(target.tolist()):
        if label < 5:
            data[i, 0, 2 * label] += 1
        else:
            data[i, 0, :, 2 * (label - 5)] += 1
    return TensorDataset(data, target)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--ddp", type=int, default=0)
    parser.add_argument("--partial-checkpoint", default="")
    parser.add_argument("--full-checkpoint", default="")
    parser.add_argument("--save-full-model", action="store_true")
    parser.add_argument("--save-partial-model", action="store_true")
    parser.add_argument("--assert-losses", type=int, default=0)
    parser.add_argument("--mp_parameters", default="")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("The script requires CUDA support, but CUDA not available")
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.cuda.manual_seed(1)
    smp.init()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    dataset = pictures(160, 1)
    if args.ddp and smp.dp_size() > 1:
        dataset = Subset(dataset, range(smp.dp_rank(), 160, smp.dp_size()))
    options = {"batch_size": 16 // smp.dp_size(), "num_workers": 1, "pin_memory": True, "shuffle": False}
    train_loader = DataLoader(dataset, **options)
    test_loader = DataLoader(pictures(64, 2), **options)
    model = GroupedNet()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(optimizer)
    name = args.partial_checkpoint or args.full_checkpoint
    if name:
        checkpoint = smp.load(name, partial=bool(args.partial_checkpoint))
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    for epoch in range(1, args.epochs + 1):
        train(args, model, scaler, device, train_loader, optimizer, epoch)
        test_loss, correct = test(model, device, test_loader)
        scheduler.step()
    if smp.dp_rank() == 0:
        for wanted, partial in ((args.save_partial_model, True), (args.save_full_model, False)):
            if wanted:
                content = {
                    "model_state_dict": model.local_state_dict() if partial else model.state_dict(),
                    "optimizer_state_dict": optimizer.local_state_dict()
                    if partial
                    else optimizer.state_dict(),
                }
                smp.save(content, "./pt_mnist_checkpoint.pt", partial=partial)
    smp.barrier()
    if args.assert_losses:
        for loss in smp.allgather(test_loss, smp.DP_GROUP):
            assert math.isclose(loss, test_loss)
        assert test_loss < 0.5, test_loss
    smp.barrier()
    print(f"rank {smp.rank()}: test loss {test_loss!r}, {correct} correct")
    print("SMP training finished successfully")


if __name__ == "__main__":
    main()
