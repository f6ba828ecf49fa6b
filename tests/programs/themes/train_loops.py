"""Training loops around a model: checkpoints, early stopping, loaders, exceptions, augmentation, adapters."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import logging
import math
import random
import tempfile
import time
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset
from tqdm import tqdm

from tests.programs import program


class Net(nn.Module):
    """Two halves and a head."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                [
                    ("fc1", nn.Linear(8, width)),
                    ("act1", nn.ReLU()),
                    ("fc2", nn.Linear(width, width)),
                    ("act2", nn.Tanh()),
                    ("fc3", nn.Linear(width, width)),
                    ("act3", nn.ReLU()),
                ]
            )
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def batches(smp: Any, steps: int = 3, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(21 + smp.dp_rank())
    for _ in range(steps):
        yield torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def make_steps(smp: Any) -> tuple[Any, Any]:
    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    @smp.step
    def eval_step(model: Any, x: Tensor) -> Tensor:
        return model(x)

    return train_step, eval_step


# Checkpoints -----------------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,))
def best_in_memory(smp: Any, out: Any) -> None:
    """The transfer learning tutorial: deepcopy of the best state dict, loaded back; early stopping."""
    torch.manual_seed(1)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    train_step, eval_step = make_steps(smp)
    best, best_loss, bad, patience = copy.deepcopy(model.state_dict()), math.inf, 0, 2
    held_x, held_y = next(iter(batches(smp, 1)))
    for epoch, (x, y) in enumerate(batches(smp, 6)):
        model.train()
        optimizer.zero_grad()
        train_step(model, x, y)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(eval_step(model, held_x).concat(), held_y).item()
        out.value("held-out", loss)
        if loss < best_loss:
            best_loss, best, bad = loss, copy.deepcopy(model.state_dict()), 0
        else:
            bad += 1
        if bad >= patience:
            out.value("stopped at", epoch)
            break
    model.load_state_dict(best)
    with torch.no_grad():
        out.value("best logits", eval_step(model, held_x).concat())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="a script can have one")
def save_and_resume(smp: Any, out: Any) -> None:
    """torch.save of model, optimizer and schedule in one dict, loaded into fresh ones."""
    torch.manual_seed(2)
    train_step, _ = make_steps(smp)

    def build() -> tuple[Any, Any, Any]:
        model = smp.DistributedModel(Net())
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)

    data = list(batches(smp, 4))
    model, optimizer, schedule = build()
    for x, y in data[:2]:
        optimizer.zero_grad()
        train_step(model, x, y)
        optimizer.step()
        schedule.step()
    buffer = io.BytesIO()
    torch.save(
        {
            "epoch": 2,
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
        },
        buffer,
    )
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    model, optimizer, schedule = build()
    model.load_state_dict(saved["model_state_dict"])
    optimizer.load_state_dict(saved["optimizer_state_dict"])
    schedule.load_state_dict(saved["schedule"])
    for x, y in data[saved["epoch"] :]:
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        schedule.step()
    out.value("rate", schedule.get_last_lr())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def roll_back(smp: Any, out: Any) -> None:
    """Training diverges, and model and optimizer go back to a checkpoint in memory, with half the rate."""
    torch.manual_seed(2)
    train_step, _ = make_steps(smp)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    saved = None
    for i, (x, y) in enumerate(batches(smp, 5)):
        if i == 2:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            state = saved["optimizer"]
            out.value("states", sorted(state["state"]))
            out.value("moments", [float(v["exp_avg"].sum()) for _, v in sorted(state["state"].items())])
            out.value("groups", [len(g["params"]) for g in state["param_groups"]])
        if i == 4:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def load_plain_checkpoint(smp: Any, out: Any) -> None:
    """A checkpoint that plain torch trained, weights and Adam's moments, is loaded between two steps."""
    torch.manual_seed(3)
    data = list(batches(smp, 4))
    plain = Net()
    adam = torch.optim.Adam(plain.parameters(), lr=0.05)
    for _ in range(2):
        adam.zero_grad()
        F.cross_entropy(plain(torch.ones(4, 8)), torch.tensor([0, 1, 2, 3])).backward()
        adam.step()
    train_step, _ = make_steps(smp)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    for i, (x, y) in enumerate(data):
        if i == 1:
            out.value("keys", str(model.load_state_dict(plain.state_dict())))
            optimizer.load_state_dict(adam.state_dict())
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def replaced_head(smp: Any, out: Any) -> None:
    """Transfer: a backbone's checkpoint with another head, filtered by shape, loaded with strict=False."""
    torch.manual_seed(4)
    pretrained = {f"module.{k}": v for k, v in Net(classes=10).state_dict().items()}
    net = Net()
    own = net.state_dict()
    fits = {k.removeprefix("module."): v for k, v in pretrained.items()}
    fits = {k: v for k, v in fits.items() if k in own and own[k].shape == v.shape}
    model = smp.DistributedModel(net)
    missing, unexpected = model.load_state_dict(fits, strict=False)
    out.value("missing", list(missing))
    out.value("unexpected", list(unexpected))
    for name, p in model.named_parameters():
        p.requires_grad = "head" in name
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.head.parameters(), lr=0.3))
    train_step, _ = make_steps(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def load_into_a_part(smp: Any, out: Any) -> None:
    """net.features.load_state_dict between two steps, and reset_parameters of the head, as in some papers."""
    net = Net()
    other = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    train_step, _ = make_steps(smp)
    for i, (x, y) in enumerate(batches(smp, 4)):
        if i == 2:
            net.features.load_state_dict(other.features.state_dict())
            net.head.reset_parameters()
            for layer in net.features:
                if isinstance(layer, nn.Linear):
                    nn.init.zeros_(layer.bias)
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.value("draw", torch.rand(1))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def safetensors_file(smp: Any, out: Any) -> None:
    """The state dict goes through safetensors and into a plain network for inference."""
    from safetensors.torch import load_file, save_file

    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    train_step, _ = make_steps(smp)
    for x, y in batches(smp, 2):
        optimizer.zero_grad()
        train_step(model, x, y)
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, path, metadata={"format": "pt"})
        net = Net()
        net.load_state_dict(load_file(path))
    net.eval()
    with torch.inference_mode():
        out.value("logits", net(x))
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def save_the_whole_module(smp: Any, out: Any) -> None:
    """torch.save of the module itself, not of its state dict; the copy that is loaded predicts."""
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step, _ = make_steps(smp)
    for x, y in batches(smp, 2):
        optimizer.zero_grad()
        train_step(model, x, y)
        optimizer.step()
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        out.value("logits", loaded(x))
    out.model(model)


# Things that go wrong in the loop ---------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,))
def step_raises_once(smp: Any, out: Any) -> None:
    """A check in the step function raises ValueError at the second batch; the loop logs it and goes on."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        if y.max() >= logits.shape[-1]:
            raise ValueError("label out of range")
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss

    for i, (x, y) in enumerate(batches(smp, 4)):
        if i == 1:
            y[-1] = 7  # in the last microbatch
        optimizer.zero_grad()
        try:
            loss = train_step(model, x, y)
        except ValueError as error:
            out.value("caught", str(error))
            continue
        optimizer.step()
        out.value("loss", loss.reduce_mean())
    out.model(model)


class OutOfMemoryBlock(nn.Module):
    """Fails as a GPU would when a sequence is too long."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 50:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.linear(x).relu()


@program(stages=(2,), ranks=(2,))
def out_of_memory_caught(smp: Any, out: Any) -> None:
    """fairseq's habit: a block raises an out-of-memory error, the batch is skipped, and training goes on."""
    net = nn.Sequential(nn.Linear(8, 16), OutOfMemoryBlock(16), OutOfMemoryBlock(16), nn.Linear(16, 4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step, _ = make_steps(smp)
    skipped = 0
    for i, (x, y) in enumerate(batches(smp, 4)):
        if i == 2:
            x[5] *= 1000
        optimizer.zero_grad()
        try:
            loss = train_step(model, x, y)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            skipped += 1
            model.zero_grad()
            continue
        optimizer.step()
        out.value("loss", loss.reduce_mean())
    out.value("skipped", skipped)
    out.model(model)


class FailsWhenTold(nn.Linear):
    fail = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            self.fail = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().forward(x)


@program(stages=(2,), ranks=(2,))
def allocator_fails_once(smp: Any, out: Any) -> None:
    """The last block runs out of memory once, whatever the data are; the batch is tried again in halves."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), FailsWhenTold(16, 16), nn.ReLU(), FailsWhenTold(16, 4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step, _ = make_steps(smp)
    for i, (x, y) in enumerate(batches(smp)):
        net[4].fail = i == 1
        optimizer.zero_grad()
        try:
            out.value("loss", train_step(model, x, y).reduce_mean())
        except torch.OutOfMemoryError:
            out.value("retried", i)
            optimizer.zero_grad()
            for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):
                out.value("half", train_step(model, half_x, half_y).reduce_mean())
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= 2
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def prune_after_wrapping(smp: Any, out: Any) -> None:
    """prune.l1_unstructured between wrapping and the first step, then once more between two steps."""
    net = Net()
    model = smp.DistributedModel(net)
    prune.l1_unstructured(net.features.fc1, "weight", amount=0.3)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
    train_step, _ = make_steps(smp)
    for i, (x, y) in enumerate(batches(smp)):
        if i == 1:
            prune.l1_unstructured(net.features.fc1, "weight", amount=0.2)
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def interrupted(smp: Any, out: Any) -> None:
    """KeyboardInterrupt out of the step function, caught outside the loop; the state is saved after it."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor, i: int) -> Tensor:
        calls.append(i)
        if i == 2:
            raise KeyboardInterrupt
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    try:
        for i, (x, y) in enumerate(batches(smp, 4)):
            optimizer.zero_grad()
            train_step(model, x, y, i)
            optimizer.step()
    except KeyboardInterrupt:
        out.value("interrupted", calls[-1])
    out.value("saved", {k: v.clone() for k, v in model.state_dict().items()})
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def nan_batches_skipped(smp: Any, out: Any) -> None:
    """Batches whose loss, or one of whose gradients, is not finite are left out."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    train_step, _ = make_steps(smp)
    for i, (x, y) in enumerate(batches(smp, 5)):
        if i == 1:
            x[0, 0] = math.nan
        if i == 3:
            x *= 1e30
        optimizer.zero_grad()
        loss = train_step(model, x, y).reduce_mean()
        if not torch.isfinite(loss):
            out.value("skipped by the loss", i)
            continue
        finite = all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        if not finite:
            out.value("skipped by gradients", i)
            continue
        optimizer.step()
        out.value("loss", loss)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def skip_in_the_step(smp: Any, out: Any) -> None:
    """No backward for a microbatch with too little to learn from; boolean indexing in the step."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        keep = y != 0
        loss = F.cross_entropy(model(x[keep]), y[keep], reduction="sum") / y.numel()
        if keep.sum() >= 3:
            model.backward(loss)
        return loss

    for x, y in batches(smp, 4):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


# Loaders, metrics, logging ----------------------------------------------------------------------------------


class Points(Dataset):
    def __init__(self, n: int = 24) -> None:
        generator = torch.Generator().manual_seed(9)
        self.x = torch.randn(n, 8, generator=generator)
        self.y = self.x.sum(1).gt(0).long() + 2 * self.x[:, 0].gt(0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"features": self.x[i], "label": int(self.y[i]), "id": f"sample-{i}"}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "features": torch.stack([s["features"] for s in samples]),
        "labels": torch.tensor([s["label"] for s in samples]),
        "ids": [s["id"] for s in samples],
        "weights": np.array([1.0 + s["label"] for s in samples], dtype=np.float32),
    }


@program(stages=(2,), ranks=(2,))
def loader_of_dicts(smp: Any, out: Any) -> None:
    """A DataLoader that shuffles by torch's global seed, collates dicts, under tqdm with a postfix."""
    torch.manual_seed(5)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    loader = DataLoader(Points(), batch_size=8, shuffle=True, collate_fn=collate, drop_last=True)

    @smp.step
    def train_step(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        logits = model(batch["features"])
        loss = F.cross_entropy(logits, batch["labels"])
        model.backward(loss)
        return {"loss": loss, "correct": (logits.argmax(-1) == batch["labels"]).sum()}

    for _ in range(2):
        progress = tqdm(loader, disable=True)
        for batch in progress:
            batch = {k: v for k, v in batch.items() if isinstance(v, Tensor)}
            optimizer.zero_grad()
            output = train_step(model, batch)
            optimizer.step()
            progress.set_postfix(loss=output["loss"].reduce_mean().item())
            out.value("loss", output["loss"].reduce_mean().item())
            out.value("correct", output["correct"].reduce_sum().item())
    out.model(model)


@dataclasses.dataclass
class Batch:
    features: Tensor
    labels: Tensor
    ids: list[str]

    def to(self, device: str) -> Batch:
        return dataclasses.replace(self, features=self.features.to(device), labels=self.labels.to(device))


@program(stages=(2,), ranks=(2,))
def loader_of_dataclasses(smp: Any, out: Any) -> None:
    """A collate function that returns a dataclass, which goes into the step function whole."""
    torch.manual_seed(6)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    loader = DataLoader(
        Points(),
        batch_size=8,
        shuffle=True,
        collate_fn=lambda s: Batch(
            torch.stack([i["features"] for i in s]),
            torch.tensor([i["label"] for i in s]),
            [i["id"] for i in s],
        ),
    )

    @smp.step
    def train_step(model: Any, batch: Batch) -> Tensor:
        loss = F.cross_entropy(model(batch.features), batch.labels)
        model.backward(loss)
        return loss

    for batch in loader:
        optimizer.zero_grad()
        out.value("loss", train_step(model, batch.to("cpu")).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def numpy_in_the_batch(smp: Any, out: Any) -> None:
    """The whole collated dict goes in: tensors, a list of strings, a numpy array of sample weights."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = Points()
    loader = DataLoader(
        torch.utils.data.Subset(data, range(smp.dp_rank(), 24, smp.dp_size())),
        batch_size=4,
        sampler=RandomSampler(range(24 // smp.dp_size()), generator=torch.Generator().manual_seed(1)),
        collate_fn=collate,
    )

    @smp.step
    def train_step(model: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
        losses = F.cross_entropy(model(batch["features"]), batch["labels"], reduction="none")
        weights = torch.from_numpy(np.asarray(batch["weights"]))[: len(losses)]
        loss = (losses * weights).sum() / weights.sum()
        model.backward(loss)
        return loss, len(batch["ids"])

    for batch in loader:
        optimizer.zero_grad()
        loss, count = train_step(model, batch)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("count", list(count) if isinstance(count, list | tuple) else count)
    out.model(model)


@program(stages=(2,), ranks=(2,), static=True)
def numpy_metrics(smp: Any, out: Any) -> None:
    """Evaluation over an epoch: outputs to numpy, a confusion matrix; the average of a meter."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.03))
    train_step, eval_step = make_steps(smp)
    for _ in range(2):
        meter = defaultdict(float)
        for x, y in batches(smp, 2):
            optimizer.zero_grad()
            loss = train_step(model, x, y)
            optimizer.step()
            meter["sum"] += loss.reduce_mean().item() * x.size(0)
            meter["count"] += x.size(0)
        out.value("average", meter["sum"] / meter["count"])
        model.eval()
        confusion = np.zeros((4, 4), dtype=np.int64)
        scores = []
        with torch.no_grad():
            for x, y in batches(smp, 2):
                probabilities = eval_step(model, x).concat().softmax(-1).cpu().numpy()
                scores.append(probabilities.max(axis=1))
                np.add.at(confusion, (y.numpy(), probabilities.argmax(axis=1)), 1)
        model.train()
        out.value("confusion", confusion.tolist())
        out.value("scores", np.concatenate(scores).tolist())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def profiled_and_timed(smp: Any, out: Any) -> None:
    """torch.profiler with a schedule around the steps, record_function in the step, timers, anomaly mode."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.profiler.record_function("forward"):
            loss = F.cross_entropy(model(x), y)
        with torch.profiler.record_function("backward"):
            model.backward(loss)
        return loss

    began = time.perf_counter()
    times = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
    ) as profiler:
        for x, y in batches(smp):
            optimizer.zero_grad()
            out.value("loss", train_step(model, x, y).reduce_mean())
            optimizer.step()
            profiler.step()
            times.append(time.perf_counter() - began)
    with torch.autograd.set_detect_anomaly(True):
        for x, y in batches(smp, 1):
            optimizer.zero_grad()
            out.value("loss in anomaly mode", train_step(model, x, y).reduce_mean())
    out.value("times grow", times == sorted(times))
    out.model(model)


class Chatty(nn.Module):
    """Warns and logs in forward, and counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            warnings.warn("the first call may be slow", UserWarning, stacklevel=2)
        logging.getLogger("chatty").debug("input %s, mean %.3f", tuple(x.shape), x.mean())
        return torch.relu(self.linear(x))


@program(stages=(2,), ranks=(2,))
def warnings_and_logs(smp: Any, out: Any) -> None:
    """Blocks that warn, log a mean and count; warnings are recorded and turned into errors for a part."""
    net = nn.Sequential(nn.Linear(8, 12), Chatty(12), Chatty(12), nn.Linear(12, 4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step, _ = make_steps(smp)
    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error" if i else "ignore")
            out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


# Randomness in the loop ------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), replicas=(1, 2))
def augmentation_in_the_step(smp: Any, out: Any) -> None:
    """Noise from torch, a scale from random, a flip from numpy, all drawn in the step function."""
    torch.manual_seed(1 + smp.dp_rank())
    random.seed(1 + smp.dp_rank())
    np.random.seed(1 + smp.dp_rank())
    torch_net = Net()
    for i, p in enumerate(torch_net.parameters()):
        nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(i))
    model = smp.DistributedModel(torch_net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        x = x + 0.1 * torch.randn_like(x)
        x = x * random.uniform(0.8, 1.2)
        if np.random.rand() < 0.5:
            x = x.flip(1)
        mask = torch.rand(x.shape) > 0.1
        loss = F.cross_entropy(model(x * mask), y)
        model.backward(loss)
        return loss, np.random.randint(100)

    for x, y in batches(smp):
        optimizer.zero_grad()
        loss, drawn = train_step(model, x, y)
        optimizer.step()
        out.value("loss", loss)
        out.value("drawn", [int(d) for d in drawn])
    out.value("numpy's next", float(np.random.rand()))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def seeds_per_step(smp: Any, out: Any) -> None:
    """torch.manual_seed within the step function, fork_rng around a draw, and a generator of one's own."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator()

    @smp.step
    def train_step(model: Any, x: Tensor, y: Tensor, i: int) -> Tensor:
        torch.manual_seed(100 + i)
        generator.manual_seed(i)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            noise = torch.randn(x.shape)
        x = x + 0.1 * noise + 0.1 * torch.randn(x.shape, generator=generator) + 0.1 * torch.rand_like(x)
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for i, (x, y) in enumerate(batches(smp)):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y, i))
        optimizer.step()
        out.value("next", torch.rand(1))
    out.model(model)


@program(stages=(2,), ranks=(2,))
def mixup_in_the_loop(smp: Any, out: Any) -> None:
    """mixup before the step by numpy's beta and torch's randperm; the lambda is a plain float argument."""
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))

    @smp.step
    def train_step(model: Any, x: Tensor, ya: Tensor, yb: Tensor, lam: float) -> Tensor:
        logits = model(x)
        loss = lam * F.cross_entropy(logits, ya) + (1 - lam) * F.cross_entropy(logits, yb)
        model.backward(loss)
        return loss

    for x, y in batches(smp):
        lam = np.random.beta(0.4, 0.4)
        order = torch.randperm(x.size(0))
        optimizer.zero_grad()
        out.value("loss", train_step(model, lam * x + (1 - lam) * x[order], y, y[order], lam).reduce_mean())
        optimizer.step()
    out.model(model)


class DeepNet(nn.Module):
    """Stochastic depth decided in the container's forward."""

    def __init__(self, depth: int = 5, survive: float = 0.6) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(depth)
        )
        self.out = nn.Linear(12, 4)
        self.survive = survive

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            keep = 1 - (i + 1) / len(self.blocks) * (1 - self.survive)
            if not self.training:
                x = x + keep * block(x)
            elif torch.rand(1).item() < keep:
                x = x + block(x)
        return self.out(x)


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def stochastic_depth(smp: Any, out: Any) -> None:
    """Layers are skipped by draws in the container's forward; evaluation scales them instead."""
    model = smp.DistributedModel(DeepNet())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    train_step, eval_step = make_steps(smp)
    torch.manual_seed(50)
    for x, y in batches(smp, 4):
        model.train()
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out.value("logits", eval_step(model, x).concat())
    out.model(model)


@program(stages=(2,), ranks=(2,), static=False)
def curriculum(smp: Any, out: Any) -> None:
    """Batch size and sequence length grow during training, and shrink again."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.mix = nn.Linear(8, 8)
            self.gru = nn.GRU(8, 8, batch_first=True)
            self.tag = nn.Linear(8, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            h, _ = self.gru(torch.tanh(self.mix(self.embed(tokens))))
            return self.tag(h)

    model = smp.DistributedModel(Tagger())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))

    @smp.step
    def train_step(model: Any, tokens: Tensor, tags: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).view(-1, 5), tags.view(-1))
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(8)
    for size, length in [(4, 3), (4, 5), (8, 5), (6, 2), (4, 3)]:
        tokens = torch.randint(0, 10, (size, length), generator=generator)
        optimizer.zero_grad()
        out.value("loss", train_step(model, tokens, tokens % 5).reduce_mean())
        optimizer.step()
    out.model(model)


# Adapters, pruning, parametrisations ------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """As in loralib, by hand."""

    def __init__(self, base: nn.Linear, r: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base = base
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return self.base(x)
        return self.base(x) + self.scale * (x @ self.a.t()) @ self.b.t()

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight += self.scale * self.b @ self.a
        self.merged = True


@program(stages=(2,), ranks=(2,))
def lora(smp: Any, out: Any) -> None:
    """LoRA put into a trained network by setattr; trained, then merged and evaluated again."""
    net = Net()
    for name in ("fc1", "fc2", "fc3"):
        setattr(net.features, name, LoRALinear(getattr(net.features, name)))
    net.head.requires_grad_(False)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    )
    train_step, eval_step = make_steps(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    adapter = {k: v for k, v in model.state_dict().items() if k.endswith((".a", ".b"))}
    out.value("adapter", {k: float(v.abs().sum()) for k, v in adapter.items()})
    model.eval()
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.merge()
    with torch.no_grad():
        out.value("merged logits", eval_step(model, x).concat())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="was removed from the model")
def pruned(smp: Any, out: Any) -> None:
    """torch.nn.utils.prune before training, iterative pruning between steps, made permanent at the end."""
    net = Net()
    prune.l1_unstructured(net.features.fc1, "weight", amount=0.3)
    model = smp.DistributedModel(net)
    train_step, eval_step = make_steps(smp)
    prune.random_unstructured(net.head, "weight", amount=0.25)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
        for module in (net.features.fc1, net.head):
            out.value("sparsity", float((module.weight_mask == 0).float().mean()))
    prune.remove(net.features.fc1, "weight")
    with torch.no_grad():
        out.value("logits", eval_step(model, x).concat())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused="was added to the model after the first step")
def weight_norm_removed_for_inference(smp: Any, out: Any) -> None:
    """Weight norm while it trains; plain weights afterwards."""
    net = Net()
    torch.nn.utils.parametrizations.weight_norm(net.head)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    train_step, eval_step = make_steps(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    torch.nn.utils.parametrize.remove_parametrizations(net.head, "weight")
    model.eval()
    with torch.no_grad():
        out.value("logits", eval_step(model, x).concat())
    out.model(model)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def global_pruning_later(smp: Any, out: Any) -> None:
    """Lottery ticket: dense training, a mask by the global magnitude, weights rewound, trained masked."""
    net = Net()
    start = copy.deepcopy(net.state_dict())
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    train_step, _ = make_steps(smp)
    for x, y in batches(smp, 2):
        optimizer.zero_grad()
        train_step(model, x, y)
        optimizer.step()
    weights = {n: p for n, p in net.named_parameters() if p.dim() > 1}
    everything = torch.cat([p.detach().abs().flatten() for p in weights.values()])
    limit = everything.kthvalue(everything.numel() // 2).values
    masks = {n: (p.detach().abs() > limit).float() for n, p in weights.items()}
    out.value("kept", {n: int(m.sum()) for n, m in masks.items()})
    model.load_state_dict(start)
    for x, y in batches(smp, 2):
        with torch.no_grad():
            for name, mask in masks.items():
                weights[name].mul_(mask)
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        for name, mask in masks.items():
            if weights[name].grad is not None:
                weights[name].grad.mul_(mask)
        optimizer.step()
    out.model(model)


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def parametrized(smp: Any, out: Any) -> None:
    """A symmetric weight, weight norm and spectral norm by parametrize, removed at the end."""
    net = Net()
    parametrize.register_parametrization(net.features.fc2, "weight", Symmetric())
    parametrizations.weight_norm(net.features.fc3)
    parametrizations.spectral_norm(net.head)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    train_step, eval_step = make_steps(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    model.eval()
    w = net.features.fc2.weight.detach()
    out.value("symmetric", torch.equal(w, w.t()))
    out.value("weights", (w, net.features.fc3.weight.detach()))
    with torch.no_grad():
        out.value("logits", eval_step(model, x).concat())
    out.model(model)


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1).float(), None


class QuantLinear(nn.Linear):
    """Weights by an autograd function, activations by the detach trick; a buffer tracks the range."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__(i, o)
        self.register_buffer("range", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.range.mul_(0.9).add_(0.1 * x.detach().abs().max())
        step = self.range / 16
        x = x + ((x / step).round() * step - x).detach()
        return F.linear(x, Quantize.apply(self.weight, 0.05), self.bias)


@program(stages=(2, 3), ranks=(2,), refused_on_ranks="lives on stage")
def straight_through(smp: Any, out: Any) -> None:
    """Quantisation-aware training with straight-through estimators and a range kept in a buffer."""
    net = nn.Sequential(QuantLinear(8, 16), nn.ReLU(), QuantLinear(16, 16), nn.ReLU(), QuantLinear(16, 4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    train_step, eval_step = make_steps(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out.value("logits", eval_step(model, x).concat())
    out.value("ranges", [m.range.item() for m in net if isinstance(m, QuantLinear)])
    out.model(model)


class Checkpointed(nn.Module):
    """Its container wraps every block in torch.utils.checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inp = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return self.out(x)


@program(stages=(2,), ranks=(2,))
def checkpointed_blocks(smp: Any, out: Any) -> None:
    """torch.utils.checkpoint around each block in the container's forward, not reentrant."""
    model = smp.DistributedModel(Checkpointed(False))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step, _ = make_steps(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def checkpointed_reentrant(smp: Any, out: Any) -> None:
    """The old reentrant checkpoint."""
    model = smp.DistributedModel(Checkpointed(True))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step, _ = make_steps(smp)
    for x, y in batches(smp):
        optimizer.zero_grad()
        out.value("loss", train_step(model, x, y).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def trainer_class(smp: Any, out: Any) -> None:
    """A Trainer object with callbacks whose bound method is the step function, the model kept in self."""

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = smp.DistributedModel(model)
            self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.02))
            self.criterion = nn.CrossEntropyLoss(
                label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5, 1.0])
            )
            self.history: list[float] = []
            self.step = smp.step(self._step)

        def _step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self.criterion(self.model(x), y)
            self.model.backward(loss)
            return loss

        def fit(self, data: Any) -> None:
            self.model.train()
            for x, y in data:
                self.optimizer.zero_grad(set_to_none=True)
                loss = self.step(x, y).reduce_mean()
                with contextlib.suppress(AttributeError):
                    self.on_after_backward()
                self.optimizer.step()
                self.history.append(loss.item())

        def on_after_backward(self) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    trainer = Trainer(Net())
    trainer.fit(batches(smp))
    out.value("history", trainer.history)
    out.model(trainer.model)


@program(stages=(2,), ranks=(2,))
def tensor_dataset_epochs(smp: Any, out: Any) -> None:
    """TensorDataset with random_split, three epochs by a loader with a generator, zip of loader and count."""
    x = torch.linspace(-1, 1, 16 * 8).view(16, 8)
    data = TensorDataset(x, x[:, 0].gt(0).long())
    train, held = torch.utils.data.random_split(data, [12, 4], generator=torch.Generator().manual_seed(0))
    loader = DataLoader(train, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = smp.DistributedModel(Net(classes=2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    train_step, eval_step = make_steps(smp)
    for epoch in range(2):
        for xb, yb in loader:
            optimizer.zero_grad()
            train_step(model, xb, yb)
            optimizer.step()
        with torch.no_grad():
            xb, yb = next(iter(DataLoader(held, batch_size=4)))
            accuracy = (eval_step(model, xb).concat().argmax(1) == yb).float().mean()
        out.value(f"accuracy {epoch}", accuracy.item())
    out.model(model)
