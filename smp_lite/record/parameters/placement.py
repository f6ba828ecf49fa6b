"""Which stage every module, parameter and buffer of the model lives on.

A module is *owned* by a stage if all parameters and buffers in its subtree live there, shared parameters
included; else it is *split*, and its own code runs on every rank with placed values. A parameter that a
split container holds directly lives on that container's stage. Buffers of split containers are ordinary
tensors that every rank has. A module without parameters and buffers is *stateless*: it runs where its
largest input is.

While recording, every parameter is seen through a placed value (``self.head.weight`` used in the root's
forward, for one), so :meth:`Placement.swap_in` puts other tables into the modules (:mod:`.tables`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...deferred import is_deferred
from ...devices import home
from ...errors import SMPError
from ..state.flat_weights import lists_of, renew_lists
from ..values.memory import storage_of
from ..values.placed import PlacedTensor, TensorMeta
from .away import LOCAL, away_buffer, forget_memory, is_away, note_gradient, send_away
from .moving import moved
from .split_reads import is_split
from .tables import BufferListener, BufferTable, ParameterTable, plain_parameters, plain_table

SPLIT = -1
STATELESS = -2
FOREIGN = -3  # not part of the model


class Placement:
    """The partition applied to live modules.

    Args:
        root: the wrapped module.
        stage_of: for every module name the stage of its direct parameters and buffers.
        num_stages: number of stages.
        units: by name, modules whose parameters are brought together at once, with a number for each; modules
            around several of them are split even if all of them live on one stage.
    """

    def __init__(
        self,
        root: nn.Module,
        stage_of: Mapping[str, int],
        num_stages: int,
        units: Mapping[str, int] | None = None,
    ) -> None:
        self.root = root
        self.num_stages = num_stages
        self.names: dict[int, str] = {}
        self.parameter_names: dict[int, str] = {}
        self.parameter_stage: dict[str, int] = {}
        self.local_stages = frozenset(range(num_stages))
        self.strange: set[int] = set()  # ids of modules whose parameters somebody has exchanged
        self._homes: dict[int, int] = {}
        self.changes_parameters = False  # whether code of steps changes some in place
        # With the objects themselves, so that their ids stay theirs. (Weak references would forbid swapping.)
        self._aliases: dict[int, tuple[torch.Tensor, str]] = {}
        self._modules = list(root.named_modules())  # keeps them alive, so ids stay valid
        self._units, opened = _units_of(self._modules, units or {})
        stages: dict[int, set[int]] = {}
        for name, module in self._modules:
            self.names[id(module)] = name
            for own, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in self.parameter_names:
                    full = f"{name}.{own}" if name else own
                    self.parameter_names[id(parameter)] = full
                    self.parameter_stage[full] = stage_of[name]
        for module in _innermost_first(root):
            found = {
                self.parameter_stage[self.parameter_names[id(parameter)]]
                for parameter in module._parameters.values()
                if parameter is not None
            }
            if any(buffer is not None for buffer in module._buffers.values()):
                found.add(stage_of[self.names[id(module)]])
            for child in module._modules.values():
                if child is not None:
                    found |= stages[id(child)]
            stages[id(module)] = found
            is_whole = len(found) == 1 and id(module) not in opened
            self._homes[id(module)] = STATELESS if not found else min(found) if is_whole else SPLIT
        self.stage_of = dict(stage_of)
        self._placed: dict[str, PlacedTensor] = {}
        self._entries = [
            (module._parameters, own, self.parameter_names[id(parameter)])
            for _, module in self._modules
            for own, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._tables = [module._parameters for _, module in self._modules]
        self._num_in_tables = sum(map(len, self._tables))
        self._own_names = {
            (id(module), own): self.parameter_names[id(parameter)]
            for _, module in self._modules
            for own, parameter in module._parameters.items()
            if parameter is not None
        }
        self._names_in: dict[int, set[str]] = {}
        for (module_id, _), full in self._own_names.items():
            self._names_in.setdefault(module_id, set()).add(full)
        self._slots = {full: (table, own) for table, own, full in self._entries}
        self._metas = {
            full: _meta_of(table[own])  # type: ignore[arg-type]
            for table, own, full in self._entries
        }
        self._requires_grad: tuple[bool, ...] = ()
        self.split = frozenset(full for table, own, full in self._entries if is_split(table[own]))
        self.owners = self._owners()
        self._runs: list[nn.Module] = []  # keeps them alive, so ids stay valid
        self._swapped: list[_Swapped] = []
        self._is_swapped = False

    def _owners(self) -> dict[int, tuple[int, ...]]:
        """For each module the ids of those that are called whole and contain it, itself included."""
        found: dict[int, tuple[int, ...]] = {}
        for _, module in self._modules:
            if self._homes[id(module)] != SPLIT:
                for part in module.modules():
                    found[id(part)] = (*found.get(id(part), ()), id(module))
        return found

    def alias(self, tensor: torch.Tensor) -> str | None:
        """The name of the parameter that this object is."""
        found = self._aliases.get(id(tensor))
        return found[1] if found is not None else None

    def split_name(self, tensor: torch.Tensor) -> str | None:
        """The name of the split parameter that this object is, or stands for."""
        if not self.split:
            return None
        full = tensor.smp_parameter if type(tensor) is PlacedTensor else self.alias(tensor)
        return full if full in self.split else None

    def home(self, module: nn.Module) -> int:
        """The stage that owns the module, or SPLIT, STATELESS, FOREIGN."""
        return self._homes.get(id(module), FOREIGN)

    def add_run(self, run: nn.Module, name: str, modules: list[nn.Module]) -> None:
        """Another module, which is not part of the model, calls these, which lie on one stage, in one go."""
        homes = {self._homes[id(module)] for module in modules} - {STATELESS}
        self._runs.append(run)
        self.names[id(run)] = name
        self._homes[id(run)] = min(homes) if homes else STATELESS
        units = [unit for module in modules if (unit := self.unit(module)) is not None]
        if units:
            self._units[id(run)] = units[0]
        for part in run.modules():
            self.owners[id(part)] = (*self.owners.get(id(part), ()), id(run))

    def unit(self, module: nn.Module) -> int | None:
        """The unit that a module belongs to; None: to none."""
        return self._units.get(id(module))

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
            for own, buffer in plain_table(module._buffers).items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found.append((f"{name}.{own}" if name else own, buffer))
        return found

    def buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """All that have their values here, of every stage, with their modules and own names; one that several
        modules hold comes again."""
        for _, module in self._modules:
            for own, buffer in plain_table(module._buffers).items():
                if buffer is not None and not is_away(buffer):
                    yield module, own, buffer

    def holders(self, full: str) -> list[nn.Module]:
        """The modules that hold the parameter of that name directly."""
        return [
            module
            for _, module in self._modules
            if (table := self._names_in.get(id(module))) and full in table
        ]

    def parameter(self, full: str) -> torch.Tensor:
        """The live parameter of that name."""
        table, own = self._slots[full]
        found = table[own]
        assert found is not None
        return found

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter that is here, or shares its memory: ``weight.data`` does."""
        memory = storage_of(tensor)
        if memory is None:
            return False
        parameters = [table[own] for table, own in self._slots.values()]
        here = [each for each in parameters if each is not None and not is_away(each)]
        return memory in map(storage_of, here)

    def may_change(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the memory of a parameter that a later call of the step may change."""
        return self.changes_parameters and self.owns_memory_of(tensor)

    def owners_of_parameter(self, full: str) -> frozenset[int | str]:
        """Its name, and the ids of the modules whose calls use the parameter."""
        holders = [self.owners.get(id(holder), ()) for holder in self.holders(full)]
        return frozenset([full]).union(*holders)

    def gradient_hooks(self) -> list[tuple[int | None, Any, frozenset[int | str]]]:
        """(stage, hook, in whose backward) for hooks on gradients that were put on modules and parameters."""
        found: list[tuple[int | None, Any, frozenset[int | str]]] = []
        for _, module in self._modules:
            if module._backward_hooks or module._backward_pre_hooks:
                hooks = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
                stage, owners = self._homes[id(module)], frozenset(self.owners.get(id(module), ()))
                found += [(stage if stage >= 0 else None, hook, owners) for hook in hooks]
        for name, _, hooks in self.hooked_parameters():
            owners = self.owners_of_parameter(name)
            found += [(self.parameter_stage[name], hook, owners) for hook in hooks]
        return found

    def hooked_parameters(self) -> list[tuple[str, torch.Tensor, list[Any]]]:
        """Parameters on whose gradients hooks were put, each once, with its hooks."""
        found: dict[str, tuple[str, torch.Tensor, list[Any]]] = {}
        with torch._C.DisableTorchFunction():  # reading a table of hooks is nothing to record
            for table, own, full in self._entries:
                parameter: Any = table[own]
                if parameter is None:
                    continue
                tables = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
                hooks = [hook for hooks in tables if hooks for hook in hooks.values()]
                if hooks:
                    found.setdefault(full, (full, parameter, hooks))
        return list(found.values())

    def of_gradient_hooks(self, table: Any) -> str | None:
        """The module or parameter on whose gradients the hooks in this table are; None: of none."""
        for _, module in self._modules:
            if table is module._backward_hooks or table is module._backward_pre_hooks:
                return repr(self.name(module))
        with torch._C.DisableTorchFunction():
            for hooked, parameter, _ in self.hooked_parameters():
                if table is parameter._backward_hooks or table is parameter._post_accumulate_grad_hooks:
                    return repr(hooked)
        return None

    def free_other_stages(self, stages: frozenset[int]) -> None:
        """Parameters of stages that this process does not hold become away ones, without memory."""
        self.local_stages = stages
        away: dict[str, nn.Parameter] = {}
        LOCAL.clear()
        for table, own, full in self._entries:
            parameter = table[own]
            assert isinstance(parameter, nn.Parameter)
            stage = self.parameter_stage[full]
            if stage in stages:
                parameter.smp_stage, parameter.smp_name = stage, full  # type: ignore[attr-defined]
                LOCAL[id(parameter)] = parameter
                continue
            if full not in away:
                away[full] = send_away(parameter, stage, full)
            table[own] = away[full]
        for table, own, full in self._entries:
            parameter = table[own]
            assert parameter is not None
            self._aliases[id(parameter)] = (parameter, full)
        for _, module in self._modules:
            renew_lists(module)

    def move_here(self) -> None:
        """What this process holds goes to its device, one after another; what has no memory yet stays."""
        device = home()
        for table, own, full in self._entries:
            parameter = table[own]
            assert parameter is not None
            if not _has_memory(parameter) or parameter.device == device:
                continue
            table[own] = found = moved(parameter, device)
            if found is not parameter:
                LOCAL.pop(id(parameter), None)
                LOCAL[id(found)] = found  # type: ignore[assignment]
                self._aliases[id(found)] = (found, full)
        buffers: dict[int, torch.Tensor] = {}
        for _, module in self._modules:
            table = plain_table(module._buffers)
            for own, buffer in table.items():
                if buffer is None or not _has_memory(buffer):
                    continue
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = moved(buffer, device)
                table[own] = buffers[id(buffer)]
        for _, module in self._modules:
            renew_lists(module)

    def is_here(self, module: nn.Module) -> bool:
        """Whether this process plays the stage of the module's own parameters and buffers."""
        return self.stage_of[self.names[id(module)]] in self.local_stages

    def send_buffer_away(self, module: nn.Module, own: str) -> None:
        """Its stage has changed a buffer that this process does not keep up to date."""
        name = self.names[id(module)]
        stage = self.stage_of[name]
        table = plain_table(module._buffers)
        if not self.is_here(module) and not is_away(table[own]) and table[own] is not None:
            table[own] = away_buffer(table[own], stage, f"{name}.{own}" if name else own)

    def note_gradients(self, names: Iterable[str]) -> None:
        """These parameters have got gradients; those of other stages are away."""
        with torch._C.DisableTorchFunctionSubclass():
            for full in names:
                parameter = self.parameter(full)
                if is_away(parameter) and parameter.grad is None:
                    note_gradient(parameter, self.parameter_stage[full], full)

    def refresh(self, recorder: Any) -> bool:
        """Makes the placed parameters; returns whether any ``requires_grad`` has changed."""
        try:
            with torch._C.DisableTorchFunctionSubclass():  # those that are away would ask Python
                flags = tuple([table[own].requires_grad for table, own, _ in self._entries])  # type: ignore[union-attr]
        except (KeyError, AttributeError):
            gone = next(full for table, own, full in self._entries if table.get(own) is None)
            raise SMPError(
                f"the parameter {gone!r} was removed from the model after the first step: the partition is "
                f"made "
                "once, so change the model before it (nn.utils.prune.remove and the like), or after "
                "training on "
                "the whole state: model.state_dict()"
            ) from None
        if (num_now := sum(map(len, self._tables))) != self._num_in_tables:
            self._check_added()
            self._num_in_tables = num_now
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
        self._swapped = [_Swapped(module, self, recorder) for _, module in self._modules]
        return True

    def _check_added(self) -> None:
        known = {(id(table), own) for table, own, _ in self._entries}
        new = [
            f"{name}.{own}" if name else own
            for name, module in self._modules
            for own, parameter in module._parameters.items()
            if parameter is not None and (id(module._parameters), own) not in known
        ]
        if new:
            raise SMPError(
                f"the parameter {new[0]!r} was added to the model after the first step "
                "(remove_parametrizations, register_parameter and the like): the partition is made once, so "
                "change the model before it, or after training on the whole state: model.state_dict()"
            )

    def name_of(self, module: nn.Module, own: str) -> str:
        """The name under which the module's parameter is known, which may be another module's."""
        return self._own_names[id(module), own]

    def placed_parameter(self, full: str) -> PlacedTensor:
        return self._placed[full]

    def swap_in(self) -> None:
        """Python code sees placed parameters from here on, and its use of buffers is heard."""
        if not self._is_swapped:
            self._is_swapped = True
            forget_memory()
            for swapped in self._swapped:
                swapped.enter()

    def swap_out(self) -> None:
        """The modules have their own tables again; what was exchanged comes back with :meth:`swap_in`."""
        if self._is_swapped:
            self._is_swapped = False
            for swapped in self._swapped:
                swapped.leave()

    def end_recording(self) -> None:
        """Forgets exchanged parameters; the modules have their own tables.

        Raises:
            SMPError: somebody has exchanged parameters for good.
        """
        if self.strange:
            names = sorted(self.names[key] or "the model" for key in self.strange)
            self._requires_grad = ()  # new tables next time
            self.strange.clear()
            raise SMPError(
                f"parameters of {', '.join(names)} were exchanged, added or removed inside an smp.step and "
                "not put back: the partition is made once, so change the model before the first step"
            )


class _Swapped:
    """The two pairs of tables of one module."""

    def __init__(self, module: nn.Module, placement: Placement, listener: BufferListener) -> None:
        self.namespace = module.__dict__
        self.tables: list[tuple[str, Any]] = []
        self.real: list[Any] = []
        parameters = plain_parameters(module)
        if parameters:
            placed = {
                own: None if p is None else placement.placed_parameter(placement.name_of(module, own))
                for own, p in parameters.items()
            }
            self.tables.append(("_parameters", ParameterTable(placed, id(module), placement.strange)))
            self.tables += lists_of(module, placed).items()
        if module._buffers and placement.home(module) != FOREIGN:
            self.tables.append(("_buffers", BufferTable(module, module._buffers, listener)))

    def enter(self) -> None:
        namespace = self.namespace
        self.real = [namespace[name] for name, _ in self.tables]
        for name, table in self.tables:
            if name == "_buffers":
                table.real = namespace[name]
            namespace[name] = table

    def leave(self) -> None:
        for (name, _), table in zip(self.tables, self.real, strict=True):
            self.namespace[name] = table


def _innermost_first(root: nn.Module) -> list[nn.Module]:
    """Every module once, after all that it holds: one that several hold (a shared layer) before each of them,
    wherever ``named_modules()``, which names it by the first, has it."""
    ordered: dict[int, nn.Module] = {}
    begun: set[int] = set()
    waiting = [root]
    while waiting:
        module = waiting[-1]
        inner = [m for m in module._modules.values() if m is not None and id(m) not in begun]
        begun.add(id(module))
        if inner:
            waiting += inner
        else:
            ordered.setdefault(id(waiting.pop()), module)
    return list(ordered.values())


def _units_of(
    modules: list[tuple[str, nn.Module]], units: Mapping[str, int]
) -> tuple[dict[int, int], set[int]]:
    """The unit of each module inside one, and the modules around several of them."""
    by_name = dict(modules)
    inside: dict[int, int] = {}
    around: dict[int, set[int]] = {}
    for name, number in units.items():
        for part in by_name[name].modules():
            inside.setdefault(id(part), number)
        while name:
            name = name.rpartition(".")[0]
            around.setdefault(id(by_name[name]), set()).add(number)
    return inside, {key for key, found in around.items() if len(found) > 1}


def _has_memory(tensor: torch.Tensor) -> bool:
    return not (is_away(tensor) or is_deferred(tensor) or tensor.is_meta)


def _meta_of(parameter: torch.Tensor) -> TensorMeta:
    # Wherever it is now, or without memory yet: it will be on this process's device.
    return TensorMeta.of(parameter)._replace(device=home())
