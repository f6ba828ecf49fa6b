"""What the tests of Colossal-AI's API run in the ranks: its documentation's snippets, with other imports."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import smp_lite as smp
import smp_lite.systems.colossal as colossalai
from smp_lite.nn.layout import layout_of, whole_of
from smp_lite.session import current
from smp_lite.systems.colossal import (
    LAYERS,
    MODELS,
    InterleavedPipelineSchedule,
    ModelFromConfig,
    ParallelMode,
    PipelineSchedule,
    build_pipeline_model,
    build_pipeline_model_from_cfg,
)
from smp_lite.systems.colossal import global_context as gpc
from tests.tensor.runtime_cases import Block

FEATURES, HIDDEN, CLASSES, BATCH, NUM_BATCHES = 4, 16, 8, 8, 3


@MODELS.register_module
class MyModel(ModelFromConfig):
    def __init__(self, hidden: int, depth: int) -> None:
        super().__init__()
        self.layers_cfg = [
            {"type": "Linear", "in_features": FEATURES, "out_features": hidden},
            *[{"type": "Doubling", "features": hidden} for _ in range(depth)],
            {"type": "Linear", "in_features": hidden, "out_features": CLASSES},
        ]


@LAYERS.register_module
class Doubling(nn.Module):
    """A layer of the user's own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(x))


@MODELS.register_module
class InTwoDimensions(ModelFromConfig):
    """Layers of a tensor mode between a split and a gather."""

    def __init__(self, kind: str, options: list[dict[str, Any]], last: dict[str, Any]) -> None:
        super().__init__()
        sizes = [(FEATURES, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES), (CLASSES, CLASSES)]
        self.layers_cfg = [{"type": "SplitInput"}]
        for (inside, outside), more in zip(sizes, options, strict=True):
            self.layers_cfg += [
                dict(type=kind, in_features=inside, out_features=outside, **more),
                {"type": "Tanh"},
            ]
        self.layers_cfg.append({"type": "GatherOutput", **last})


def data_set() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(4 * (NUM_BATCHES + 1) * BATCH, FEATURES, generator=generator),
        torch.randint(CLASSES, (4 * (NUM_BATCHES + 1) * BATCH,), generator=generator),
    )


def loader(replica: int, num_replicas: int) -> DataLoader[Any]:
    found = data_set()
    sampler = DistributedSampler(found, num_replicas, replica, shuffle=False)
    return DataLoader(found, BATCH, sampler=sampler)


def model_of(built: dict[str, Any]) -> nn.Module:
    if "type" in built["model"]:
        return build_pipeline_model_from_cfg(built["model"], **built["options"])
    if "blocks" in built["model"]:
        return build_pipeline_model(blocks(), **built["options"])
    return build_pipeline_model(sequential(built["model"]["layers"]), **built["options"])


def blocks() -> nn.Sequential:
    """Ordinary layers, which mode 1d splits itself."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), Block(HIDDEN), Block(HIDDEN), nn.Linear(HIDDEN, CLASSES)
    )


def sequential(num_layers: int) -> nn.Sequential:
    sizes = [FEATURES] * num_layers + [CLASSES]
    return nn.Sequential(*[nn.Linear(inside, outside) for inside, outside in pairwise(sizes)])


def train(
    config: Any, built: dict[str, Any], num_microbatches: int, num_model_chunks: int = 1
) -> dict[str, Any]:
    """The training loop of the documentation."""
    colossalai.launch(config, verbose=False)
    torch.manual_seed(0)
    model = model_of(built)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    train_dataloader = loader(gpc.get_local_rank(ParallelMode.DATA), gpc.get_world_size(ParallelMode.DATA))

    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

    schedule: PipelineSchedule = PipelineSchedule(num_microbatches=num_microbatches)
    if num_model_chunks > 1:
        schedule = InterleavedPipelineSchedule(
            num_microbatches=num_microbatches, num_model_chunks=num_model_chunks
        )

    results = []
    engine.train()
    data_iter = iter(train_dataloader)
    for _ in range(NUM_BATCHES):
        engine.zero_grad()
        output, label, loss = schedule.forward_backward_step(
            engine,
            data_iter,
            forward_only=False,
        )
        engine.step()
        results.append((output, label, loss))
    engine.eval()
    evaluated = schedule.forward_backward_step(engine, data_iter, forward_only=True, return_loss=False)
    found = {}
    for name, parameter in engine.model.local_named_parameters():
        layout = layout_of(parameter)
        found[name] = whole_of(parameter, layout) if layout is not None else parameter.detach()
    return {
        "results": results,
        "evaluated": evaluated,
        "parameters": found,
        "replica": gpc.get_local_rank(ParallelMode.DATA),
        "num_replicas": gpc.data_parallel_size,
        "is_last": gpc.is_pipeline_last_stage(),
        "layers": sorted({int(number) for name in found for number in re.findall(r"\d+", name)[:1]}),
    }


def in_one_process(make: Callable[[], nn.Module], num_replicas: int) -> dict[str, Any]:
    """The same with plain torch: the mean over the replicas' batches."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    iterators: list[Iterator[Any]] = [iter(loader(replica, num_replicas)) for replica in range(num_replicas)]
    results: list[list[Any]] = [[] for _ in iterators]
    for _ in range(NUM_BATCHES):
        optimizer.zero_grad()
        for replica, iterator in enumerate(iterators):
            data, label = next(iterator)
            output = model(data)
            loss = F.cross_entropy(output, label)
            (loss / num_replicas).backward()
            results[replica].append((output.detach(), label, loss.detach()))
        optimizer.step()
    evaluated = []
    with torch.no_grad():
        for iterator in iterators:
            data, label = next(iterator)
            evaluated.append((model(data), label))
    return {"results": results, "evaluated": evaluated, "parameters": dict(model.named_parameters())}


def where(config: Any, built: dict[str, Any]) -> list[int]:
    """The pipeline rank of each layer."""
    colossalai.launch(config, verbose=False)
    model = model_of(built)
    layers = model.layers if isinstance(model, ModelFromConfig) else model
    return [current().assigned_stages[id(layer)][1] for layer in layers]


def placed_by_the_script(config: Any) -> list[int]:
    """The pipeline rank of each layer, of which the script has placed the first two itself."""
    smp.init(config)
    with smp.partition(1):
        first = [nn.Linear(4, 4), nn.Linear(4, 4)]
    net = nn.ModuleDict({"layers": nn.ModuleList([*first, nn.Linear(4, 4), nn.Linear(4, 4)])})
    smp.DistributedModel(net)
    return [current().assigned_stages[id(layer)][1] for layer in net["layers"]]


def ranks_of(config: Any) -> dict[str, Any]:
    """What gpc says of every group that there is."""
    colossalai.launch_from_openmpi(config, "localhost", 29500, seed=3, verbose=False)
    found = {
        mode.name: (gpc.get_local_rank(mode), gpc.get_ranks_in_group(mode))
        for mode in ParallelMode
        if gpc.is_initialized(mode)
    }
    assert all(gpc.get_world_size(ParallelMode[name]) == len(ranks) for name, (_, ranks) in found.items())
    return {**found, "drawn": torch.rand(()).item()}


def told(kind: str) -> str:
    """What each misuse is told."""
    config: dict[str, Any] = {"parallel": {"pipeline": 2}}
    try:
        if kind == "before launch":
            build_pipeline_model(nn.Sequential(nn.Linear(4, 4)))
        if kind == "not colossal":
            smp.init({"partitions": 2, "ddp": True})
            build_pipeline_model(nn.Sequential(nn.Linear(4, 4)))
        if kind == "world size":
            colossalai.launch(config, rank=smp_rank(), world_size=8)
        if kind == "handlers":
            config["gradient_handler"] = [{"type": "PipelineSharedModuleGradientHandler"}]
        if kind == "said twice":
            config["num_microbatches"] = 2
        if kind == "chunks said twice":
            config |= {"num_model_chunks": 2, "num_microbatches": 4}
        if kind == "method said twice":
            config["partition_method"] = "layer"
        if kind in ("2d layer", "3d layer"):
            config["parallel"]["tensor"] = {"size": 2, "mode": "1d"}
        colossalai.launch(config, verbose=False)
        _misuse(kind)
    except (smp.SMPError, ValueError, TypeError) as error:
        return str(error)
    return ""


def smp_rank() -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def _misuse(kind: str) -> None:
    if kind == "2d layer":
        colossalai.Linear2D(4, 4)
    if kind == "3d layer":
        colossalai.Linear3D(4, 4)
    if kind == "group":
        gpc.get_local_rank(ParallelMode.PARALLEL_2D_ROW)
    if kind == "method":
        build_pipeline_model_from_cfg({"type": "MyModel", "hidden": 4, "depth": 2}, partition_method="flops")
    if kind == "method said twice":
        build_pipeline_model_from_cfg({"type": "MyModel", "hidden": 4, "depth": 2})
    if kind == "unknown model":
        build_pipeline_model_from_cfg({"type": "MyModle", "hidden": 4, "depth": 2})
    if kind == "unknown argument":
        build_pipeline_model_from_cfg({"type": "MyModel", "width": 4})
    if kind == "empty":
        build_pipeline_model(nn.Sequential(nn.Linear(4, 4)))
    if kind == "chunks do not divide":
        build_pipeline_model(nn.Sequential(*[nn.Linear(4, 4) for _ in range(7)]), 2)
    if kind == "no sequential":
        build_pipeline_model(nn.Linear(4, 4))
    layers: nn.Module = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(4)])
    if kind == "split by hand":
        layers = layers[:2] if gpc.get_local_rank(ParallelMode.PIPELINE) == 0 else layers[2:]
    else:
        build_pipeline_model(layers, 2 if kind == "plain schedule" else 1)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    if kind == "other parameters":
        optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    engine, batches, _, _ = colossalai.initialize(layers, optimizer, nn.CrossEntropyLoss(), loader(0, 1))
    if kind == "m":
        InterleavedPipelineSchedule(3, 2)
    schedule = PipelineSchedule(4)
    if kind == "chunks":
        schedule = InterleavedPipelineSchedule(4, 2)
    if kind == "no iterator":
        schedule.forward_backward_step(engine, batches)
    if kind == "no pair":
        schedule.forward_backward_step(engine, iter([torch.zeros(8, FEATURES)]))
    if kind == "no loss":
        schedule.forward_backward_step(engine, iter(batches), return_loss=False)
    if kind == "batch":
        PipelineSchedule(3).forward_backward_step(engine, iter(batches))
    schedule.forward_backward_step(engine, iter(batches))
