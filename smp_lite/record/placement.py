"""Which stage every module, parameter and buffer of the model lives on.

A module is *owned* by a stage if all parameters and buffers in its subtree live there, shared parameters
included; else it is *split*, and its own code runs on every rank with placed values. A parameter that a
split container holds directly lives on that container's stage. Buffers of split containers are ordinary
tensors that every rank has. A module without parameters and buffers is *stateless*: it runs where its
largest input is.

While recording, every parameter is seen through a placed value (``self.head.weight`` used in the root's
forward, for one), so :meth:`Placement.swap_in` puts them into the modules' tables.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .placed import Listener, PlacedTensor, TensorMeta

SPLIT = -1
STATELESS = -2
FOREIGN = -3  # not part of the model


class Placement:
    """The partition applied to live modules.

    Args:
        root: the wrapped module.
        stage_of: for every module name the stage of its direct parameters and buffers.
        num_stages: number of stages.
    """

    def __init__(self, root: nn.Module, stage_of: Mapping[str, int], num_stages: int) -> None:
        self.root = root
        self.num_stages = num_stages
        self.names: dict[int, str] = {}
        self.parameter_names: dict[int, str] = {}
        self.parameter_stage: dict[str, int] = {}
        self._homes: dict[int, int] = {}
        self._modules = list(root.named_modules())  # keeps them alive, so ids stay valid
        stages: dict[int, set[int]] = {}
        for name, module in self._modules:
            self.names[id(module)] = name
            for own, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in self.parameter_names:
                    full = f"{name}.{own}" if name else own
                    self.parameter_names[id(parameter)] = full
                    self.parameter_stage[full] = stage_of[name]
        for name, module in reversed(self._modules):
            found = {
                self.parameter_stage[self.parameter_names[id(parameter)]]
                for parameter in module._parameters.values()
                if parameter is not None
            }
            if any(buffer is not None for buffer in module._buffers.values()):
                found.add(stage_of[name])
            for child in module._modules.values():
                if child is not None:
                    found |= stages.get(id(child), set())
            stages[id(module)] = found
            self._homes[id(module)] = STATELESS if not found else min(found) if len(found) == 1 else SPLIT
        self.stage_of = dict(stage_of)
        self._placed: dict[str, PlacedTensor] = {}
        self._entries = [
            (module._parameters, own, self.parameter_names[id(parameter)])
            for _, module in self._modules
            for own, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._slots = {full: (table, own) for table, own, full in self._entries}
        self._metas = {
            full: _meta_of(table[own])  # type: ignore[arg-type]
            for table, own, full in self._entries
        }
        self._requires_grad: tuple[bool, ...] = ()

    def home(self, module: nn.Module) -> int:
        """The stage that owns the module, or SPLIT, STATELESS, FOREIGN."""
        return self._homes.get(id(module), FOREIGN)

    def name(self, module: nn.Module) -> str:
        """Qualified name, or the class name of a module that is not part of the model."""
        return self.names.get(id(module), type(module).__name__) or "model"

    def local_buffers(self, stages: frozenset[int]) -> list[tuple[str, torch.Tensor]]:
        """Buffers of the modules of those stages and of split containers, by name, each once."""
        found: list[tuple[str, torch.Tensor]] = []
        seen: set[int] = set()
        for name, module in self._modules:
            if self.stage_of[name] not in stages and self._homes[id(module)] != SPLIT:
                continue
            for own, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found.append((f"{name}.{own}" if name else own, buffer))
        return found

    def parameter(self, full: str) -> torch.Tensor:
        """The live parameter of that name."""
        table, own = self._slots[full]
        found = table[own]
        assert found is not None
        return found

    def free_other_stages(self, stages: frozenset[int]) -> None:
        """Replaces parameters of stages that this process does not hold by memoryless ones."""
        empty: dict[str, nn.Parameter] = {}
        for table, own, full in self._entries:
            if self.parameter_stage[full] in stages:
                continue
            parameter = table[own]
            assert parameter is not None
            if full not in empty:
                with torch.no_grad():
                    meta = torch.empty_like(parameter, device="meta")
                empty[full] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
            table[own] = empty[full]
        for _, module in self._modules:
            if isinstance(module.__dict__.get("_flat_weights"), list):  # nn.RNNBase's second list
                module.__dict__["_flat_weights"] = [
                    getattr(module, name, None) for name in module.__dict__["_flat_weights_names"]
                ]

    def refresh(self, recorder: Listener) -> bool:
        """Makes the placed parameters; returns whether any ``requires_grad`` has changed."""
        flags = tuple(table[own].requires_grad for table, own, _ in self._entries)  # type: ignore[union-attr]
        if flags == self._requires_grad:
            return False
        self._requires_grad = flags
        self._placed.clear()
        for (_, _, full), flag in zip(self._entries, flags, strict=True):
            if full not in self._placed:
                meta = self._metas[full]._replace(requires_grad=flag)
                placed = PlacedTensor(meta)
                placed.smp_recorder = recorder
                placed.smp_stage = self.parameter_stage[full]
                placed.smp_parameter = full
                self._placed[full] = placed
        return True

    def swap_in(self) -> list[torch.Tensor | None]:
        """Every parameter of the model becomes its placed value; returns what :meth:`swap_out` needs."""
        real = [table[own] for table, own, _ in self._entries]
        placed = self._placed
        for table, own, full in self._entries:
            table[own] = placed[full]  # type: ignore[assignment]
        return real

    def swap_out(self, real: list[torch.Tensor | None]) -> None:
        for (table, own, _), parameter in zip(self._entries, real, strict=True):
            table[own] = parameter  # type: ignore[assignment]


def _meta_of(parameter: torch.Tensor) -> TensorMeta:
    meta = TensorMeta.of(parameter)
    # A model built without memory is planned as if it were on the CPU.
    return meta._replace(device=torch.device("cpu")) if meta.device.type == "meta" else meta
