"""What GPT-2, GPT-J and GPT-Neo share: how calls of their blocks and language models become those of
``smp.nn``'s."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...record.values.memory import version_of
from ...record.values.placed import PlacedTensor
from .calls import refuse_given

__all__ = ["Hooks", "block_hooks", "init_hook", "model_hooks"]

ToArguments = Callable[..., dict[str, Any] | None]
"""From a module's constructor arguments to those of its counterpart; None: it stays as it is."""


class Hooks(NamedTuple):
    """Init, forward and return hook."""

    init: Callable[..., Any]
    forward: Callable[..., Any]
    result: Callable[..., Any]


def block_hooks(arguments: ToArguments, *, returns: Literal["hidden", "tuple"]) -> Hooks:
    """Of one block.

    Args:
        arguments: of ``smp.nn.DistributedTransformerLayer``, from those of the block.
        returns: ``hidden`` alone, or a tuple of it and of attention weights, which are None.
    """

    def forward(
        hidden_states: Any,
        past: Any = None,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kept = [past, *(kwargs.pop(name, None) for name in ("past_key_values", "layer_past"))]
        if kwargs.pop("use_cache", None) or any(each is not None for each in kept):
            raise ValueError(
                "a block that tensor parallelism has distributed keeps no keys and values: call the model "
                "with use_cache=False, or set model.config.use_cache = False"
            )
        _check_counted(kwargs.get("position_ids"))
        _check_block_mask(attention_mask)
        refuse_given("a block", {**{f"argument {i + 4}": each for i, each in enumerate(args)}, **kwargs})
        return ((hidden_states, attention_mask),), {}

    def result(found: tuple[Any, ...]) -> Any:
        return found[0] if returns == "hidden" else (found[0], None)

    return Hooks(init_hook(arguments), forward, result)


def init_hook(arguments: ToArguments) -> Callable[..., Any]:
    """Of arguments by name; None stays None: this one is not distributed."""

    def init(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        found = arguments(*args, **kwargs)
        return None if found is None else ((), found)

    return init


_WHOLE = "or keep the model whole with smp.set_tensor_parallelism(module, False)"
_BLIND = (
    "attention_mask lets a token attend to nothing, as padding on the left does. What transformers makes of "
    "such tokens depends on its attn_implementation, and a model that tensor parallelism has distributed "
    f"makes something else: pad on the right (tokenizer.padding_side), {_WHOLE}"
)


def _is_known(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor whose numbers can be looked at."""
    return isinstance(value, torch.Tensor) and not (
        isinstance(value, FakeTensor | PlacedTensor) or value.is_meta
    )


def _check_model_mask(mask: Any) -> None:
    """``(N, S)`` with 1 for tokens; transformers' models also take masks for each pair, as they are."""
    if isinstance(mask, torch.Tensor) and mask.dim() != 2:
        raise ValueError(
            f"attention_mask of shape {list(mask.shape)}: a language model that tensor parallelism has "
            "distributed takes (batch, tokens) with 1 for tokens and 0 for padding, and lets each token "
            f"attend to those before it. Give it that, {_WHOLE}"
        )
    if _is_known(mask) and mask.numel() and bool((mask[:, 0] == 0).any()):
        raise ValueError(_BLIND)


_last_checked: tuple[weakref.ref[torch.Tensor], int] | None = None


def _check_block_mask(mask: Any) -> None:
    """What a model around gives its blocks, which are causal by themselves; all get one mask."""
    global _last_checked
    if not _is_known(mask) or mask.dim() != 4 or not mask.numel():
        return
    version = version_of(mask)
    if _last_checked is not None and (_last_checked[0]() is mask and _last_checked[1] == version):
        return
    rows, columns = mask.shape[-2:]
    if rows not in (1, columns):
        return
    visible = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0
    earlier = torch.ones(columns, columns, dtype=torch.bool, device=mask.device).tril()
    if rows > 1 and bool((visible & ~earlier).any()):
        raise ValueError(
            f"attention_mask of shape {list(mask.shape)} lets tokens attend to later ones, and a block that "
            f"tensor parallelism has distributed is causal: leave the mask out, {_WHOLE}"
        )
    if not bool((visible & earlier).any(-1).all()):
        raise ValueError(_BLIND)
    _last_checked = weakref.ref(mask), version


def _check_packed(positions: Any) -> None:
    """Without a mask transformers takes positions that begin again for rows of several texts."""
    if _is_known(positions) and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids that do not count on say that a row has several texts, which do not attend to each "
            "other; in a language model that tensor parallelism has distributed they would: give each text a "
            f"row of its own, {_WHOLE}"
        )


def _check_counted(positions: Any) -> None:
    """Positions inside blocks count from 0 (GPT-J's turn with them); looked at where they are numbers."""
    if not _is_known(positions):
        return
    if not torch.equal(
        positions, torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
    ):
        raise ValueError(
            "a block that tensor parallelism has distributed has tokens in positions 0, 1, 2 ...: other "
            "position_ids are not supported"
        )


def model_hooks(arguments: ToArguments, forward_of: Callable[..., Any]) -> Hooks:
    """Of a language model with its head.

    Args:
        arguments: of ``smp.nn.DistributedTransformerLMHead``, from the configuration.
        forward_of: the model's own forward, whose signature calls follow.
    """
    signature = inspect.signature(forward_of)

    def with_logits(config: Any) -> dict[str, Any] | None:
        found = arguments(config)
        return None if found is None else {**found, "return_logits": True}

    def forward(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(None, *args, **kwargs).arguments
        bound.pop("self", None)
        extra = bound.pop("kwargs", {})
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")
        taken = [bound.pop(name, None) for name in names]
        if bound.pop("return_dict", None) is False:
            refuse_given("a language model", {"return_dict=False": True})
        if taken[0] is None:
            raise ValueError("a language model that tensor parallelism has distributed needs input_ids")
        _check_model_mask(taken[1])
        if taken[1] is None:
            _check_packed(taken[3])
        bound.pop("use_cache", None)  # nothing is generated here
        if bound.get("logits_to_keep") == 0:
            bound.pop("logits_to_keep")
        refuse_given("a language model", {**bound, **extra})
        if extra.get("num_items_in_batch") is not None:
            raise ValueError(
                "a language model that tensor parallelism has distributed takes the mean over its batch's "
                "tokens: num_items_in_batch is not supported"
            )
        return (tuple(taken),), {}

    def result(found: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

        loss, logits = found if isinstance(found, tuple) else (None, found)
        return CausalLMOutputWithCrossAttentions(loss=loss, logits=logits)

    return Hooks(init_hook(with_logits), forward, result)
