"""What every module costs, found by one run of the model on one microbatch.

The run is on fake tensors: no data, no time. Flops, the bytes that backward keeps and the bytes of results
are noted for the module whose own code was running. Where the model cannot run on fake tensors (it looks
at its data), or where execution times are wanted (``trace_execution_times``), it runs for real, and buffers
and random numbers are put back afterwards. Hooks that are on before do not fire, if the model can do without.

Of a checkpointed module its inputs are kept; what it computes inside, while it is computed again, is not
counted here, nor is the time of that.

The loss belongs to the step function, which has not got there yet when the model must be cut. What it keeps
is guessed: one tensor as large as each result of the model that carries a gradient and is not kept already,
which is what cross entropy (the log-probabilities), squared error and most others keep. It counts at the
module that made the result, for as many microbatches as have had their loss and not their backward: one,
unless all forwards run first. A model that returns a loss itself has shown what that keeps, and nothing is
guessed. Only ``smp-lite plan`` sees the step's own loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from ...deferred import has_deferred
from ...devices import home
from ...errors import SMPError
from ...plan.partitioning.checkpoint_groups import group_children
from ...plan.partitioning.partition import ModuleCost
from ..code.operators import run_operator
from ..parameters.moving import whole_on
from ..state.random_state import kept
from ..values.calls import Arguments
from ..values.structure import flatten
from .checkpointed_calls import is_marked, strategy_of
from .effects import untouched
from .metadata import MetadataInference, operator_flops
from .saved_hooks import hooks_on_saved

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


@dataclass
class _Tally:
    order: int = -1
    flops: float = 0.0
    seconds: float = 0.0
    kept_bytes: int = 0
    loss_bytes: int = 0  # of kept_bytes' kind, for a loss outside of the model
    output_bytes: int = 0


class ModuleTrace:
    """Costs by module name, before they are made a tree."""

    def __init__(self) -> None:
        self.tallies: dict[str, _Tally] = {}
        self.measured = False  # whether its seconds are to be used

    def of(self, name: str) -> _Tally:
        return self.tallies.setdefault(name, _Tally())


def trace_model(
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inference: MetadataInference,
    *,
    measure_times: bool = False,
) -> ModuleTrace:
    """Runs the model once on these arguments and notes what each module costs."""
    if not measure_times:
        try:
            with without_hooks(root):
                return _trace_fake(root, args, kwargs, inference)
        except Exception as error:
            # Whatever fake tensors cannot do, the real run can.
            if has_deferred(root):
                raise SMPError(
                    "the model could not be described without its data, which it does not have yet, because "
                    f"its initialization is delayed ({type(error).__name__}: {error}). Build it without delay"
                ) from error
    try:
        with without_hooks(root):
            trace = _trace_real(root, args, kwargs)
    except Exception:
        # What only works with hooks; if it does not work with them either, the error is the user's.
        trace = _trace_real(root, args, kwargs)
    trace.measured = measure_times
    return trace


@contextmanager
def without_hooks(root: nn.Module) -> Iterator[None]:
    """Within: hooks are off that were on before; those that the model's own code puts on fire."""
    tables = [
        getattr(part, name)
        for part in root.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if getattr(part, name)
    ]
    tables += [getattr(torch_module, name) for name in _GLOBAL_HOOKS if getattr(torch_module, name)]
    kept_hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept_hooks, strict=True):
            table.update(hooks)


def _trace_fake(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inference: MetadataInference
) -> ModuleTrace:
    trace = ModuleTrace()
    fake_args, fake_kwargs = inference.fake_arguments(Arguments.of(args, kwargs))
    with untouched(root, fake_args, fake_kwargs), kept():
        state = inference.install_fakes(root)
        watch = _Watch(root, trace, state.storages)
        with watch.calls(), inference.mode, watch:
            root(*fake_args, **fake_kwargs)
    return trace


def _trace_real(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleTrace:
    trace = ModuleTrace()
    storages = {p.untyped_storage()._cdata for p in root.parameters()}
    with whole_on(root, home()), run_for_real(root, args, kwargs):
        watch = _Watch(root, trace, storages)
        with watch.calls(), watch:
            root(*args, **kwargs)
    return trace


@contextmanager
def run_for_real(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Puts back what a run changes, random numbers and buffers too."""
    tables = [(module._buffers, dict(module._buffers)) for module in root.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    try:
        with untouched(root, args, kwargs), kept():
            yield
    finally:
        for table, own in tables:  # a module may have bound its buffers anew
            table.clear()
            table.update(own)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


class _Watch(TorchDispatchMode):
    """Knows whose code is running, and counts what it does."""

    def __init__(self, root: nn.Module, trace: ModuleTrace, state_storages: set[int]) -> None:
        super().__init__()
        self.trace = trace
        self.names = {id(module): name for name, module in root.named_modules()}
        self.state_storages = state_storages
        # Running modules; a container's own ops count at the child whose result they go on with.
        self.stack: list[list[str]] = [["", ""]]
        self.clock = time.perf_counter()
        self.kept: dict[int, torch.UntypedStorage] = {}  # alive, or addresses would be used again
        self.later_in_groups = _later_in_groups(root)
        self.is_packing = False
        self.num_called = 0  # modules

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = run_operator(func, types, args, kwargs or {})
        if not self.is_packing:
            self.trace.of(self.stack[-1][1]).flops += operator_flops(func, args, kwargs or {}, result)
        return result

    def _loss_bytes(self, results: list[torch.Tensor]) -> int:
        """What a loss of the model's results is taken to keep."""
        carrying = [tensor for tensor in results if tensor.requires_grad]
        if any(tensor.numel() == 1 for tensor in carrying):
            return 0
        held = self.state_storages | self.kept.keys()
        return sum(_num_bytes(t) for t in carrying if t.untyped_storage()._cdata not in held)

    def _charge(self) -> None:
        now = time.perf_counter()
        self.trace.of(self.stack[-1][1]).seconds += now - self.clock
        self.clock = now

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Follows module calls."""
        original: Callable[..., Any] = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.names.get(id(module))
            if name is None:
                return original(module, *args, **kwargs)
            self._charge()
            self.stack.append([name, name])
            tally = self.trace.of(name)
            if tally.order < 0:
                tally.order = self.num_called
                self.num_called += 1
            if is_marked(module) and torch.is_grad_enabled() and id(module) not in self.later_in_groups:
                hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
                if hooks is not None and hooks[0] is pack:  # else it is inside another checkpoint
                    for tensor in Arguments.of(args, kwargs).tensors:
                        pack(tensor)
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._charge()
                _, last = self.stack.pop()
                self.stack[-1][1] = name
            leaves: list[Any] = []
            flatten(result, leaves)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            tally.output_bytes = sum(map(_num_bytes, tensors))
            if not name:
                self.trace.of(last).loss_bytes = self._loss_bytes(tensors)
            return result

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.state_storages and storage._cdata not in self.kept:
                    self.kept[storage._cdata] = storage
                    self.trace.of(self.stack[-1][1]).kept_bytes += storage.nbytes()
            if type(tensor) is FakeTensor:
                return _detached(tensor)
            self.is_packing = True
            try:
                return tensor.detach()  # for a forward that computes gradients itself
            finally:
                self.is_packing = False

        nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
        try:
            with hooks_on_saved(pack):
                yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]


def _detached(tensor: FakeTensor) -> FakeTensor:
    """``tensor.detach()``, which runs an operator and takes ten times as long."""
    with torch._C._DisableTorchDispatch():
        form = tensor.detach()
    return FakeTensor(tensor.fake_mode, form, tensor.fake_device)


def _later_in_groups(root: nn.Module) -> set[int]:
    """Children of Sequentials of which no input is kept, unless the partition will cut their groups."""
    found: set[int] = set()
    for module in root.modules():
        if isinstance(module, nn.Sequential) and (asked := strategy_of(module)) is not None:
            children = list(module)
            for group in group_children([0] * len(children), asked[0]):
                found.update(id(children[number]) for number in group[1:])
    return found


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def cost_tree(
    root: nn.Module,
    trace: ModuleTrace | None,
    *,
    optimizer_states: float,
    microbatches_in_flight: int,
    losses_in_flight: int = 1,
    use_times: bool = False,
) -> ModuleCost:
    """The model's module tree with costs, for the partitioner.

    Args:
        root: the model.
        trace: from :func:`trace_model`; None (``skip_tracing``) leaves parameters and registration order.
        optimizer_states: numbers that the optimizer keeps for each parameter element.
        microbatches_in_flight: how many microbatches' activations are held at once.
        losses_in_flight: how many microbatches' losses are.
        use_times: count measured seconds instead of flops.
    """
    names: dict[int, str] = {}
    for name, parameter in root.named_parameters(remove_duplicate=True):
        names[id(parameter)] = name

    def node(module: nn.Module, name: str) -> ModuleCost:
        own = [p for p in module._parameters.values() if p is not None]
        own_buffers = [b for b in module._buffers.values() if b is not None]
        tally = trace.of(name) if trace is not None else _Tally()
        parameter_bytes = sum(p.numel() * p.element_size() for p in own)
        trained = sum(p.numel() * p.element_size() for p in own if p.requires_grad)
        buffer_bytes = sum(b.numel() * b.element_size() for b in own_buffers)
        compute = tally.seconds if use_times else tally.flops
        return ModuleCost(
            name=name,
            parameter_ids=tuple(names[id(p)] for p in own),
            parameter_count=sum(p.numel() for p in own),
            parameter_bytes=parameter_bytes,
            state_bytes=parameter_bytes + int(trained * (1 + optimizer_states)) + buffer_bytes,
            activation_bytes=tally.kept_bytes * microbatches_in_flight + tally.loss_bytes * losses_in_flight,
            compute=compute if trace is not None else float(sum(p.numel() for p in own)),
            output_bytes=tally.output_bytes,
            order=tally.order,
            keep_whole=bool(module._backward_hooks or module._backward_pre_hooks) and module is not root,
            children=tuple(
                node(child, f"{name}.{own_name}" if name else own_name)
                for own_name, child in _unique_children(module, name)
            ),
            parameter_elements=tuple(p.numel() for p in own),
        )

    seen: set[int] = set()

    def _unique_children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        # A module registered twice has one name, as in named_modules(): the next child is looked at when
        # those inside the one before have been.
        for own_name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                yield own_name, child

    seen.add(id(root))
    return node(root, "")
