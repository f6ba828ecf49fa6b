"""What a call would return, found by running it on fake tensors.

:class:`MetadataInference` runs a module's ``forward`` or a torch function under torch's ``FakeTensorMode``
and describes the result: its structure, each tensor's metadata, which arguments it returns or changes in
place, from which arguments gradients reach it, whether it draws random numbers, its flops, and the bytes
that its backward would keep. The recorder caches the description.

A fake run leaves no trace: the attributes of the modules it passes through, buffers and parameters
included, are put back afterwards, and hooks do not fire. A call that cannot run on fake tensors (it looks
at data, an operator has no fake kernel, a hook may change the result) is reported as
:class:`NeedsRealRun`, and its owner runs it for real instead.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .calls import (
    Arguments,
    ChangedArgument,
    Constant,
    NewTensor,
    Repeated,
    ResultMeta,
    SameTensor,
)
from .placed import PlacedTensor, TensorMeta
from .structure import flatten


class NeedsRealRun(Exception):
    """The call cannot be described without its data; the reason is the text."""


class MutableArgument(ValueError):
    """A module stored tensors in an object that it was given."""


class MetadataInference:
    """Runs calls on fake tensors. One per process: fake tensors of one mode do not mix with another's."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def function(self, func: Callable[..., Any], arguments: Arguments) -> ResultMeta:
        """Describes ``func`` of the arguments. Errors of fake tensors pass through."""
        fakes = self._fakes(arguments.tensors)
        return self._run(lambda: func(*arguments.args(fakes), **arguments.kwargs(fakes)), fakes, set())

    def module(self, module: nn.Module, arguments: Arguments) -> ResultMeta:
        """Describes the module's forward; raises :class:`NeedsRealRun` where that is not possible."""
        reason = hook_reason(module)
        if reason is not None:
            raise NeedsRealRun(reason)
        fakes = self._fakes(arguments.tensors)
        with untouched(module):
            parameters = self.install_fakes(module)
            args, kwargs = arguments.args(fakes), arguments.kwargs(fakes)
            meta = self._run(lambda: module.forward(*args, **kwargs), fakes, parameters)
            _refuse_changed_objects(module, arguments)
        return meta

    def fake_arguments(self, arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with every tensor replaced by a fake one."""
        return arguments.build([given for _, given in self._fakes(arguments.tensors)])

    def _fakes(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each tensor argument a leaf to find again in the graph, and what the call is given."""
        fakes = []
        for tensor in tensors:
            meta = tensor.smp_meta if type(tensor) is PlacedTensor else TensorMeta.of(tensor)
            leaf = self._fake(meta)
            if meta.requires_grad:
                leaf.requires_grad_()
                with torch.inference_mode(False), torch.enable_grad(), self.mode:
                    # Not a leaf, so that the call may change it in place as it may the real one.
                    fakes.append((leaf, leaf.clone()))
            else:
                fakes.append((leaf, leaf))
        return fakes

    def _fake(self, meta: TensorMeta) -> torch.Tensor:
        with torch.inference_mode(False), self.mode:
            if not meta.stride and meta.shape:
                return torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)

    def install_fakes(self, module: nn.Module) -> set[int]:
        """Puts fake parameters and buffers in place; returns the storages of the parameters."""
        made: dict[int, torch.Tensor] = {}
        storages = set()
        for part in module.modules():
            for table in ("_parameters", "_buffers"):
                faked: dict[str, torch.Tensor | None] = {}
                for name, tensor in part.__dict__[table].items():
                    if tensor is None:
                        faked[name] = None
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = self._fake_state(tensor)
                        storages.add(made[id(tensor)].untyped_storage()._cdata)
                    faked[name] = made[id(tensor)]
                part.__dict__[table] = faked
            flat = part.__dict__.get("_flat_weights")
            if isinstance(flat, list):  # nn.RNNBase keeps a second list of its parameters
                part.__dict__["_flat_weights"] = [
                    part._parameters.get(name) for name in part.__dict__["_flat_weights_names"]
                ]
        return storages

    def _fake_state(self, tensor: torch.Tensor) -> torch.Tensor:
        meta = tensor.smp_meta if type(tensor) is PlacedTensor else TensorMeta.of(tensor)
        if meta.device.type == "meta":  # a model built without memory is planned as on the CPU
            meta = meta._replace(device=torch.device("cpu"))
        fake = self._fake(meta)
        return nn.Parameter(fake, requires_grad=True) if meta.requires_grad else fake

    def _run(
        self,
        call: Callable[[], Any],
        fakes: list[tuple[torch.Tensor, torch.Tensor]],
        parameters: set[int],
    ) -> ResultMeta:
        versions = [given._version if not given.is_inference() else 0 for _, given in fakes]
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> None:
            # The storage alone: a kept tensor, if it is an output, would be a circle that is never freed,
            # and a freed storage's address would soon be another's.
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                kept[storage._cdata] = storage

        watch = _Watch()
        python_state = random.getstate()
        try:
            with self.mode, watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                result = call()
        finally:
            python_drew = random.getstate() != python_state
            random.setstate(python_state)
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        describe = _Describer(fakes)
        described = tuple(describe.leaf(leaf) for leaf in leaves)
        changed = tuple(
            ChangedArgument(i, TensorMeta.of(given), describe.links(given))
            for i, (_, given) in enumerate(fakes)
            if (not given.is_inference() and given._version != versions[i])
        )
        return ResultMeta(
            spec=spec,
            leaves=described,
            changed=changed,
            draws=watch.draws or python_drew,
            flops=watch.flops,
            kept_bytes=sum(storage.nbytes() for storage in kept.values()),
        )


def describe_result(
    result: Any,
    given: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor | None],
    *,
    draws: bool,
) -> ResultMeta:
    """Describes the result of a real run.

    Args:
        result: what the call returned.
        given: the tensors it was given; those that have a leaf are fresh copies of it.
        leaves: for each of them its leaf in the graph, None for ordinary tensors.
        draws: whether it drew random numbers.

    Raises:
        ValueError: the call changed an ordinary tensor in place.
    """
    fakes = [(leaf if leaf is not None else tensor, tensor) for tensor, leaf in zip(given, leaves)]
    parts: list[Any] = []
    spec = flatten(result, parts)
    describer = _Describer(fakes)
    described = tuple(describer.leaf(part) for part in parts)
    changed = tuple(
        ChangedArgument(i, TensorMeta.of(tensor), describer.links(tensor))
        for i, (leaf, tensor) in enumerate(fakes)
        if leaf is not tensor and not tensor.is_inference() and tensor._version > 0
    )
    return ResultMeta(spec=spec, leaves=described, changed=changed, draws=draws)


class _Describer:
    """Turns result leaves into descriptions, relative to the fake arguments."""

    def __init__(self, fakes: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.by_identity = {id(given): i for i, (_, given) in enumerate(fakes)}
        self.by_leaf = {id(leaf): i for i, (leaf, _) in enumerate(fakes) if leaf.requires_grad}
        self.by_storage: dict[int, int] = {}
        for i, (_, given) in enumerate(fakes):
            if given.layout is torch.strided:
                self.by_storage.setdefault(given.untyped_storage()._cdata, i)
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
        self.seen[id(leaf)] = len(self.kept)
        self.kept.append(leaf)
        aliases = None
        if leaf.layout is torch.strided:
            aliases = self.by_storage.get(leaf.untyped_storage()._cdata)
        return NewTensor(TensorMeta.of(leaf), self.links(leaf), aliases)

    def links(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Tensor arguments that the autograd graph of ``tensor`` ends in."""
        if not tensor.requires_grad or tensor.grad_fn is None:
            return ()
        found, pending, visited = set(), [tensor.grad_fn], {tensor.grad_fn}
        while pending:
            node = pending.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self.by_leaf:
                found.add(self.by_leaf[id(variable)])
            for following, _ in node.next_functions:
                if following is not None and following not in visited:
                    visited.add(following)
                    pending.append(following)
        return tuple(sorted(found))


class _Watch(TorchDispatchMode):
    """Counts flops and notices random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False
        self.flops = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and _really_draws(func, args, kwargs):
            self.draws = True
        self.flops += operator_flops(func, args, kwargs, result)
        return result


def _really_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention kernels carry the tag although they draw only with dropout."""
    if "attention" not in func.__name__:
        return True
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args)) | kwargs
    return bool(values.get("dropout_p", 0.0))


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


def hook_reason(module: nn.Module) -> str | None:
    """Why the module's result cannot be told without running its hooks, or None."""
    for name, part in module.named_modules():
        for table in ("_forward_hooks", "_forward_pre_hooks"):
            if part.__dict__.get(table):
                return f"{name or type(module).__name__} has {table.strip('_').replace('_', ' ')}"
    return None


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Puts back every attribute of the module and its parts, one level into lists, dicts and sets."""
    saved = []
    for part in module.modules():
        attributes = dict(part.__dict__)
        contents = {
            name: value.copy()
            for name, value in attributes.items()
            if type(value) in (list, dict, set) and not name.startswith("_")
        }
        saved.append((part, attributes, contents))
    try:
        yield
    finally:
        for part, attributes, contents in saved:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            for name, content in contents.items():
                value = attributes[name]
                if type(value) is list:
                    value[:] = content
                else:
                    value.clear()
                    value.update(content)


def _refuse_changed_objects(module: nn.Module, arguments: Arguments) -> None:
    """A fake run must not leave fake tensors in an object of the caller's (a key/value cache)."""
    for leaf in arguments.leaves:
        if isinstance(leaf, torch.Tensor | nn.Module) or not hasattr(leaf, "__dict__"):
            continue
        if _holds_fake(leaf, depth=4):
            raise MutableArgument(
                f"{type(module).__name__} stores tensors in an argument of type {type(leaf).__name__}. "
                "Only the stage that runs the module would see them. Switch that off "
                "(for transformers models: use_cache=False), or return the tensors instead"
            )


def _holds_fake(value: Any, depth: int) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if depth == 0 or isinstance(value, torch.Tensor | nn.Module | type):
        return False
    if isinstance(value, dict):
        return any(_holds_fake(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_fake(item, depth - 1) for item in value)
    attributes = getattr(value, "__dict__", None)
    return bool(attributes) and any(_holds_fake(item, depth - 1) for item in attributes.values())
