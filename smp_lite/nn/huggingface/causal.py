"""What GPT-2, GPT-J and GPT-Neo share: how calls of their blocks and language models become those of
``smp.nn``'s."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

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


def _check_counted(positions: Any) -> None:
    """Positions inside blocks count from 0 (GPT-J's turn with them); looked at where they are numbers."""
    if not isinstance(positions, torch.Tensor) or isinstance(positions, FakeTensor | PlacedTensor):
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
