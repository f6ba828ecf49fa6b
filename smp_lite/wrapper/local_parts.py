"""What of a model lies on this rank: the parameters, buffers and modules of its stage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..runtime.model_runtime import ModelRuntime
from ..smp_v1.missing import refusal
from ..smp_v1.names import NAMES

__all__ = ["LocalParts"]


class LocalParts(nn.Module):
    """The views of a ``DistributedModel`` that show one rank's part; before partition, all of it."""

    module: nn.Module
    _runtime: ModelRuntime | None

    def get_module(self) -> nn.Module:
        """The user's own module."""
        return self.module

    # Tensor parallelism, for one tensor-parallel rank -------------------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules whose parameters are cut over tensor-parallel ranks: none."""
        return iter(())

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is cut over tensor-parallel ranks: none is."""
        return False

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer is cut over tensor-parallel ranks: none is."""
        return False

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter sees the batches of all tensor-parallel ranks: none does."""
        return False

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer sees the batches of all tensor-parallel ranks: none does."""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over the dp group: all of this rank's."""
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over the rdp group in another way: none."""
        return iter(())

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The slices of parameters that a sharded optimizer steps.

        Raises:
            SMPError: there is no sharded optimizer state yet.
        """
        raise refusal(NAMES["DistributedModel.virtual_named_parameters"])

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
