"""What a call would return, found by running it on fake tensors.

:class:`MetadataInference` runs a module's ``forward`` or a torch function under torch's ``FakeTensorMode``
and describes the result: its structure, each tensor's metadata, which arguments it returns or changes in
place, which buffers of its own it changes, from which arguments gradients reach it, whether it draws random
numbers, its flops, and the bytes that its backward would keep. The recorder caches the description.

A fake run leaves no trace (:mod:`smp_lite.record.state.python_state`), and it shows whether a real one would:
a module that sets attributes, fills a list that it was given, draws from a generator of its own or reaches
for a value of the step that is not among its arguments, or for a parameter that is not its own, cannot run
later as one closed call. :class:`NeedsOpening` says so, and the recorder lets the module's own code run where
it is called.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...devices import CPU, home
from ...errors import SMPError
from ..code.operators import run_operator
from ..code.random_operators import draws_numbers
from ..code.watch import Names
from ..parameters.away import Uses, names_of_local
from ..parameters.tables import plain_table
from ..state.flat_weights import renew_lists
from ..state.random_state import kept, python_state
from ..values.calls import Arguments, ChangedArgument, Constant, NewTensor, Repeated, ResultMeta, SameTensor
from ..values.placed import PlacedTensor, TensorMeta
from ..values.structure import flatten
from . import fake_collectives
from .attribute_reads import AttributeReads, Unread
from .checkpointed_calls import forward_of
from .effects import Effects, FakeTables, NeedsOpening, function_untouched
from .fake_mode import fake_mode
from .layouts import as_kernels_lay_out
from .saved_hooks import hooks_on_saved

USES_OTHERS = (
    "uses a value of the step that is not among its arguments, or a parameter or buffer that is not its own "
    "(kept in a list, a variable, an attribute that is not registered)"
)


class MetadataInference:
    """Runs calls on fake tensors. One per process: fake tensors of one mode do not mix with another's."""

    def __init__(self) -> None:
        self.mode = fake_mode()
        self.touched_placed = False  # a placed value was used by code that was run on fake tensors
        self.is_repeated = False  # the step has several microbatches
        self.met_state = False  # tensors were used that are neither arguments nor the module's by their names
        # Whether calls change a tensor of the model, once it is cut, but not of modules with these ids.
        self.is_changing: Callable[[torch.Tensor, Collection[int]], bool] = lambda tensor, but_for: False

    def function(self, func: Callable[..., Any], arguments: Arguments) -> ResultMeta:
        """Describes ``func`` of the arguments. Errors of fake tensors pass through."""
        self.touched_placed = False
        fakes = self._fakes(arguments.tensors)
        args, kwargs = arguments.build([given for _, given in fakes])
        cls = getattr(func, "cls", None)  # of an autograd function
        with function_untouched(cls) if cls is not None else contextlib.nullcontext():
            return self._run(lambda: func(*args, **kwargs), fakes, FakeTables())

    def module(self, module: nn.Module, arguments: Arguments) -> tuple[ResultMeta, Names, Unread]:
        """Describes the module's forward, and says what its code mentions, and what it did not read.

        Raises:
            NeedsOpening: it does something that one closed call cannot do.
        """
        self.touched_placed = self.met_state = False
        fakes = self._fakes(arguments.tensors)
        args, kwargs = arguments.build([given for _, given in fakes])
        effects = Effects(module, args, kwargs)
        reads = AttributeReads(module)
        tables = self.install_fakes(module)
        uses = Uses(tables.parameters)
        try:
            try:
                with effects.watched(), reads.noted(), uses.noted():
                    meta = self._run(lambda: forward_of(module, args, kwargs), fakes, tables)
            except NeedsOpening:
                raise
            except Exception:
                # An error of the module's own, perhaps: what it does before it raises must happen as well.
                found = effects.found()
                if found is not None:
                    raise NeedsOpening(found) from None
                raise
            finally:
                self.touched_placed |= uses.of_others
                self.met_state |= uses.of_own
            reason = effects.found()
            if self.touched_placed:
                reason = USES_OTHERS
            if meta.sets_attributes:
                reason = "sets attributes of tensors"
            if any(given._backward_hooks for _, given in fakes):
                reason = "puts a hook on the gradient of what it is given"
            if self.is_repeated and (hooked := tables.hooked()) is not None:
                reason = f"puts a hook on the gradient of its parameter {hooked}"
        finally:
            effects.undo()
        if reason is not None:
            raise NeedsOpening(reason)
        return meta, effects.names, reads.unread(effects.names, effects.entered)

    def fake_arguments(self, arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with every tensor replaced by a fake one."""
        return arguments.build([given for _, given in self._fakes(arguments.tensors)])

    def _fakes(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each tensor argument a leaf to find again in the graph, and what the call is given."""
        fakes = []
        for tensor in tensors:
            meta = tensor.smp_meta if type(tensor) is PlacedTensor else TensorMeta.of(tensor)
            if type(tensor) is not PlacedTensor and tensor.layout is not torch.strided:
                # Sparse: fake tensors are made of it by torch, which does not know all kinds.
                sparse = self.mode.from_tensor(tensor.detach())
                fakes.append((sparse, sparse))
                continue
            leaf = self._fake(meta)
            if meta.requires_grad:
                leaf.requires_grad_()
                with torch.inference_mode(False), torch.enable_grad(), self.mode:
                    # Not a leaf, so that the call may change it in place as it may the real one.
                    fakes.append((leaf, _Given.apply(leaf)))
            else:
                fakes.append((leaf, leaf))
        return fakes

    def _fake(self, meta: TensorMeta) -> torch.Tensor:
        # What the mode would make of a torch.empty_strided, in a tenth of the time.
        with torch.inference_mode(False):
            if not meta.stride and meta.shape:
                form = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            else:
                form = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            return FakeTensor(self.mode, form, meta.device)

    def install_fakes(self, module: nn.Module) -> FakeTables:
        """Puts fake parameters and buffers in place."""
        made: dict[int, torch.Tensor] = {}
        tables = FakeTables()
        for prefix, part in module.named_modules():
            tables.modules.add(id(part))
            for table in ("_parameters", "_buffers"):
                faked: dict[str, torch.Tensor | None] = {}
                for name, tensor in plain_table(part.__dict__[table]).items():
                    if tensor is None:
                        faked[name] = None
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = self._fake_state(tensor)
                        if type(tensor) is PlacedTensor and tensor.smp_parameter is not None:
                            tables.parameters[tensor.smp_parameter] = made[id(tensor)]
                    faked[name] = made[id(tensor)]
                part.__dict__[table] = faked
                tables.add(prefix, faked, is_buffers=table == "_buffers")
            renew_lists(part)
        return tables

    def _fake_state(self, tensor: torch.Tensor) -> torch.Tensor:
        meta = tensor.smp_meta if type(tensor) is PlacedTensor else TensorMeta.of(tensor)
        # Before the partition it may be elsewhere, or have no memory.
        fake = self._fake(meta._replace(device=home()))
        if meta.requires_grad:
            # As nn.Parameter(fake) does, which detaches first: another run of an operator.
            fake.requires_grad_()
            fake._is_param = True  # type: ignore[attr-defined]
        return fake

    def _run(
        self,
        call: Callable[[], Any],
        fakes: list[tuple[torch.Tensor, torch.Tensor]],
        tables: FakeTables,
    ) -> ResultMeta:
        versions = [given._version if not given.is_inference() else 0 for _, given in fakes]
        kept_storages: dict[int, torch.UntypedStorage] = {}

        arguments = {given.untyped_storage()._cdata for _, given in fakes if given.layout is torch.strided}
        saved_state: list[tuple[weakref.ref[_Saved], int]] = []  # parameters, buffers and arguments

        def pack(tensor: torch.Tensor) -> _Saved | None:
            if tensor.layout is not torch.strided:
                return None
            # The storage alone: a kept tensor, if it is an output, would be a circle that is never freed,
            # and a freed storage's address would soon be another's.
            storage = tensor.untyped_storage()
            if storage._cdata not in tables.storages:
                kept_storages[storage._cdata] = storage
                if storage._cdata not in arguments:
                    return None
            saved = _Saved()  # lives as long as the graph
            saved_state.append((weakref.ref(saved), storage._cdata))
            return saved

        watch = _Watch(tables.parameters.keys(), functools.partial(self.is_changing, but_for=tables.modules))
        with kept():
            before, seeded = python_state(), torch.default_generator.get_state()
            try:
                with self.mode, watch, hooks_on_saved(pack):
                    result = call()
            finally:
                self.touched_placed |= watch.met_others
                self.met_state |= watch.met_state
            drew = python_state() != before
            # Fake tensors draw nothing, so whatever has moved torch's generator was meant to.
            if not torch.equal(seeded, torch.default_generator.get_state()):
                raise NeedsOpening("seeds the random generator")
        if watch.changes_outside:
            raise NeedsOpening("changes a tensor in place that is neither an argument nor a buffer")
        saved = {storage for token, storage in saved_state if token() is not None}
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        if any(isinstance(leaf, Iterator) for leaf in leaves):
            raise NeedsOpening("returns an iterator, whose code runs when somebody takes from it")
        if kinds := {type(leaf) for leaf in leaves if _is_of_the_user(leaf)}:
            # Code around it may ask for the class, or call its methods, and has a placed value there.
            raise NeedsOpening(f"returns a {kinds.pop().__name__}, a class of tensors of its own")
        storages = {
            leaf.untyped_storage()._cdata
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        }
        before = tables.buffers_by_name(before=True)
        returned = {
            name: memory
            for name, memory in tables.buffers_by_name(before=False).items()
            if memory in storages
        }
        buffers = tables.changed_buffers(watch.written)
        if name := next((name for name in buffers if before.get(name) in storages), None):
            raise NeedsOpening(f"returns its buffer {name}, which it changes: so may the next call of it")
        describe = _Describer(fakes, frozenset(returned.values()))
        described = tuple(describe.leaf(leaf) for leaf in leaves)
        changed = tuple(
            ChangedArgument(i, TensorMeta.of(given), describe.links(given))
            for i, (_, given) in enumerate(fakes)
            if (not given.is_inference() and given._version != versions[i])
            or (given.layout is torch.strided and given.untyped_storage()._cdata in watch.written)
        )
        return ResultMeta(
            spec=spec,
            leaves=described,
            changed=changed,
            sets_attributes=any(map(_has_attributes, [*leaves, *[given for _, given in fakes]])),
            buffers=buffers,
            rebound=tables.rebound_buffers(watch.written),
            returned=tuple(sorted(returned)),
            unguarded=tables.changed_unnoticed(watch.written),
            saved_state=tables.names_in(saved - watch.only_passed),
            saved_arguments=tuple(
                i
                for i, (_, given) in enumerate(fakes)
                if given.layout is torch.strided and given.untyped_storage()._cdata in saved
            ),
            draws=watch.draws or drew,
            flops=watch.flops,
            kept_bytes=sum(storage.nbytes() for storage in kept_storages.values()),
        )


def _has_attributes(tensor: Any) -> bool:
    """Whether Python code has set attributes on a fake tensor."""
    return isinstance(tensor, FakeTensor) and not tensor.__dict__.keys() <= _attributes_of_fakes()


@functools.cache
def _attributes_of_fakes() -> frozenset[str]:
    with FakeTensorMode():
        return frozenset(torch.empty((), device=CPU).__dict__)


class _Saved:
    """Stands for a parameter, buffer or argument in the graph of a fake run."""


class _Given(torch.autograd.Function):
    """A tensor made from a leaf, with the leaf's strides, whatever they are; a clone would be dense."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def describe_result(
    result: Any,
    given: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor | None],
    *,
    draws: bool,
    buffers: tuple[str, ...] = (),
    states: tuple[torch.Tensor, ...] = (),
) -> ResultMeta:
    """Describes the result of a real run.

    Args:
        result: what the call returned.
        given: the tensors it was given; those that have a leaf are fresh copies of it.
        leaves: for each of them its leaf in the graph, None for ordinary tensors.
        draws: whether it drew random numbers.
        buffers: those of its module that it changed.
        states: where the random generators went.

    Raises:
        ValueError: the call changed an ordinary tensor in place.
        SMPError: it returned a tensor of a class of the script's own.
    """
    fakes = [(leaf if leaf is not None else tensor, tensor) for tensor, leaf in zip(given, leaves)]
    parts: list[Any] = []
    spec = flatten(result, parts)
    if kinds := {type(part).__name__ for part in parts if _is_of_the_user(part)}:
        raise SMPError(
            f"a result is a {kinds.pop()}, a class of tensors of the script's own, in code that several "
            "stages run: values have no class of their own there. Put what makes it and what asks for it "
            "into one module, which is called whole, or hand on plain tensors (as_subclass(torch.Tensor))"
        )
    describer = _Describer(fakes)
    described = tuple(describer.leaf(part) for part in parts)
    changed = tuple(
        ChangedArgument(i, TensorMeta.of(tensor), describer.links(tensor))
        for i, (leaf, tensor) in enumerate(fakes)
        if leaf is not tensor and not tensor.is_inference() and tensor._version > 0
    )
    return ResultMeta(
        spec=spec, leaves=described, changed=changed, buffers=buffers, states=states, draws=draws
    )


class _Describer:
    """Turns result leaves into descriptions, relative to the fake arguments."""

    def __init__(
        self, fakes: list[tuple[torch.Tensor, torch.Tensor]], of_buffers: AbstractSet[int] = frozenset()
    ) -> None:
        self.of_buffers = of_buffers
        self.by_identity = {id(given): i for i, (_, given) in enumerate(fakes)}
        self.by_leaf = {id(leaf): i for i, (leaf, _) in enumerate(fakes) if leaf.requires_grad}
        self.copied = {i for i, (leaf, given) in enumerate(fakes) if leaf is not given}
        self.by_storage: dict[int, int] = {}
        for i, (_, given) in enumerate(fakes):
            if given.layout is torch.strided:
                self.by_storage.setdefault(given.untyped_storage()._cdata, i)
        self.made: dict[int, int] = {}  # by memory, the first result that lies there
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []
        self.links_of: dict[int, tuple[int, ...]] = {}

    def leaf(self, leaf: Any) -> NewTensor | SameTensor | Repeated | Constant:
        if not isinstance(leaf, torch.Tensor):
            return Constant(leaf)
        if id(leaf) in self.by_identity:
            return SameTensor(self.by_identity[id(leaf)])
        if id(leaf) in self.seen:
            return Repeated(self.seen[id(leaf)])
        number = self.seen[id(leaf)] = len(self.kept)
        self.kept.append(leaf)
        aliases = shares = None
        is_buffer = False
        if leaf.layout is torch.strided:
            memory = leaf.untyped_storage()._cdata
            aliases = self.by_storage.get(memory)
            if aliases is None:
                first = self.made.setdefault(memory, number)
                shares = first if first != number else None
                is_buffer = memory in self.of_buffers
        return NewTensor(
            TensorMeta.of(leaf),
            self.links(leaf),
            aliases,
            is_view=aliases is None and leaf._is_view(),
            shares=shares,
            is_buffer=is_buffer,
        )

    def links(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Tensor arguments that the autograd graph of ``tensor`` ends in, each as often as it adds to its
        gradient."""
        if not tensor.requires_grad or tensor.grad_fn is None:
            return ()
        found: dict[int, Any] = {}  # by argument, the node that its gradients are added up for
        pending, uses = [tensor.grad_fn], {tensor.grad_fn: 1}
        while pending:
            node = pending.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                argument = self.by_leaf.get(id(getattr(following, "variable", None)))
                if argument is not None:
                    found[argument] = node if argument in self.copied else following
                if following in uses:
                    uses[following] += 1
                else:
                    uses[following] = 1
                    pending.append(following)
        return tuple([argument for argument in sorted(found) for _ in range(uses[found[argument]])])


def _is_of_the_user(leaf: Any) -> bool:
    """Whether it is a tensor of a class that is neither torch's nor this library's."""
    if not isinstance(leaf, torch.Tensor) or type(leaf) is FakeTensor:
        return False
    return type(leaf).__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0])


class _Watch(TorchDispatchMode):
    """Counts flops, notices random draws, what is written to, and state that is not the module's.

    Args:
        own: names of the module's parameters in the whole model.
        is_changing: whether a tensor is a buffer of another module that calls change, or in its memory.
    """

    def __init__(self, own: AbstractSet[str], is_changing: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._own, self._is_changing = own, is_changing
        self.draws = False
        self.flops = 0.0
        self.changes_outside = False
        self.met_state = False  # tensors that are not fake
        self.met_others = False  # of them, those of the model that are none of the module's
        self.only_passed: set[int] = set()  # to backwards, which do not read them: batch norm in training
        self.written: set[int] = set()  # storages, whether autograd hears of it (x.add_) or not (x.data.add_)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        self._note_others(args)
        if func.namespace == fake_collectives.NAMESPACE:
            self._note_written(fake_collectives.written(func, args))
            return fake_collectives.result(func, args)
        if schema.is_mutable:
            for argument, value in zip(schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note_written(value)
        elif "batch_norm" in schema.name and "backward" not in schema.name:
            self._note_statistics(schema, args)
        result = as_kernels_lay_out(func, args, kwargs, run_operator(func, types, args, kwargs))
        if draws_numbers(func, args, kwargs):
            self.draws = True
        self.flops += operator_flops(func, args, kwargs, result)
        return result

    def _note_others(self, values: Sequence[Any]) -> None:
        for value in values:
            if type(value) in (list, tuple):
                self._note_others(value)
            elif type(value) in (nn.Parameter, torch.Tensor):
                self.met_state = True
                names = names_of_local(value)  # none: the model is not cut yet, or it is not of it
                self.met_others |= self._own.isdisjoint(names) if names else self._is_changing(value)

    def _note_written(self, value: Any) -> None:
        if isinstance(value, FakeTensor):
            self.written.add(value.untyped_storage()._cdata)
        elif isinstance(value, torch.Tensor):
            self.changes_outside = True
        elif isinstance(value, list | tuple):
            for each in value:
                self._note_written(each)

    def _note_statistics(self, schema: Any, args: tuple[Any, ...]) -> None:
        given = {argument.name: value for argument, value in zip(schema.arguments, args)}
        if not (given.get("training") or given.get("use_input_stats")):
            return
        for name in ("running_mean", "running_var"):
            statistics = given.get(name)
            if isinstance(statistics, torch.Tensor):
                self.written.add(statistics.untyped_storage()._cdata)
                self.only_passed.add(statistics.untyped_storage()._cdata)


def operator_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Floating point operations of one operator: torch's own counts, else one for each result element."""
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    if "flash_attention_for_cpu" in func.__name__ and "backward" not in func.__name__:
        query, key = args[0], args[1]
        return float(4 * query.numel() * key.shape[-2])
    first = result[0] if isinstance(result, tuple | list) and result else result
    return float(first.numel()) if isinstance(first, torch.Tensor) else 0.0
