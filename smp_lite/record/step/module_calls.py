"""What happens when a module is called while a step is recorded.

A module that lies whole on one stage is recorded as one *closed* call, unless its own Python code has to run
where it is called. Then it is *opened*: its code runs on every rank as a container's does, its torch
functions are recorded one by one on its stage, and the modules in it are closed calls again, or opened. That
is always right, and costs recording time. A module is opened

- if a module in it has forward hooks, or forward hooks for all modules are set: hooks are code around calls;
- if a run of it would leave something behind (:mod:`..describe.effects`): attributes, a list that it got;
- while its parameters are exchanged for others (``torch.func.functional_call``);
- while a mode of the user's sees every torch function.

A module with hooks of its own and none inside stays a closed call: the hooks run around it, where it is
called.

A closed call runs later than it is recorded, so it carries what has changed in between: attributes set on its
modules (setting one is heard), and plain values that its code reads elsewhere (:mod:`..state.places`).
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...errors import SMPError
from ..backward.checkpoints import is_inside_checkpoint, refuse_effect
from ..code.fused_layers import look_at_opened
from ..code.source_line import warn_once_at_user_line
from ..commands.recording import Command
from ..commands.replay import refuse
from ..describe.checkpointed_calls import CheckpointedRun, call_in_runs, is_marked
from ..parameters.placement import FOREIGN, SPLIT
from ..state.containers import MISSING
from ..state.parts import may_change
from ..state.places import ModuleAttribute, Place, PlacesRead, Seen
from ..state.python_state import PythonState
from ..values.calls import Arguments
from ..values.memory import storage_of
from ..values.placed import PlacedTensor, has_attributes
from ..values.structure import are_plain

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["DRAWS", "ModuleCalls"]

Call = Callable[..., Any]

DRAWS = "draws random numbers in container code"
UNDER_A_MODE = "is under a mode that sees every torch function"
"""Why a stateless module is opened that draws: its torch functions draw as plain torch's would."""


class _Subtree:
    """A module that may be a closed call, with what has to be looked at before each call."""

    def __init__(self, module: nn.Module, name: str, home: int) -> None:
        self.module, self.name, self.home = module, name, home
        self.opened: str | None = None
        self.look_again()

    def look_again(self) -> None:
        """The list of its modules has changed."""
        parts = list(self.module.modules())
        self.ids = frozenset(map(id, parts))
        self.own_hooks = (self.module._forward_hooks, self.module._forward_pre_hooks)
        self.inner_hooks = [
            hooks for part in parts[1:] for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]
        self.has_state = any(True for _ in self.module.parameters()) or any(
            True for _ in self.module.buffers()
        )

    def memories(self) -> set[int | None]:
        """The memory of tensors in plain attributes of its modules, one level into lists and dicts."""
        found: set[int | None] = set()
        for part in self.module.modules():
            for value in part.__dict__.values():
                items = (
                    value
                    if isinstance(value, list | tuple)
                    else value.values()
                    if type(value) is dict
                    else [value]
                )
                found.update(storage_of(item) for item in items if type(item) is torch.Tensor)
        return found


class _Pending:
    """Closed calls of one module that have been recorded and have not run; None: of autograd functions."""

    def __init__(self, subtree: _Subtree | None) -> None:
        self.subtree = subtree
        self.commands: list[tuple[Command, PlacesRead | None, Seen | None]] = []


class ModuleCalls:
    """Module calls of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.placement = recorder.placement
        self.home: int | None = None  # the stage of the opened module whose code is running
        self.strict = False  # compare attributes that changed without being heard
        self._subtrees: dict[int, _Subtree] = {}
        self._pending: dict[int, _Pending] = {}
        self._given: list[tuple[Command, PythonState]] = []  # objects that autograd functions have got

    # The life of a step -------------------------------------------------------------------------------------

    def begin_step(self, *, strict: bool) -> None:
        self.strict = strict
        self.home = None
        self._pending.clear()
        self._given.clear()

    def end_step(self) -> None:
        self.home = None
        self._pending.clear()
        self._given.clear()

    # Calls --------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``module(*args, **kwargs)``; ``call`` is the original ``Module.__call__``."""
        subtree = self._subtrees.get(id(module))
        if subtree is None or subtree.module is not module:
            subtree = self._new_subtree(module)
        home = subtree.home
        if home == SPLIT:
            return self._call_container(module, call, args, kwargs)
        repeated = self.recorder.repeated
        found = repeated.find(module, args, kwargs)
        if found is not None and self._is_whole(subtree) and repeated.is_unchanged(found[0], module):
            return repeated.write(found, module)
        if home == FOREIGN and subtree.has_state:
            return call(module, *args, **kwargs)
        arguments: Arguments | None = None
        if home < 0:
            arguments = self.recorder.arguments(args, kwargs)
            if not any(type(tensor) is PlacedTensor for tensor in arguments.tensors):
                return call(module, *args, **kwargs)
        reason = self._open_for(subtree)
        if reason is not None:
            return self._call_open(subtree, reason, call, args, kwargs)
        if (
            any(subtree.own_hooks)
            or torch_module._global_forward_hooks
            or torch_module._global_forward_pre_hooks
        ):
            return self._call_hooked(subtree, call, args, kwargs)
        return self._call_closed(subtree, call, args, kwargs, arguments)

    def _new_subtree(self, module: nn.Module) -> _Subtree:
        home = self.placement.home(module)
        subtree = _Subtree(module, self.placement.name(module), home)
        self._subtrees[id(module)] = subtree
        return subtree

    def _open_for(self, subtree: _Subtree) -> str | None:
        """Why the module's own code has to run here; None if one closed call will do."""
        if subtree.opened is not None:
            return subtree.opened
        if any(subtree.inner_hooks):
            return "has forward hooks inside"
        if self.placement.strange and not self.placement.strange.isdisjoint(subtree.ids):
            return "runs with other parameters than its own"
        if (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks) and len(
            subtree.ids
        ) > 1:
            return "is under forward hooks for all modules"
        return None

    def _is_whole(self, subtree: _Subtree) -> bool:
        """Whether a call of it is one closed call without anything around it, of its own parameters."""
        return not (
            self.recorder.buffers.num_stateful
            or subtree.opened is not None
            or self.placement.strange
            or any(subtree.own_hooks)
            or any(subtree.inner_hooks)
            or torch_module._global_forward_hooks
            or torch_module._global_forward_pre_hooks
        )

    def _call_container(
        self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._refuse_backward_hooks(module, "is split over stages")
        look_at_opened(self.placement.name(module), module, args, kwargs)
        with self.at(None):
            return call_in_runs(call, module, args, kwargs)

    def _call_open(
        self, subtree: _Subtree, reason: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.recorder.tape is not None and reason != DRAWS:
            raise refuse(f"calls {subtree.name}, which {reason}")
        self._refuse_backward_hooks(subtree.module, reason)
        refuse_effect(subtree.name, reason)
        look_at_opened(subtree.name, subtree.module, args, kwargs)
        if is_marked(subtree.module) and torch.is_grad_enabled():
            is_run = type(subtree.module) is CheckpointedRun
            what = "its parts are each for themselves" if is_run else "it runs without"
            warn_once_at_user_line(
                f"smp.set_activation_checkpointing: {subtree.name} cannot be computed again as one call, "
                f"since it {reason}: {what}"
            )
        with self.at(subtree.home if subtree.home >= 0 else self.home):
            return call_in_runs(call, subtree.module, args, kwargs)

    def _call_hooked(
        self, subtree: _Subtree, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Forward hooks of the module's own run here, around a closed call that runs without them."""
        if self.recorder.tape is not None:
            raise refuse(f"calls {subtree.name}, which has forward hooks")
        module = subtree.module
        namespace = module.__dict__
        # Its backward hooks are for the run by its owner.
        own = {key: namespace[key] for key in ("_backward_hooks", "_backward_pre_hooks")}
        forward = namespace.get("forward", MISSING)

        def restore() -> None:
            namespace.update(own)
            if forward is MISSING:
                namespace.pop("forward", None)
            else:
                namespace["forward"] = forward

        def closed(*args: Any, **kwargs: Any) -> Any:
            restore()
            return self._call_closed(subtree, _forward_of, args, kwargs, None, bare=True)

        namespace.update({key: OrderedDict() for key in own})
        namespace["forward"] = closed
        try:
            return call(module, *args, **kwargs)
        finally:
            restore()

    def _call_closed(
        self,
        subtree: _Subtree,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Arguments | None,
        *,
        bare: bool = False,
    ) -> Any:
        """Records the call; opens the module if it turns out that it has to be."""
        recorder = self.recorder
        if is_inside_checkpoint() and not bare:
            subtree = self._checkpointed(subtree)
        if recorder.buffers.rebound or recorder.ordinary.twins:
            recorder.buffers.write(subtree.module, subtree.ids)
        if arguments is None:
            arguments = recorder.arguments(args, kwargs)
        if any(map(has_attributes, arguments.tensors)):
            self.recorder.buffers.take_over(subtree.module)
            reason = "is given a tensor with attributes of its own"
            return self._call_open(subtree, reason, call, args, kwargs)
        if not are_plain(arguments.leaves):
            for leaf in arguments.leaves:
                if may_change(leaf):
                    self.recorder.buffers.take_over(subtree.module)
                    reason = f"is given a {type(leaf).__name__}, which may change before it would run"
                    return self._call_open(subtree, reason, call, args, kwargs)
        reason, result = recorder.writer.record_module(
            subtree.name, subtree.module, arguments, subtree.home, bare=bare
        )
        if reason is None:
            return result
        if reason is not UNDER_A_MODE:
            subtree.opened = reason
        self.recorder.buffers.take_over(subtree.module)
        return self._call_open(subtree, reason, call, args, kwargs)

    def _checkpointed(self, subtree: _Subtree) -> _Subtree:
        """In place of a call inside one of torch's checkpoints: one that keeps no activations."""
        module = subtree.module
        if subtree.home == FOREIGN or is_marked(module):
            return subtree
        run = self.recorder.runs.of([module], preserve_rng_state=True)
        found = self._subtrees.get(id(run)) or self._new_subtree(run)
        return subtree if self._open_for(found) is not None else found

    def note(self, command: Command, places: PlacesRead | None) -> None:
        """A closed call was recorded, whose code reads these places."""
        module = command.module
        assert module is not None
        pending = self._pending.get(id(module))
        if pending is None:
            pending = self._pending[id(module)] = _Pending(self._subtrees[id(module)])
        if places is not None:
            self.recorder.read_between.look(places)
        pending.commands.append((command, places, places.seen if places is not None else None))

    def note_function(self, command: Command, cls: type[torch.autograd.Function]) -> None:
        """An autograd function of the user's was recorded, whose code may read more than its arguments."""
        if not are_plain(command.arguments.leaves):
            state = PythonState()
            for leaf in command.arguments.leaves:
                if may_change(leaf):
                    state.add(leaf, type(leaf).__name__)
            self._given.append((command, state))
        places = self.recorder.backward_state.meet(cls)
        self.recorder.read_between.look(places)
        if places.places:
            pending = self._pending.setdefault(id(cls), _Pending(None))
            pending.commands.append((command, places, places.look()))

    def _refuse_backward_hooks(self, module: nn.Module, reason: str) -> None:
        if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
            raise SMPError(
                "backward hooks on all modules (torch.nn.modules.module.register_module_full_backward_hook) "
                "would run on modules that are split over stages too: register them on the modules that they "
                "are for"
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise SMPError(
                f"module {self.placement.name(module)!r} has backward hooks and {reason}, so that its code "
                f"runs "
                "on every rank: register them on modules that lie on one stage, or place it whole with "
                "smp.partition"
            )

    @contextlib.contextmanager
    def at(self, home: int | None) -> Iterator[None]:
        """Within: torch functions go to this stage; None: to that of their largest input."""
        before, self.home = self.home, home
        try:
            yield
        finally:
            self.home = before

    # State between a call and its run -----------------------------------------------------------------------

    def attribute_set(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute of a module is about to be set, or deleted."""
        namespace = module.__dict__
        if namespace.get(name, MISSING) is value:
            return
        refuse_effect(type(module).__name__, f"sets {name}")
        owners = self.placement.owners.get(id(module))
        if owners is None:
            return
        if isinstance(value, nn.Module) or name in namespace.get("_modules", ()):
            self._module_set(owners)
            return
        if name in namespace.get("_parameters", ()) or name in namespace.get("_buffers", ()):
            return  # their tables hear of it
        self.recorder.backward_state.attribute_set(module, name, namespace.get(name, MISSING))
        changed: list[tuple[Place, Any]] | None = None
        for owner in owners:
            self.recorder.descriptions.signatures.changed(owner)
            pending = self._pending.get(owner)
            if pending is None:
                continue
            if changed is None:
                changed = [(ModuleAttribute(module, name), namespace.get(name, MISSING))]
            for command, _, _ in pending.commands:
                command.carry(changed)

    def _module_set(self, owners: tuple[int, ...]) -> None:
        """Modules inside closed calls are exchanged: what was recorded runs with the present ones."""
        if any(owner in self._pending for owner in owners):
            self.recorder.run_all_recorded()
        for owner in owners:
            self.recorder.descriptions.signatures.changed(owner)
            subtree = self._subtrees.get(owner)
            if subtree is not None:
                subtree.opened = "gets modules while it runs"

    def before_running(self, *, all_recorded: bool = True) -> None:
        """What has been recorded is about to run: gives each call what it was recorded with.

        Args:
            all_recorded: none of it is left when recording goes on.

        Raises:
            SMPError: an attribute has changed in a way that was not heard.
        """
        signatures = self.recorder.descriptions.signatures
        text = self.recorder.read_between.changed()
        if text is not None:
            raise SMPError(
                f"other code {text} after a call was recorded that reads it, and before it could run: it "
                "would see what comes later. Set it between steps, or keep what changes within a step in "
                "plain values: attributes of modules, a dict of numbers"
            )
        for command, state in self._given:
            text = state.changed()
            if text is not None:
                raise SMPError(
                    f"{command.label} was given an object that changed before it could run: other code "
                    f"{text}. Give it the plain values themselves, or an object of its own"
                )
        for pending in self._pending.values():
            if pending.subtree is not None:
                self._without_later_hooks(pending.subtree, [command for command, _, _ in pending.commands])
            looked_at = now = None
            for command, places, seen in pending.commands:
                if places is None or seen is None:
                    continue
                if places is not looked_at:  # all microbatches call the same modules
                    looked_at, now = places, places.look()
                if now is not seen:
                    command.carry(places.others_than_now(seen))
            if self.strict and pending.subtree is not None:
                text = signatures.unheard(pending.subtree.module)
                if text is not None:
                    raise SMPError(
                        f"{pending.subtree.name}: {text}. It changed after the module was called and before "
                        "the call ran, in a way that cannot be carried (module.__dict__, or an object that "
                        "is "
                        "changed in place): set attributes of modules by module.name = value"
                    )
        if all_recorded:
            self._pending.clear()

    def _without_later_hooks(self, subtree: _Subtree, commands: list[Command]) -> None:
        """Forward hooks that were put on after a call was recorded are not for that call.

        Raises:
            SMPError: they are inside of what runs as a whole.
        """
        of_all = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        if of_all or any(subtree.own_hooks):
            for command in commands:
                command.bare = True
        if any(subtree.inner_hooks):
            raise SMPError(
                f"a forward hook was put on a module inside {subtree.name} in the midst of an smp.step, "
                f"after a call of {subtree.name} that has not run yet: put hooks on between steps"
            )

    def look_between(self) -> None:
        """Some of what is recorded has run: what the rest reads must stay as it is by now."""
        for pending in self._pending.values():
            for _, places, _ in pending.commands:
                if places is not None:
                    self.recorder.read_between.look(places)

    def run_pending(self, module: nn.Module) -> None:
        """Before state of the module changes: what has been recorded of it runs with the present one."""
        owners = self.placement.owners.get(id(module), ())
        if any(owner in self._pending for owner in owners):
            self.recorder.run_all_recorded()

    def run_those_with(self, memory: int | None) -> None:
        """Before this memory changes: calls that may read it by way of plain attributes run."""
        if any(p.subtree is not None and memory in p.subtree.memories() for p in self._pending.values()):
            self.recorder.run_all_recorded()

    @property
    def are_pending(self) -> bool:
        """Whether closed calls have been recorded that have not run."""
        return bool(self._pending)


def _forward_of(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)
