"""Torch's kernels for whole transformer layers, which must not be given one rank's part of a weight.

In evaluation ``nn.TransformerEncoderLayer`` does not call its layers, but one kernel with their weights. In
calls of the model that kernel is not taken (:mod:`smp_lite.record.parameters.split_reads`), but a script may
call a module of it by itself. A layer whose activation is none that the kernel knows does not take it, and
says so by an attribute that nothing else reads.
"""

from __future__ import annotations

from torch import nn

from ..nn.layout import is_part

__all__ = ["keep_from_fast_paths"]


def keep_from_fast_paths(root: nn.Module) -> None:
    """Layers with split weights call their modules in evaluation too."""
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(map(is_part, module.parameters())):
            module.activation_relu_or_gelu = 0
