"""A recorded step made fit for tensors without data: its commands, the model's parameters, the wire.

A call that fake tensors cannot run was run for real when the step was recorded. Here something stands in for
it that gives results and gradients of the right form and keeps nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..comm.layout import arrival, departure
from ..comm.wires.wire import Transfer
from ..devices import CPU
from ..record.commands.recording import Command, Recording
from ..record.describe.metadata import MetadataInference
from ..record.state.flat_weights import renew_lists
from ..record.values.calls import Arguments, NewTensor, Repeated, ResultMeta, SameTensor
from ..record.values.placed import TensorMeta
from ..record.values.structure import rebuild

__all__ = ["FakeCommands", "FakeWire", "fake_parameters"]

_PLACE = torch.empty(0, device=CPU)


class FakeCommands:
    """Makes the commands of one stage run on fake tensors.

    Args:
        stage_index: the stage.
        inference: whose fake tensors.

    Attributes:
        stand_ins: labels of the calls that could not be run, once they were called.
    """

    def __init__(self, stage_index: int, inference: MetadataInference) -> None:
        self.stage_index, self.inference = stage_index, inference
        self.stand_ins: dict[str, None] = {}

    def of(self, recording: Recording) -> tuple[Recording, list[torch.Tensor]]:
        """The recording, as microbatch 0, on fakes of the ordinary tensors that it captured; and these."""
        made: dict[int, torch.Tensor] = {}
        commands = [
            self._command(command, made) if command.stage_index == self.stage_index else command
            for command in recording.commands
        ]
        return replace(recording, microbatch_index=0, commands=commands), list(made.values())

    def _command(self, command: Command, made: dict[int, torch.Tensor]) -> Command:
        if command.parameter is not None:
            return command
        if command.input is not None:
            return replace(command, input=self._tensor(command.input, made))
        given = command.arguments
        leaves = list(given.leaves)
        for position, tensor, source in zip(given.positions, given.tensors, command.sources, strict=True):
            # What stands for a value is only a place to be filled.
            leaves[position] = _PLACE if source >= 0 else self._tensor(tensor, made)
        arguments = Arguments(leaves, given.spec)
        meta = command.meta
        assert meta is not None
        if command.module is None:
            function = command.function
            assert function is not None
            call = self._with_stand_in(command.label, function, meta, ())
            return replace(command, arguments=arguments, function=call)
        parameters = tuple(command.module.parameters())
        call = self._with_stand_in(command.label, command.module, meta, parameters)
        return replace(command, arguments=arguments, module=_Module(command.module, call))

    def _tensor(self, tensor: torch.Tensor, made: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = self.inference.fake_arguments(Arguments.of((tensor,), {}))[0][0]
        return made[id(tensor)]

    def _with_stand_in(
        self,
        label: str,
        call: Callable[..., Any],
        meta: ResultMeta,
        parameters: Sequence[torch.Tensor],
    ) -> Callable[..., Any]:
        """The call, or where fake tensors cannot run it, something of its form."""

        def either(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception:
                pass  # the recorder could not run it on fake tensors either
            self.stand_ins[label] = None
            return _stand_in(meta, Arguments.of(args, kwargs).tensors, parameters)

        return either


class _Module(nn.Module):
    """Takes a module's place in a command, and has its parameters."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = module
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class FakeWire:
    """Carries nothing: what is sent has left, what is received has arrived, into memory of its own."""

    def send(self, tensor: torch.Tensor, meta: TensorMeta, stage: int) -> Transfer:
        departure(tensor, meta)
        return _Arrived(None)

    def receive(self, meta: TensorMeta, stage: int) -> Transfer:
        return _Arrived(arrival(meta))


class _Arrived:
    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._tensor = tensor

    def done(self) -> bool:
        return True

    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor


class _StandIn(torch.autograd.Function):
    """New tensors that depend on all inputs, and keep nothing of them."""

    @staticmethod
    def forward(ctx: Any, metas: Sequence[TensorMeta], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.metas = [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in inputs]
        made = [torch.empty(meta.shape, dtype=meta.dtype, device=meta.device) for meta in metas]
        ctx.mark_non_differentiable(*[t for t, meta in zip(made, metas) if not meta.requires_grad])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return None, *[torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.metas]


def _stand_in(meta: ResultMeta, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Any:
    """A result of the described form."""
    described = [leaf.meta for leaf in meta.leaves if type(leaf) is NewTensor]
    sources = [t for t in (*tensors, *parameters) if t.is_floating_point() or t.is_complex()]
    new: tuple[torch.Tensor, ...] = _StandIn.apply(described, *sources) if described else ()
    following = iter(new)
    leaves: list[Any] = []
    for leaf in meta.leaves:
        if type(leaf) is NewTensor:
            leaves.append(next(following))
        elif type(leaf) is SameTensor:
            leaves.append(tensors[leaf.argument])
        elif type(leaf) is Repeated:
            leaves.append(new[leaf.index])
        else:
            leaves.append(leaf.value)  # type: ignore[union-attr]
    return rebuild(meta.spec, iter(leaves))


@contextlib.contextmanager
def fake_parameters(root: nn.Module, inference: MetadataInference) -> Iterator[None]:
    """Within: parameters and buffers are fake ones, in the modules' own tables, where the placement looks."""
    modules = list(root.modules())
    own = [
        (module, name, module.__dict__[name], dict(module.__dict__[name]))
        for module in modules
        for name in ("_parameters", "_buffers")
    ]
    frozen: dict[torch.Tensor, nn.Parameter] = {}
    try:
        inference.install_fakes(root)
        for module, name, table, _ in own:
            table.update(module.__dict__[name])
            module.__dict__[name] = table
            for key, tensor in table.items():
                if name == "_parameters" and tensor is not None and not isinstance(tensor, nn.Parameter):
                    if tensor not in frozen:
                        frozen[tensor] = nn.Parameter(tensor, requires_grad=False)
                    table[key] = frozen[tensor]
        yield
    finally:
        for module, name, table, kept in own:
            table.clear()
            table.update(kept)
            module.__dict__[name] = table
            renew_lists(module)
