"""Results have the strides in the recording that kernels give them: later kernels choose by strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smp_lite.record.describe.metadata import MetadataInference
from smp_lite.record.values.calls import Arguments, NewTensor

INFERENCE = MetadataInference()

_OF_TORCH = ("abs", "exp", "tanh", "sigmoid", "relu", "logical_not", "clone")
_OF_FUNCTIONAL = ("elu", "gelu", "silu", "mish", "softplus", "hardtanh", "relu6", "hardswish")
_OF_FUNCTIONAL += ("hardsigmoid", "leaky_relu", "logsigmoid", "dropout", "dropout2d", "instance_norm")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in _OF_TORCH},
    **{name: getattr(F, name) for name in _OF_FUNCTIONAL},
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "mean": lambda x: x.mean(1, keepdim=True),
    "add": lambda x: x + x,
    "times two": lambda x: x * 2,
    "one minus": lambda x: 1 - x,
    "square": lambda x: x**2,
    "where": lambda x: torch.where(x > 0, x, x),
    "lerp": lambda x: torch.lerp(x, x, 0.5),
    "add bias": lambda x: x + torch.ones(8, 1, 1),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), training=True),
    "batch norm, evaluated": lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8)),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "group norm": lambda x: F.group_norm(x, 2),
    "normalize": lambda x: F.normalize(x, dim=1),
    "cat": lambda x: torch.cat([x, x], 1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "roll": lambda x: x.roll(1, 1),
    "masked fill": lambda x: x.masked_fill(x > 0, 0.0),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "average": lambda x: F.adaptive_avg_pool2d(x, 1),
    "largest": lambda x: F.max_pool2d(x, 1),
    "convolution": lambda x: F.conv2d(x, torch.ones(6, 8, 1, 1)),
    "convolution by channel": lambda x: F.conv2d(x, torch.ones(8, 1, 3, 3), padding=1, groups=8),
    "transposed convolution": lambda x: F.conv_transpose2d(x, torch.ones(8, 6, 2, 2), stride=2),
    "unfold": lambda x: F.unfold(x, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "flat": lambda x: x.reshape(x.shape[0], -1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "tokens and back": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).reshape(x.shape),
    "heads": lambda x: x.reshape(x.shape[0], 2, 4, -1).transpose(1, 2),
    "heads and back": lambda x: x.reshape(x.shape[0], 2, 4, -1).transpose(1, 2).reshape(x.shape),
    "split channels": lambda x: x.unflatten(1, (2, 4)),
    "windows": lambda x: x.permute(0, 2, 3, 1).reshape(-1, x.shape[3], 8),
    "linear over channels": lambda x: F.linear(x.movedim(1, -1), torch.ones(8, 8)).movedim(-1, 1),
    "self attention": lambda x: _self_attention(x.flatten(2).mT),
    "greater": lambda x: x > 0,
    "two to the": lambda x: 2**x,
    "ones like": torch.ones_like,
    "empty like": torch.empty_like,
    "numbers": torch.nan_to_num,
    "flip": lambda x: x.flip(1),
    "sort": lambda x: x.sort(1)[0],
    "prelu": lambda x: F.prelu(x, torch.ones(8)),
    "random leaks": lambda x: F.rrelu(x, training=True),
    "shuffled channels": lambda x: torch.channel_shuffle(x, 2),
    "roll twice": lambda x: x.roll((1, 1), (2, 3)),
    "average of tokens": lambda x: F.avg_pool1d(x.flatten(2), 1),
    "layer norm over channels": lambda x: F.layer_norm(x.movedim(1, -1), (8,)).movedim(-1, 1),
}


def _self_attention(tokens: Tensor) -> Tensor:
    heads = F.linear(tokens, torch.ones(8, 8)).reshape(tokens.shape[0], -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(tokens.shape)


LAYOUTS = {
    "contiguous": torch.randn(2, 8, 2, 3),
    "channels last": torch.randn(2, 8, 2, 3).contiguous(memory_format=torch.channels_last),
    "heads": torch.randn(2, 2, 8, 3).transpose(1, 2),
    "batch last": torch.randn(3, 8, 2, 2).permute(3, 1, 2, 0),
    "column, channels last": torch.randn(2, 8, 2, 1).contiguous(memory_format=torch.channels_last),
    "pixel": torch.randn(2, 8, 1, 1),
    "slice, channels last": torch.randn(2, 10, 2, 3).contiguous(memory_format=torch.channels_last)[:, 1:9],
    "expanded": torch.randn(2, 1, 2, 3).expand(2, 8, 2, 3),
    "one": torch.randn(1, 8, 2, 3),
    "one of two": torch.randn(2, 8, 2, 3).chunk(2)[1],
    "one, channels last": torch.randn(1, 8, 2, 3).contiguous(memory_format=torch.channels_last),
    "one, of tokens": torch.randn(1, 6, 8).transpose(1, 2).reshape(1, 8, 2, 3),
    "one, heads": torch.randn(1, 2, 8, 3).transpose(1, 2),
    "one, slice": torch.randn(1, 10, 2, 3)[:, 1:9],
    "one, slice, channels last": torch.randn(1, 10, 2, 3).contiguous(memory_format=torch.channels_last)[
        :, 1:9
    ],
    "one, expanded": torch.randn(1, 1, 2, 3).expand(1, 8, 2, 3),
    "one, row": torch.randn(1, 8, 1, 3),
    "one, row, channels last": torch.randn(1, 8, 1, 3).contiguous(memory_format=torch.channels_last),
    "one, column, of tokens": torch.randn(1, 3, 8).transpose(1, 2).reshape(1, 8, 3, 1),
    "pixel, channels last": torch.empty_strided((2, 8, 1, 1), (8, 1, 8, 8)).normal_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_in_the_recording_are_those_of_the_kernel(name: str, layout: str) -> None:
    x = LAYOUTS[layout]
    if name == "instance_norm" and x.shape[2:] == (1, 1):
        pytest.skip("torch refuses it")
    if "convolution" in name and x.device.type == "pretended":
        pytest.skip("torch does not say how a device in Python lays them out")
    described = INFERENCE.function(FUNCTIONS[name], Arguments.of((x,), {}))
    (leaf,) = described.leaves
    assert isinstance(leaf, NewTensor)
    assert leaf.meta.stride == FUNCTIONS[name](x).stride()
