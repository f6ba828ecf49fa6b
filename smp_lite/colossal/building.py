"""Models whose layers are dealt out to pipeline ranks: Colossal-AI's pipeline builder.

Every rank builds all layers. Which pipeline rank holds a layer is noted in the session, from which the model
is cut in the first step; then a rank keeps its own. With c chunks there are c stages on every rank, dealt out
in turn: stage s lies on rank s mod p, and the pipeline goes round c times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

from ..config.errors import ConfigError
from ..errors import SMPError
from ..systems.plan.parallel_plan import ParallelPlan
from ..systems.plan.stage_assignment import StageRule
from .context import colossal_plan
from .registry import build_layer, build_model

__all__ = ["ModelFromConfig", "build_pipeline_model", "build_pipeline_model_from_cfg", "chunks_of"]

_chunks: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class ModelFromConfig(nn.Module):
    """A model that is a list of layers, one after another. A subclass sets ``layers_cfg``.

    Attributes:
        layers_cfg: a dict for each layer, with the name of its class as ``type``
            (:data:`~smp_lite.colossal.LAYERS`).
        layers: what is built of them.
    """

    layers_cfg: Sequence[Mapping[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.layers_cfg = []

    def build_from_cfg(self, start: int | None = None, end: int | None = None) -> None:
        """Builds the layers from ``start`` to before ``end``; None: all of them."""
        for config in self.layers_cfg[start:end]:
            self.layers.append(build_layer(config))

    def forward(self, x: Any) -> Any:
        """Layer after layer."""
        for layer in self.layers:
            x = layer(x)
        return x


def build_pipeline_model_from_cfg(
    config: Mapping[str, Any],
    num_chunks: int = 1,
    partition_method: str = "parameter",
    verbose: bool = False,
) -> ModelFromConfig:
    """Builds a registered :class:`ModelFromConfig` and deals its layers out to the pipeline ranks.

    Args:
        config: ``dict(type='MyModel', ...)``, the arguments of its class with its name.
        num_chunks: stages on each rank.
        partition_method: ``parameter`` balances the numbers of trained parameters, ``layer`` those of layers
            (:mod:`smp_lite.systems.plan.stage_assignment`).
        verbose: rank 0 says where every layer goes.

    Returns:
        The whole model, on every rank.

    Raises:
        ValueError: another partition method.
        ConfigError: the configuration is wrong, chunks do not divide the layers, or a stage stays empty.
        SMPError: the job has not been started.
    """
    colossal_plan("build_pipeline_model_from_cfg")
    method = partition_method.lower() if isinstance(partition_method, str) else partition_method
    if method not in ("parameter", "layer"):
        raise ValueError(f"partition_method={partition_method!r}: it is 'parameter' or 'layer'")
    model = build_model(config)
    name = type(model).__name__
    if not isinstance(model, ModelFromConfig):
        raise ConfigError(f"MODELS: {name} is no ModelFromConfig, so it has no layers_cfg to deal out")
    if not hasattr(model, "layers"):
        raise ConfigError(f"MODELS: {name}.__init__ must call super().__init__() first")
    if not model.layers_cfg:
        raise ConfigError(f"MODELS: {name} sets no layers_cfg: write a list of dict(type=..., ...)")
    if not len(model.layers):
        model.build_from_cfg()
    if len(model.layers) != len(model.layers_cfg):
        raise ConfigError(
            f"MODELS: {name} has {len(model.layers)} layers and {len(model.layers_cfg)} in layers_cfg: leave "
            "building them to build_pipeline_model_from_cfg"
        )
    layers = list(model.layers)
    costs = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers]
    _deal_out(model, layers, num_chunks, costs if method == "parameter" else None, verbose)
    return model


def build_pipeline_model(layers: nn.Sequential, num_chunks: int = 1, verbose: bool = False) -> nn.Sequential:
    """Deals the modules of a Sequential out to the pipeline ranks, by their number.

    Args:
        layers: the whole model, built alike on all ranks.
        num_chunks, verbose: as of :func:`build_pipeline_model_from_cfg`.

    Returns:
        The same model.

    Raises:
        TypeError: it is no Sequential.
        ConfigError, SMPError: as of :func:`build_pipeline_model_from_cfg`.
    """
    if not isinstance(layers, nn.Sequential):
        raise TypeError(f"build_pipeline_model takes a torch.nn.Sequential, got {type(layers).__name__}")
    _deal_out(layers, list(layers), num_chunks, None, verbose)
    return layers


def chunks_of(model: nn.Module) -> int | None:
    """With how many chunks a model was built; None: by none of these functions."""
    return _chunks.get(model)


def _deal_out(
    model: nn.Module, layers: list[nn.Module], num_chunks: int, costs: list[int] | None, verbose: bool
) -> None:
    session, plan = colossal_plan("build_pipeline_model")
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 1:
        raise ConfigError(f"num_chunks={num_chunks!r}: it is a whole number of 1 or more")
    if session.model is not None:
        raise SMPError("build_pipeline_model was called after the model had been wrapped: call it before")
    kind: Literal["uniform", "balanced"] = "uniform" if costs is None else "balanced"
    _check_against(plan, num_chunks, kind)
    ranks = plan.pp_size
    owners = tuple(stage % ranks for stage in range(ranks * num_chunks))
    rule = StageRule(
        kind,
        owners,
        num_chunks,
        allow_empty=plan.stages.allow_empty,
        key="parallel.pipeline" if num_chunks == 1 else "parallel.pipeline x num_chunks",
    )
    stages = rule.assign(len(layers), costs)
    # What belongs to no layer is where the first one is; layers may share modules, which then go there too.
    for part in model.modules():
        session.assigned_stages[id(part)] = (part, owners[stages[0]])
    for layer, stage in reversed(list(zip(layers, stages, strict=True))):
        for part in layer.modules():
            session.assigned_stages[id(part)] = (part, owners[stage])
    _chunks[model] = num_chunks
    if verbose and session.rank == 0:
        print(_table(layers, stages, owners, kind), flush=True)


def _check_against(plan: ParallelPlan, num_chunks: int, kind: str) -> None:
    """The configuration may say the same, but nothing else."""
    if plan.stages.num_chunks not in (1, num_chunks):
        raise ConfigError(
            f"num_chunks={num_chunks}, and the configuration has num_model_chunks={plan.stages.num_chunks}: "
            "give the same number here, or leave it out there"
        )
    said = plan.said("stages")
    if not said.is_default and plan.stages.kind != kind:
        method = "layer" if kind == "uniform" else "parameter"
        raise ConfigError(
            f"the layers are dealt out by {method}, and the configuration says another {said.key}: leave it "
            "out there (build_pipeline_model always goes by layer)"
        )


def _table(layers: list[nn.Module], stages: tuple[int, ...], owners: tuple[int, ...], kind: str) -> str:
    lines = [f"smp_lite: {len(layers)} layers over {len(owners)} stages ({kind})"]
    for stage, members in groupby(range(len(layers)), key=lambda layer: stages[layer]):
        numbers = list(members)
        names = ", ".join(type(layers[number]).__name__ for number in numbers)
        lines.append(
            f"  stage {stage} on pipeline rank {owners[stage]}: layers {numbers[0]}-{numbers[-1]} ({names})"
        )
    return "\n".join(lines)
