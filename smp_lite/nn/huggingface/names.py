"""Names of one model's tensors in the other's: the table that translators are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["Names", "StateDict"]

StateDict = dict[str, Any]

_KINDS = ("weight", "bias")


class Names:
    """How the tensors of a Hugging Face model are called, and lie, in ``smp.nn``'s modules.

    Args:
        stack: what the layers are a list in: ``h`` or ``layer``.
        before: what may stand before it, as a regular expression, there and in ``smp.nn``'s.
        layers: module inside a layer, there -> here.
        fused: module there that has several one after another, here; all of ``transposed`` kind.
        transposed: modules there whose weight is (in, out), as transformers' Conv1D has it.
        outside: modules that are not in a layer, there -> here; names that stand in neither stay.
        ignored: names of buffers there that mean nothing here.
    """

    def __init__(
        self,
        *,
        stack: str,
        layers: Mapping[str, str],
        fused: Mapping[str, tuple[str, ...]] | None = None,
        transposed: Iterable[str] = (),
        outside: Mapping[str, str] | None = None,
        ignored: Iterable[str] = (),
        prefix: str = "",
    ) -> None:
        self.stack, self.layers, self.fused = stack, dict(layers), dict(fused or {})
        self.transposed, self.ignored = frozenset(transposed), frozenset(ignored)
        self.outside, self.prefix = dict(outside or {}), prefix
        start = rf"(?P<before>(?:.*\.)?{re.escape(prefix)})"
        self._there = re.compile(rf"{start}{stack}\.(?P<number>\d+)\.(?P<rest>.+)")
        self._here = re.compile(rf"{start}seq_layers\.(?P<number>\d+)\.(?P<rest>.+)")

    # One layer ----------------------------------------------------------------------------------------------

    def layer_to_smp(self, state: StateDict) -> StateDict:
        """The state dict of one layer."""
        found: StateDict = {}
        for name, tensor in state.items():
            module, _, kind = name.rpartition(".")
            if name in self.ignored:
                continue
            if module in self.fused:
                parts = self.fused[module]
                pieces = tensor.chunk(len(parts), -1)
                for part, piece in zip(parts, pieces, strict=True):
                    found[f"{part}.{kind}"] = self._turned(module, kind, piece)
            else:
                found[f"{self.layers.get(module, module)}.{kind}"] = self._turned(module, kind, tensor)
        return found

    def layer_to_hf(self, state: StateDict) -> StateDict:
        """The reverse."""
        there = {here: module for module, here in self.layers.items()}
        left = dict(state)
        found: StateDict = {}
        for module, parts in self.fused.items():
            for kind in _KINDS:
                names = [f"{part}.{kind}" for part in parts]
                if all(name in left for name in names):
                    pieces = [self._turned(module, kind, left.pop(name)) for name in names]
                    found[f"{module}.{kind}"] = torch.cat(pieces, -1)
        for name, tensor in left.items():
            part, _, kind = name.rpartition(".")
            module = there.get(part, part)
            found[f"{module}.{kind}"] = self._turned(module, kind, tensor)
        return found

    def _turned(self, module: str, kind: str, tensor: Any) -> Any:
        if module in self.transposed and kind == "weight":
            return tensor.mT.contiguous() if tensor.stride() != (0,) * tensor.dim() else tensor.mT
        return tensor

    # A model ------------------------------------------------------------------------------------------------

    def to_smp(self, state: StateDict) -> StateDict:
        """The state dict of a whole model, whatever is around the layers."""
        return self._model(state, self._there, "seq_layers", self.layer_to_smp, self.outside)

    def to_hf(self, state: StateDict) -> StateDict:
        """The reverse."""
        back = {here: there for there, here in self.outside.items()}
        return self._model(state, self._here, self.stack, self.layer_to_hf, back)

    def _model(
        self, state: StateDict, pattern: re.Pattern[str], stack: str, layer: Any, outside: Mapping[str, str]
    ) -> StateDict:
        found: StateDict = {}
        layers: dict[str, StateDict] = {}
        for name, tensor in state.items():
            match = pattern.fullmatch(name)
            if match is not None:
                key = f"{match['before']}{stack}.{match['number']}."
                if key not in layers:
                    layers[key] = {}
                    found[key] = None  # keeps the place
                layers[key][match["rest"]] = tensor
                continue
            module, _, kind = name.rpartition(".")
            new = outside.get(module)
            found[name if new is None else f"{new}.{kind}"] = tensor
        result: StateDict = {}
        for name, tensor in found.items():
            if name in layers:
                result |= {name + rest: each for rest, each in layer(layers[name]).items()}
            else:
                result[name] = tensor
        return result


def with_causal_buffers(state: StateDict, attention: str, length: int | None) -> StateDict:
    """With the masks that transformers up to 4.2x kept in each layer's attention, if ``length`` is given.

    Args:
        attention: the module's name inside a layer.
        length: of the longest sequence.
    """
    if length is None:
        return state
    found = dict(state)
    layers = sorted({match[0] for name in state if (match := re.match(r".*?\bh\.\d+\.", name))})
    for layer in layers:
        mask = torch.ones(length, length, dtype=torch.uint8).tril()
        found[f"{layer}{attention}.bias"] = mask.reshape(1, 1, length, length)
        found[f"{layer}{attention}.masked_bias"] = torch.tensor(-1e4)
    return found
