"""What of a model lies on this rank: the parameters, buffers and modules of its stage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ... import session as session_module
from ...nn.distributed import DistributedModule
from ...runtime.model_runtime import ModelRuntime
from ...utils import get_distribution_axis

__all__ = ["LocalParts"]


class LocalParts(nn.Module):
    """The views of a ``DistributedModel`` that show one rank's part; before partition, all of it."""

    module: nn.Module
    _runtime: ModelRuntime | None

    def get_module(self) -> nn.Module:
        """The user's own module."""
        return self.module

    # Tensor parallelism -------------------------------------------------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules with parameters that are split over the tensor-parallel ranks, and SMP's own kinds."""
        for module in self.module.modules():
            own = module._parameters.values()
            if isinstance(module, DistributedModule) or any(map(self._is_split, own)):
                yield module

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is split over the tensor-parallel ranks."""
        return self._is_split(parameter)

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer is split over the tensor-parallel ranks."""
        return self._is_split(buffer)

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is used on the batches of all tensor-parallel ranks; never with
        ``prescaled_batch``, where they have one batch."""
        if self._is_split(parameter):
            return session_module.current().has_own_batches
        return id(parameter) in {
            id(module._parameters[name])
            for module in self.module.modules()
            if isinstance(module, DistributedModule)
            for name in module.names_of_all_batches
        }

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer is used on the batches of all tensor-parallel ranks: only if it is split."""
        return self._is_split(buffer) and session_module.current().has_own_batches

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank whose gradients are means over the batches of the dp group's ranks."""
        for name, parameter in self.local_named_parameters():
            if not self.is_scaled_batch_parameter(parameter):
                yield name, parameter

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank whose gradients are of all tensor-parallel ranks' batches already."""
        for name, parameter in self.local_named_parameters():
            if self.is_scaled_batch_parameter(parameter):
                yield name, parameter

    @staticmethod
    def _is_split(tensor: torch.Tensor | None) -> bool:
        return tensor is not None and get_distribution_axis(tensor) is not None

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names, as the optimizer steps them.

        In the place of each one its master in half precision, its piece with sharded optimizer state.
        """
        optimizer = session_module.current().optimizer
        for name, parameter in self.local_named_parameters():
            yield name, parameter if optimizer is None else optimizer.stand_in_of(parameter)

    # This rank's part ---------------------------------------------------------------------------------------

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of this rank's stage; all of them before partition."""
        for name, parameter in self.module.named_parameters():
            if (
                self._runtime is None
                or self._runtime.placement.parameter_stage.get(name) in self._runtime.peers.stages
            ):
                yield name, parameter

    def local_parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.local_named_parameters():
            yield parameter

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._runtime is None:
            yield from self.module.named_buffers()
        else:
            yield from self._runtime.placement.local_buffers(self._runtime.peers.stages)

    def local_buffers(self) -> Iterator[torch.Tensor]:
        for _, buffer in self.local_named_buffers():
            yield buffer

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of the modules that the partition put on this rank's stage."""
        for name, module in self.module.named_modules():
            if self._runtime is None or self._runtime.placement.stage_of[name] in self._runtime.peers.stages:
                yield name, module

    def local_modules(self) -> Iterator[nn.Module]:
        for _, module in self.local_named_modules():
            yield module
