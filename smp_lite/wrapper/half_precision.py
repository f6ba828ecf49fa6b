"""A model in half precision (``fp16`` or ``bf16`` in the parameters): what goes in, what comes out, backward.

The whole module is converted when it is wrapped. Floating inputs of its forward are cast to its type and
floating outputs come back in float32, wherever they are in nested arguments and results; numbers of other
kinds never. So a loss outside of the model is computed in float32. (SMP's FP16_Module, after Megatron-LM's,
which leaves keyword arguments alone.) In fp16 a backward multiplies the loss by the optimizer's loss scale;
one that does not come through ``model.backward`` would leave gradients that are not, so it is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import SMPError
from ..nn.layout import is_sharded
from ..optim.half.types import half_type
from ..record.values.structure import map_leaves
from ..session import Session

__all__ = ["HalfPrecision", "check_cast"]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)


class HalfPrecision:
    """Of one model.

    Args:
        session: the job's.
        module: is converted.
        kind: float16 or bfloat16.
    """

    def __init__(self, session: Session, module: nn.Module, kind: torch.dtype) -> None:
        self._session, self._kind = session, kind
        # module.to(kind) would make complex buffers real.
        module.half() if kind == torch.float16 else module.bfloat16()
        self._nodes: dict[int, Any] = {}  # alive, or autograd would make new ones without hooks
        self._in_backward = False

    @classmethod
    def if_asked(cls, session: Session, module: nn.Module) -> HalfPrecision | None:
        """None: parameters keep their types."""
        kind = half_type(session.cfg)
        return None if kind is None else cls(session, module, kind)

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments of the model's forward, in its type."""

        def cast(leaf: Any) -> Any:
            return leaf.to(self._kind) if _is_of(leaf, _FLOATING) and leaf.dtype != self._kind else leaf

        found: tuple[Any, dict[str, Any]] = map_leaves((args, kwargs), cast)
        return found

    def cast_outputs(self, result: Any) -> Any:
        """What the model returns, in float32."""
        return map_leaves(result, lambda leaf: leaf.float() if _is_of(leaf, _HALF) else leaf)

    # Backward -----------------------------------------------------------------------------------------------

    @property
    def is_scaled(self) -> bool:
        """Whether losses are multiplied by a scale."""
        return self._kind == torch.float16

    def before_backward(self) -> None:
        """``model.backward`` is called.

        Raises:
            SMPError: there is no optimizer, which has the loss scale, or the gradients at hand have another
            one.
        """
        if not self.is_scaled:
            return
        if self._session.optimizer is None:
            raise SMPError(
                "model.backward() in fp16 before there is an optimizer, which decides the loss scale: wrap "
                "it with smp.DistributedOptimizer first"
            )
        self._session.check_alone()
        self._session.model.runtime.scaling.before_backward()

    def backward(self, tensors: Any, grad_tensors: Any) -> None:
        """Outside a step: ``torch.autograd.backward`` of scaled losses."""
        scaling = self._session.model.runtime.scaling
        if scaling is not None:
            scaling.begin()
        self.before_backward()
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        scale = 1.0 if scaling is None else scaling.scale
        starts, seeds = [], []
        for loss, gradient in zip(losses, given or [None] * len(losses), strict=True):
            start = loss.float() if loss.dtype in _HALF else loss
            if gradient is None and loss.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")  # torch's words
            seed = torch.ones_like(start) if gradient is None else gradient.to(start.dtype)
            starts.append(start)
            seeds.append(seed * scale)
        with self._scaled():
            torch.autograd.backward(starts, seeds)

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def watch(self, module: nn.Module) -> None:
        """Hears of backwards outside a step that are not scaled."""
        if not self.is_scaled:
            return
        optimizer = self._session.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        others = [parameter for group in groups for parameter in group["params"]]
        for parameter in (*module.parameters(), *others):
            if not parameter.requires_grad or is_sharded(parameter):  # those are called in steps alone
                continue
            with torch.enable_grad():
                node = torch.autograd.graph.get_gradient_edge(parameter).node
            if self._nodes.get(id(parameter)) is not node:
                self._nodes[id(parameter)] = node
                node.register_prehook(self._refuse_unscaled)

    def _refuse_unscaled(self, *_: Any) -> None:
        if not self._in_backward and self._session.step is None:
            raise SMPError(
                "loss.backward() in fp16: the loss was not multiplied by the loss scale, which the optimizer "
                "divides gradients by: call model.backward(loss)"
            )


def _is_of(leaf: Any, kinds: tuple[torch.dtype, ...]) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in kinds


def check_cast(
    asked: str, module: nn.Module, dtype: torch.dtype, trained_in: torch.dtype | None, partitioned: bool
) -> None:
    """Raises SMPError where a wrapped model cannot be converted: with master weights of one precision, or
    after partition, when gradients and buckets have their types.

    Args:
        asked: the call, for the error.
        module: the wrapped module.
        dtype: what its floating parameters and buffers are to become.
        trained_in: the type of ``fp16`` or ``bf16``; None without.
        partitioned: whether the model is.
    """
    if trained_in is not None and dtype != trained_in:
        key = "fp16" if trained_in == torch.float16 else "bf16"
        raise SMPError(f"{asked} of a model that is trained in {trained_in} ({key}: True): leave one out")
    state = (*module.parameters(), *module.buffers())
    if partitioned and any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in state):
        raise SMPError(f"{asked} after partition: convert the model before wrapping it")
