"""Torch's own layers that compute something else when nobody wants gradients.

In evaluation ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` leave their Python for one fused
kernel, and ``nn.TransformerEncoder`` takes the padding out of its input (a nested tensor) and gives zeros
there. They do not where they meet a tensor with ``__torch_function__``, as placed ones are, or a mode that
sees functions, as is on where layers are split over ranks. A layer that lies whole on a stage is called there
with ordinary tensors and does what it does in one process; an opened one is not. The kernel's other rounding
is a warning, other numbers at the padding are an error.

Source: ``torch/nn/modules/transformer.py`` and ``activation.py``, "fast path".
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import nn

from ...errors import SMPError
from .source_line import warn_once_at_user_line

__all__ = ["look_at_opened"]

_WAY_OUT = "torch.backends.mha.set_fastpath_enabled(False) makes it the same in both"


def look_at_opened(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A module's code is about to run on placed tensors.

    Raises:
        SMPError: it is an encoder that would take padding out in one process.
    """
    kind = _KINDS.get(type(module).forward)
    if kind is None or not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return
    try:
        given = signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return  # the call itself will say so
    kind(name, module, given)


def _encoder(name: str, module: Any, given: dict[str, Any]) -> None:
    first, mask = module.layers[0], given.get("src_key_padding_mask")
    if (
        module.use_nested_tensor
        and not first.training
        and mask is not None
        and given.get("mask") is None
        and given["src"].dim() == 3
        and _wants_no_gradients(first, given["src"])
        and _may_be_taken_out(mask)
    ):
        raise SMPError(
            f"{name}: in evaluation torch takes the padding out of what this nn.TransformerEncoder gets (a "
            "nested tensor) and returns zeros there, which it cannot do where it is split over stages, has "
            "hooks inside, or the model has layers that are split over tensor-parallel ranks: make it with "
            f"enable_nested_tensor=False. ({_WAY_OUT}, too.)"
        )


def _encoder_layer(name: str, module: Any, given: dict[str, Any]) -> None:
    attention = module.self_attn
    if (
        not module.training
        and _could_be_fused(attention)
        and attention.in_proj_bias is not None
        and module.activation_relu_or_gelu
        and module.norm1.eps == module.norm2.eps
        and given["src"].dim() == 3
        and not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
        and _wants_no_gradients(module, given["src"])
    ):
        _warn(name, "nn.TransformerEncoderLayer")


def _attention(name: str, module: Any, given: dict[str, Any]) -> None:
    query = given["query"]
    masks = [given.get("attn_mask"), given.get("key_padding_mask")]
    if (
        not module.training
        and _could_be_fused(module)
        and module.bias_k is None
        and not module.add_zero_attn
        and query is given["key"] is given["value"]
        and query.dim() == 3
        and not any(mask is not None and mask.is_floating_point() for mask in masks)
        and _wants_no_gradients(module, query)
    ):
        _warn(name, "nn.MultiheadAttention")


_KINDS: dict[Callable[..., Any], Callable[[str, Any, dict[str, Any]], None]] = {
    nn.TransformerEncoder.forward: _encoder,
    nn.TransformerEncoderLayer.forward: _encoder_layer,
    nn.MultiheadAttention.forward: _attention,
}


def _may_be_taken_out(mask: torch.Tensor) -> bool:
    """Whether there is padding, at the end of each sequence; or the mask's numbers are not here."""
    if type(mask) is not torch.Tensor:
        return True
    is_kept = mask.logical_not()
    return not is_kept.all() and bool((is_kept[:, 1:] <= is_kept[:, :-1]).all())


def _could_be_fused(attention: Any) -> bool:
    return bool(attention.batch_first and attention._qkv_same_embed_dim and attention.num_heads % 2 == 0)


def _wants_no_gradients(module: nn.Module, tensor: torch.Tensor) -> bool:
    if not torch.is_grad_enabled():
        return True
    return not tensor.requires_grad and not any(p.requires_grad for p in module.parameters())


def _warn(name: str, kind: str) -> None:
    warn_once_at_user_line(
        f"{name}: in evaluation torch computes an {kind} by one fused kernel, which it cannot do where it is "
        f"split over stages or has hooks inside: last bits may differ from one process. {_WAY_OUT}; or place "
        "it whole, with smp.partition"
    )
