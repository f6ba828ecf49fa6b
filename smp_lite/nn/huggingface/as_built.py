"""A Hugging Face model as it is, where scripts have changed modules after its configuration made them.

What a distributed counterpart can follow is read in the modules: probabilities of dropout, epsilons,
activations, scaling of scores, which weights are tied. For the rest the model is made once more from its
configuration, without data, and any difference is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ...errors import SMPError

__all__ = [
    "Differs",
    "LayerParts",
    "ModelParts",
    "encoder_as_built",
    "layer_as_built",
    "model_as_built",
    "of_causal_model",
]

Arguments = dict[str, Any]

_WAY_OUT = (
    "take the change back, make the model from a configuration that says it, or keep it whole with "
    "smp.set_tensor_parallelism(module, False)"
)
_OF_LIBRARIES = frozenset(
    [
        *("training", "gradient_checkpointing", "inplace", "name_or_path", "warnings_issued"),
        *("layer_idx", "layer_id"),  # where they mean something, the layer's own arguments have them
    ]
)
"""Attributes of modules that change no result."""
_FUNCTIONS: dict[Any, str] = {F.relu: "relu", torch.relu: "relu", F.silu: "silu", F.gelu: "gelu"}


@dataclass(frozen=True)
class LayerParts:
    """Where in a layer what its arguments say has gone.

    Attributes:
        attention_dropout, hidden_dropout, norms: names of modules.
        activation: name of a module, or of an attribute that is a function.
        others: further arguments by the layer as it is, and its configuration; raises :class:`Differs`.
        followed: names of attributes that ``others`` reads.
    """

    attention_dropout: str
    hidden_dropout: tuple[str, str]
    norms: tuple[str, ...]
    activation: str
    others: Callable[[Any, Any], Arguments] = lambda layer, config: {}
    followed: frozenset[str] = frozenset()

    def follows(self, name: str) -> bool:
        """Whether that attribute of a layer is an argument."""
        module, _, attribute = name.rpartition(".")
        is_number = (attribute == "p" and module in (self.attention_dropout, *self.hidden_dropout)) or (
            attribute == "eps" and module in self.norms
        )
        return is_number or name in self.followed or f"{name}.".startswith(f"{self.activation}.")

    def arguments(self, layer: nn.Module, config: Any, configured: str) -> Arguments:
        """Of the layer as it is.

        Args:
            config: of the model.
            configured: the activation that it names.

        Raises:
            Differs: two parts that have one argument differ, or its activation has no name.
        """
        hidden = {name: _probability(layer, name) for name in self.hidden_dropout}
        norms = {name: layer.get_submodule(name).eps for name in self.norms}
        return {
            "attention_dropout_prob": _probability(layer, self.attention_dropout),
            "hidden_dropout_prob": _one(hidden, "probabilities of dropout"),
            "layernorm_epsilon": _one(norms, "epsilons of norms"),
            "activation": _activation(layer, self.activation, configured),
            **self.others(layer, config),
        }


@dataclass(frozen=True)
class ModelParts:
    """Where in a language model or an encoder what its arguments say has gone.

    Attributes:
        layer: of each layer.
        layers: name of their list.
        dropout: of the embeddings.
        norm: the last one.
        embedding, head: whose weights are perhaps one.
    """

    layer: LayerParts
    layers: str
    dropout: str = ""
    norm: str = ""
    embedding: str = ""
    head: str = ""

    def follows(self, name: str) -> bool:
        """As of a layer."""
        start = f"{self.layers}."
        if name.startswith(start):
            return self.layer.follows(name[len(start) :].partition(".")[2])
        return name in (f"{self.dropout}.p", f"{self.norm}.eps")


def of_causal_model(layer: LayerParts) -> ModelParts:
    """As GPT-2, GPT-J and GPT-Neo name their parts."""
    return ModelParts(
        layer,
        "transformer.h",
        dropout="transformer.drop",
        norm="transformer.ln_f",
        embedding="transformer.wte",
        head="lm_head",
    )


def layer_as_built(
    parts: LayerParts, module: Any, name: str, arguments: Arguments, given: frozenset[str]
) -> Arguments:
    """Of one layer that is replaced by itself.

    Args:
        name: of the module in the model, for errors.
        arguments: of its counterpart by the configuration.
        given: arguments that the user has chosen, which go before these anyway.

    Raises:
        SMPError: its counterpart would compute something else.
    """
    config = next(part.config for part in module.modules() if "config" in vars(part))
    _refuse_more_output(config, name)
    number = _number(module)
    _compare(module, _made_anew(module, (config,) if number is None else (config, number), name), name, parts)
    with _said_of(name):
        return {**arguments, **parts.arguments(module, config, arguments["activation"])}


def encoder_as_built(
    parts: ModelParts, module: Any, name: str, arguments: Arguments, given: frozenset[str]
) -> Arguments:
    """Of a stack of layers.

    Args:
        given: arguments that the user has chosen for all layers.

    Raises:
        SMPError: as :func:`layer_as_built`.
    """
    config = module.config
    _refuse_more_output(config, name)
    _compare(module, _made_anew(module, (config,), name), name, parts)
    options: list[Arguments] = []
    for number, layer in enumerate(module.get_submodule(parts.layers)):
        with _said_of(".".join(filter(None, (name, parts.layers, str(number))))):
            own = parts.layer.arguments(layer, config, arguments["activation"])
        options.append({key: value for key, value in own.items() if key not in given})
    return {**arguments, "layer_options": options}


def model_as_built(
    parts: ModelParts, module: Any, name: str, arguments: Arguments, given: frozenset[str]
) -> Arguments:
    """Of a language model with its head.

    Raises:
        SMPError: as :func:`layer_as_built`.
    """
    if vars(module).get("_loss_function") is not None:
        raise SMPError(
            f"smp tensor parallelism: {name or 'the model'} has been given another loss_function, which its "
            f"distributed counterpart does not have: {_WAY_OUT}"
        )
    found = encoder_as_built(parts, module, name, arguments, given)
    embedding, head = module.get_submodule(parts.embedding), module.get_submodule(parts.head)
    return {
        **found,
        "embedding_dropout_prob": _probability(module, parts.dropout),
        "layernorm_epsilon": module.get_submodule(parts.norm).eps,
        "tie_input_output_embedding": head.weight is embedding.weight,
    }


def _refuse_more_output(config: Any, name: str) -> None:
    for key in ("output_hidden_states", "output_attentions"):
        if getattr(config, key, False):
            raise SMPError(
                f"smp tensor parallelism: {name or 'the model'}: config.{key}=True, and a module that is "
                f"distributed does not return them: set config.{key} = False, or keep it whole with "
                "smp.set_tensor_parallelism(module, False)"
            )


def _number(layer: Any) -> int | None:
    """Which layer of a model it was made as; None: its class does not take that."""
    for part in layer.modules():
        for key in ("layer_idx", "layer_id"):
            if isinstance(vars(part).get(key), int):
                return int(vars(part)[key])
    return None


def _made_anew(module: nn.Module, args: tuple[Any, ...], name: str) -> nn.Module:
    """What the configuration makes, without data."""
    try:
        with torch.device("meta"):
            return type(module)(*args)
    except Exception as error:
        raise SMPError(
            f"smp tensor parallelism: {name or 'the model'} ({type(module).__name__}) is to be distributed, "
            f"and its configuration does not make one any more: {type(error).__name__}: {error}"
        ) from error


def _compare(module: nn.Module, anew: nn.Module, name: str, parts: LayerParts | ModelParts) -> None:
    """
    Raises:
        SMPError: they differ in something that is no argument.
    """
    mine = dict(module.named_modules(remove_duplicate=False))
    configured = dict(anew.named_modules(remove_duplicate=False))
    for part in [*configured, *(each for each in mine if each not in configured)]:
        if parts.follows(part):
            continue
        where = ".".join(filter(None, (name, part))) or "the model"
        have, should = mine.get(part), configured.get(part)
        if have is None or should is None or type(have) is not type(should):
            if isinstance(should, _DropoutNd) and type(have) is nn.Identity and parts.follows(f"{part}.p"):
                continue
            raise SMPError(
                f"smp tensor parallelism: {where} is {_kind(have)}, and its configuration makes "
                f"it {_kind(should)}, which is what the distributed counterpart has: {_WAY_OUT}"
            )
        for key, value in vars(should).items():
            own = vars(have).get(key, value)
            if key.startswith("_") or key in _OF_LIBRARIES or parts.follows(f"{part}.{key}" if part else key):
                continue
            if isinstance(value, int | float | str | None) and own != value:
                raise SMPError(
                    f"smp tensor parallelism: {where}.{key} is {own!r}, and its configuration makes it "
                    f"{value!r}, which is what the distributed counterpart has: {_WAY_OUT}"
                )


def _kind(module: nn.Module | None) -> str:
    return "nothing" if module is None else f"of class {type(module).__name__}"


@contextlib.contextmanager
def _said_of(where: str) -> Iterator[None]:
    """Within: what differs is of this layer."""
    try:
        yield
    except Differs as error:
        raise SMPError(f"smp tensor parallelism: {where}: {error}: {_WAY_OUT}") from None


class Differs(Exception):
    """Why a layer has no arguments."""


def _probability(module: nn.Module, name: str) -> float:
    part = module.get_submodule(name)
    return 0.0 if isinstance(part, nn.Identity) else float(part.p)  # type: ignore[arg-type]


def _one(values: Mapping[str, float], what: str) -> float:
    (first, value), *rest = values.items()
    for name, other in rest:
        if other != value:
            raise Differs(f"{what} are {value} in {first} and {other} in {name}; the split layer has one")
    return value


def _activation(layer: nn.Module, name: str, configured: str) -> str:
    """The name of what a layer applies, which is what its configuration says, or one that we know."""
    from transformers.activations import ACT2FN

    from ..distributed.output import ACTIVATIONS

    owner, _, attribute = name.rpartition(".")
    have = getattr(layer.get_submodule(owner), attribute)
    if not isinstance(have, nn.Module):
        if have in _FUNCTIONS:
            return _FUNCTIONS[have]
    elif isinstance(have, nn.GELU):
        return "gelu" if have.approximate == "none" else "gelu_pytorch_tanh"
    else:
        for known in (configured, *ACTIVATIONS):
            if isinstance(known, str) and known in ACT2FN and type(ACT2FN[known]) is type(have):
                return known
    raise Differs(f"its activation {name} is {have!r}, which the split layer has not")
