"""transformers' classes and their distributed counterparts."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import nn

from ..nn.distributed import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    Region,
)
from ..nn.huggingface import encoder, gpt2, gptj, gptneo
from ..nn.huggingface.as_built import encoder_as_built, layer_as_built, model_as_built
from ..nn.huggingface.causal import block_hooks, init_hook, model_hooks
from .registry import Registration

__all__ = ["of_class"]

_CAUSAL = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Block", gpt2, "hidden"),
    "gptj": ("GPTJForCausalLM", "GPTJBlock", gptj, "tuple"),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoBlock", gptneo, "tuple"),
}
_ENCODERS = {"bert": ("BertEncoder", "BertLayer"), "roberta": ("RobertaEncoder", "RobertaLayer")}


def of_class(kind: type[nn.Module]) -> Registration | None:
    """None: this class is not distributed out of the box."""
    parts = kind.__module__.split(".")
    if parts[:2] != ["transformers", "models"] or len(parts) < 3:
        return None
    return _of(parts[2]).get(kind)


@functools.cache
def _of(model: str) -> dict[type[nn.Module], Registration]:
    if model not in _CAUSAL and model not in _ENCODERS:
        return {}
    there = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    if model in _CAUSAL:
        whole_name, block_name, mine, returns = _CAUSAL[model]
        whole, block = getattr(there, whole_name), getattr(there, block_name)
        hooks = model_hooks(mine.model_arguments, whole.forward)
        of_block = block_hooks(mine.layer_arguments, returns=returns)
        return {
            whole: Registration(
                DistributedTransformerLMHead,
                hooks.init,
                hooks.forward,
                hooks.result,
                mine.NAMES.to_smp,
                mine.NAMES.to_hf,
                lambda module: ((_config(module),), {}),
                functools.partial(model_as_built, mine.PARTS),
            ),
            block: Registration(
                DistributedTransformerLayer,
                of_block.init,
                of_block.forward,
                of_block.result,
                mine.NAMES.layer_to_smp,
                mine.NAMES.layer_to_hf,
                _block_arguments,
                functools.partial(layer_as_built, mine.LAYER_PARTS),
            ),
        }
    encoder_name, layer_name = _ENCODERS[model]
    names = encoder.NAMES
    return {
        getattr(there, encoder_name): Registration(
            DistributedTransformer,
            init_hook(encoder.encoder_arguments),
            encoder.encoder_call,
            _encoder_result,
            names.to_smp,
            names.to_hf,
            lambda module: ((_config(module),), {}),
            functools.partial(encoder_as_built, encoder.PARTS),
        ),
        getattr(there, layer_name): Registration(
            DistributedTransformerLayer,
            init_hook(encoder.layer_arguments),
            encoder.layer_call,
            lambda found: found[0],
            names.layer_to_smp,
            names.layer_to_hf,
            lambda module: ((_config(module.attention.self),), {}),
            functools.partial(layer_as_built, encoder.LAYER_PARTS),
        ),
    }


def _config(module: Any) -> Any:
    """A module's configuration.

    Where the ranks have batches of their own, transformers is to make masks whatever is in them: for its
    fused attention it leaves out those that hide nothing, and so ranks would go on differently. Attention in
    distributed modules is their own, so the results are the same.
    """
    if Region.of_session().own_batches:
        module.config._attn_implementation = "eager"
    return module.config


def _block_arguments(module: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    attention = getattr(module.attn, "attention", module.attn)  # GPT-Neo's stands one deeper
    number = attention.layer_idx if hasattr(attention, "layer_idx") else attention.layer_id
    return (_config(attention), number), {}


def _encoder_result(found: tuple[Any, ...]) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=found[0])
