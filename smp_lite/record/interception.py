"""Where recording listens: module calls, attributes of modules, torch functions, autograd functions.

``Module.__call__``, ``Module.__setattr__``, ``Module.__delattr__`` and ``autograd.Function.apply`` are
replaced once per process, when the first step begins, by functions that ask whether a recorder is listening;
replacing them at every step would cost more than the asking, since Python updates every subclass. Never
``forward``, so hooks fire where calls are made. While a step is recorded a torch function mode is on as
well. The mode sees calls on ordinary tensors: recording must know when one that a command has captured is
changed in place. Placed tensors are recognised by the mode too, so each call costs one look-up only.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook
from torch.utils.hooks import RemovableHandle

from ..errors import SMPError
from .backward.checkpoints import Region, inside_reentrant, refuse_node_hook, refuse_saved_hooks
from .backward.engine import WANTED_DTYPES
from .buffers.held import BehindBuffer
from .commands.apply_function import ApplyFunction
from .describe.checkpointed_calls import call_marked, has_runs, is_marked
from .parameters.away import LOCAL
from .state.ambient import users_modes
from .state.containers import MISSING
from .state.hearing import attribute_set
from .step.value_hooks import ON_LEAVES
from .values.meant import meant
from .values.placed import PlacedTensor

if TYPE_CHECKING:
    from .step.recorder import Recorder

__all__ = ["listening", "not_listening", "start_intercepting", "stop_intercepting"]

_active: Recorder | None = None
_thread: int | None = None
_originals: dict[str, Any] = {}
_regions: dict[int, Region] = {}  # checkpoints that are entered, by the hooks of each
_node_hook: Any = getattr(torch.autograd.graph, "node_creation_hook", None)  # from torch 2.14 on
_OURS = __name__.partition(".")[0]
_ON_MODULES = ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook")


class _Listener(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.is_first = not users_modes()  # else one that was on before is asked next

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder, func = self.recorder, meant(func)
        if recorder.suspended or recorder.descriptions.inferring:
            return func(*args, **(kwargs or {}))
        if recorder.has_stale_buffers:
            recorder.before_function(func, args, kwargs or {})
            types = tuple([kind for kind in types if kind is not BehindBuffer])
        if recorder.has_split_parameters:
            recorder.refuse_split_reads(func, args, kwargs or {})
        if PlacedTensor in types:
            # Placed tensors bring their own handler. torch would call it next, after a second look at all
            # arguments; where there are handlers of others too, it says whose comes first.
            if len(types) == 1 and self.is_first:
                return PlacedTensor.called(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        return recorder.ordinary_function(func, args, kwargs or {})


@contextlib.contextmanager
def listening(recorder: Recorder) -> Iterator[None]:
    """Routes calls to the recorder until left.

    Raises:
        RuntimeError: another recorder is listening in this process.
    """
    global _active, _thread
    if _active is not None:
        raise RuntimeError("a step function was called inside another step function: call it outside")
    start_intercepting()
    _active, _thread = recorder, threading.get_ident()
    try:
        with _Listener(recorder):
            yield
    finally:
        _active = _thread = None


@contextlib.contextmanager
def not_listening() -> Iterator[None]:
    """Within, between two microbatches: torch functions need not ask whether they are recorded."""
    mode = torch.overrides._get_current_function_mode()
    if not isinstance(mode, _Listener):  # the script has left a mode of its own
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


def _is_of(function: Any, package: str) -> bool:
    return str(getattr(function, "__module__", "")).startswith(f"{package}.")


def start_intercepting() -> None:
    """Replaces the methods; does nothing if they are replaced.

    From ``smp.init()`` on: a model may keep ``SomeFunction.apply`` as an attribute.
    """
    if _originals:
        return
    original_call: Callable[..., Any] = nn.Module.__call__
    original_set, original_delete = nn.Module.__setattr__, nn.Module.__delattr__
    original_apply = torch.autograd.Function.__dict__["apply"]
    original_convert = nn.Module._apply
    original_dtypes = getattr(FunctionCtx, "set_output_grad_dtype", None)  # from torch 2.14 on
    original_node_hook = getattr(_node_hook, "__enter__", None)
    original_hooks = {name: getattr(torch.Tensor, name) for name in ON_LEAVES}
    original_module_hooks = {name: getattr(nn.Module, name) for name in _ON_MODULES}
    original_remove = RemovableHandle.remove
    original_saved_exit = torch.autograd.graph.saved_tensors_hooks.__exit__
    original_saved = torch.autograd.graph.saved_tensors_hooks.__enter__
    _originals.update(
        convert=original_convert,
        hooks=original_hooks,
        module_hooks=original_module_hooks,
        remove=original_remove,
        saved=original_saved,
        saved_exit=original_saved_exit,
        node_hook=original_node_hook,
        dtypes=original_dtypes,
        call=original_call,
        set=original_set,
        delete=original_delete,
        apply=original_apply,
    )

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = _active
        if recorder is None or recorder.suspended or threading.get_ident() != _thread:
            if is_marked(module) or has_runs(module):
                return call_marked(original_call, module, args, kwargs)
            return original_call(module, *args, **kwargs)
        if recorder.descriptions.inferring:
            if is_marked(module) or has_runs(module):
                return call_marked(functools.partial(_call_on_fakes, original_call), module, args, kwargs)
            return _call_on_fakes(original_call, module, *args, **kwargs)
        return recorder.call_module(module, original_call, args, kwargs)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        recorder = _active
        if recorder is not None and not recorder.not_listening and threading.get_ident() == _thread:
            recorder.attribute_set(module, name, value)
        else:
            attribute_set(module, name)
        original_set(module, name, value)

    def delete_attribute(module: nn.Module, name: str) -> None:
        recorder = _active
        if recorder is not None and not recorder.not_listening and threading.get_ident() == _thread:
            recorder.attribute_set(module, name, MISSING)
        original_delete(module, name)

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        recorder = _active
        if recorder is not None:
            recorder.meet(cls)
        if recorder is not None and not recorder.not_listening and threading.get_ident() == _thread:
            if cls is CheckpointFunction:
                return _run_checkpointed(*args)
            if any(type(arg) is PlacedTensor for arg in args):
                _refuse_modules(cls, args)
                return recorder.torch_function(ApplyFunction(cls), args, kwargs)
        return original_apply.__get__(None, cls)(*args, **kwargs)

    def convert(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        recorder = _active
        if recorder is not None and not recorder.not_listening and threading.get_ident() == _thread:
            tensors = [*module.parameters(recurse), *module.buffers(recurse)]
            placed = [tensor for tensor in tensors if type(tensor) is PlacedTensor]
            if placed and all(fn(tensor) is tensor for tensor in placed):
                return module  # module.to(dtype) where it has that dtype
            if placed:
                raise SMPError(
                    f"a {type(module).__name__} was converted inside an smp.step (to(), half(), float() and "
                    "the like), where calls of earlier lines have not run yet: convert it between steps"
                )
        return original_convert(module, fn, recurse)

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if _active is not None:
            _active.hears_hook(hook)
            _look_at_hook_of_run(tensor, hook)
        return original_hooks["register_hook"](tensor, hook)

    def register_accumulated_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if _active is not None:
            _look_at_hook_of_run(tensor, hook)
        return original_hooks["register_post_accumulate_grad_hook"](tensor, hook)

    def hooking(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _active is not None and not _active.not_listening and threading.get_ident() == _thread:
                _active.hears_backward_hook(module)
            return original(module, *args, **kwargs)

        return register

    def remove(handle: RemovableHandle) -> None:
        if _active is not None and not _active.not_listening and threading.get_ident() == _thread:
            _active.hears_removal(handle)
        original_remove(handle)

    def enter_saved_hooks(hooks: Any) -> None:
        if _active is not None and _is_of(hooks.pack_hook, "torch"):
            _active.hears_checkpoint()
            if isinstance(hooks, _checkpoint_hook) and not _active.not_listening:
                _regions[id(hooks)] = Region(_checkpointed(sys._getframe(1)))
        elif _active is not None and not _is_of(hooks.pack_hook, _OURS):
            if not _active.not_listening:
                refuse_saved_hooks()
            _active.hears_hook(hooks.unpack_hook)
        original_saved(hooks)

    def exit_saved_hooks(hooks: Any, *error: Any) -> None:
        original_saved_exit(hooks, *error)
        region = _regions.pop(id(hooks), None)
        if region is not None and error[:1] == (None,):
            region.leave()

    def enter_node_hook(hook: Any) -> None:
        if _active is not None and not _active.not_listening:
            refuse_node_hook()
        original_node_hook(hook)

    def set_gradients_dtype(ctx: Any, *dtypes: torch.dtype | None) -> None:
        original_dtypes(ctx, *dtypes)
        setattr(ctx, WANTED_DTYPES, dtypes)

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    torch.Tensor.register_post_accumulate_grad_hook = register_accumulated_hook  # type: ignore[method-assign]
    for name, original in original_module_hooks.items():
        setattr(nn.Module, name, hooking(original))
    RemovableHandle.remove = remove  # type: ignore[method-assign]
    torch.autograd.graph.saved_tensors_hooks.__enter__ = enter_saved_hooks  # type: ignore[method-assign]
    torch.autograd.graph.saved_tensors_hooks.__exit__ = exit_saved_hooks  # type: ignore[method-assign]
    if original_dtypes is not None:
        FunctionCtx.set_output_grad_dtype = set_gradients_dtype
    if _node_hook is not None:
        _node_hook.__enter__ = enter_node_hook
    nn.Module._apply = convert  # type: ignore[method-assign]
    nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
    nn.Module.__delattr__ = delete_attribute  # type: ignore[method-assign, assignment]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]


def stop_intercepting() -> None:
    """Puts torch's own methods back."""
    if _originals:
        nn.Module._apply = _originals["convert"]  # type: ignore[method-assign]
        for owner, kind in ((torch.Tensor, "hooks"), (nn.Module, "module_hooks")):
            for name, original in _originals[kind].items():
                setattr(owner, name, original)
        RemovableHandle.remove = _originals["remove"]  # type: ignore[method-assign]
        torch.autograd.graph.saved_tensors_hooks.__enter__ = _originals["saved"]  # type: ignore[method-assign]
        torch.autograd.graph.saved_tensors_hooks.__exit__ = _originals["saved_exit"]  # type: ignore[method-assign]
        if _originals["dtypes"] is not None:
            FunctionCtx.set_output_grad_dtype = _originals["dtypes"]
        if _node_hook is not None:
            _node_hook.__enter__ = _originals["node_hook"]
        nn.Module.__call__ = _originals["call"]  # type: ignore[method-assign]
        nn.Module.__setattr__ = _originals["set"]  # type: ignore[method-assign]
        nn.Module.__delattr__ = _originals["delete"]  # type: ignore[method-assign]
        torch.autograd.Function.apply = _originals["apply"]  # type: ignore[method-assign]
        _originals.clear()


def _checkpointed(frame: types.FrameType | None) -> Any:
    """The function that torch's checkpoint() was given, whose hooks are entered from a frame."""
    if frame is not None and frame.f_code.co_name == "__enter__":
        frame = frame.f_back  # from torch 2.14 on, the hooks have an __enter__ of their own, which calls ours
    function = frame.f_locals.get("fn") if frame is not None else None
    if function is None:
        raise SMPError(
            f"torch {torch.__version__} does not show which function its checkpoint() runs again, around "
            "calls of several stages: call checkpoint() inside modules that lie on one stage, or use "
            "smp.set_activation_checkpointing"
        )
    return function


def _look_at_hook_of_run(tensor: torch.Tensor, hook: Any) -> None:
    """Of a hook that code of the user's puts on while what was recorded runs."""
    assert _active is not None
    if _active.suspended and id(tensor) in LOCAL and not _is_of(hook, _OURS):
        _active.hears_hook_of_run(tensor)


def _call_on_fakes(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """A call inside a fake run. Hooks that are there by now were put on by the code that runs."""
    if (
        module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._has_any_global_hook()
        or not (module._forward_hooks or module._forward_pre_hooks)
    ):
        return module.forward(*args, **kwargs)
    return call(module, *args, **kwargs)


def _refuse_modules(cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> None:
    """A function that is handed modules calls them by itself, forward and backward."""
    given = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else [arg])]
    modules = [arg for arg in given if isinstance(arg, nn.Module)]
    if any(isinstance(p, PlacedTensor) for module in modules for p in module.parameters()):
        raise SMPError(
            f"{cls.__name__}.apply() was given modules of the model ({type(modules[0]).__name__}), whose "
            "parameters lie on stages: put the module that calls it on one stage whole, with smp.partition "
            "and auto_partition False"
        )


def _run_checkpointed(run_function: Callable[..., Any], preserve: bool, *inputs: Any) -> Any:
    """Reentrant checkpointing hands over a function that may call modules of any stage: it runs plainly.

    As in plain torch, nothing in it trains unless an input requires a gradient.
    """
    wanted = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
    with torch.set_grad_enabled(torch.is_grad_enabled() and wanted), inside_reentrant(run_function):
        return run_function(*inputs)
