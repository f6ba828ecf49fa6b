"""Colossal-AI's engine: a wrapped model with its optimizer and its loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import SMPError, SMPMismatch
from ..optim.optimizer import DistributedOptimizer
from ..session import Session
from ..wrapper.distributed_model import DistributedModel
from .building import chunks_of
from .context import colossal_plan

__all__ = ["Engine", "initialize"]


class Engine:
    """What :func:`initialize` makes; schedules run it.

    Attributes:
        model: the :class:`~smp_lite.DistributedModel`.
        optimizer: the :class:`~smp_lite.DistributedOptimizer`.
        criterion: the loss of an output and a label.
        num_chunks: stages on each pipeline rank.
    """

    def __init__(
        self,
        model: DistributedModel,
        optimizer: DistributedOptimizer,
        criterion: Callable[..., torch.Tensor],
        *,
        num_chunks: int = 1,
        clip_grad_norm: float = 0.0,
    ) -> None:
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.num_chunks = num_chunks
        self._clip_grad_norm = clip_grad_norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; within a function decorated with ``@smp.step``. Schedules do so themselves."""
        return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a loss; within a function decorated with ``@smp.step``."""
        self.model.backward(loss)

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self.optimizer.zero_grad()

    def step(self) -> Any:
        """The optimizer's step, after gradients were clipped as ``clip_grad_norm`` says. They have been
        reduced already."""
        if self._clip_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad_norm)
        return self.optimizer.step()

    def train(self) -> None:
        """The model in training mode."""
        self.model.train()

    def eval(self) -> None:
        """The model in evaluation mode."""
        self.model.eval()


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., torch.Tensor],
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """Wraps the model and its optimizer. Collective.

    Args:
        model: the whole model, built alike on all ranks.
        optimizer: over its parameters.
        criterion: the loss of an output and a label.
        train_dataloader, test_dataloader, lr_scheduler: given back as they are. All ranks of a replica must
            get the same batches, each replica its own (``DistributedSampler`` over ``ParallelMode.DATA``).
        verbose: accepted; rank 0 says the partition in the first step.

    Returns:
        The engine, and the last three as they were given.

    Raises:
        SMPError: pipeline ranks have different models, a module between split layers may look across
            features, or the job has not been started.
    """
    session, plan = colossal_plan("initialize")
    others = dict(plan.others)
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize takes an nn.Module as model, got {type(model).__name__}")
    _check_same_model(session, model)
    chunks = chunks_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    session.has_engine = True
    wrapped = DistributedModel(model)
    _follow(optimizer, names, dict(wrapped.module.named_parameters()))
    engine = Engine(
        wrapped,
        DistributedOptimizer(optimizer),
        criterion,
        num_chunks=plan.stages.num_chunks if chunks is None else chunks,
        clip_grad_norm=float(others.get("clip_grad_norm") or 0.0),
    )
    return engine, train_dataloader, test_dataloader, lr_scheduler


def _check_same_model(session: Session, model: nn.Module) -> None:
    """Colossal-AI also takes another module on every pipeline rank, which cannot be recorded on all."""
    if session.world is None:
        return
    parts = [f"{name} {type(part).__name__}" for name, part in model.named_modules()]
    parts += [f"{name} {list(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    found = session.world.exchange(digest, "MP", "the model given to initialize")
    if len(set(found)) > 1:
        raise SMPMismatch(
            "initialize got another model on some ranks than on others. A model that is split by hand, with "
            "other modules where gpc.get_local_rank(ParallelMode.PIPELINE) differs, cannot run here, since "
            "every rank records the whole model: build all of it on every rank, as one nn.Sequential, and "
            "give that to build_pipeline_model, which deals its layers out"
        )


def _follow(optimizer: torch.optim.Optimizer, names: dict[int, str], live: dict[str, nn.Parameter]) -> None:
    """Splitting layers over ranks makes new parameters, which the optimizer must hold instead of the old."""
    for group in getattr(optimizer, "param_groups", ()):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise SMPError(
                    "initialize: the optimizer holds a parameter that is not the model's: make it with the "
                    "parameters of the model that is given to initialize"
                )
            if name in live and live[name] is not parameter:
                if optimizer.state.get(parameter):
                    raise SMPError(
                        f"initialize: the optimizer has state for {name}, which is split over ranks now: "
                        "make it anew, and load its state afterwards. One that has state from the beginning "
                        "(Adagrad) must be made of the parameters of a smp.DistributedModel, and wrapped in "
                        "smp.DistributedOptimizer, without initialize"
                    )
                group["params"][position] = live[name]
