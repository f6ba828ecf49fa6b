"""One call under ``torch.utils.checkpoint``: what it was given is kept, and backward runs it once more.

torch runs the function again for the backward and does not look whether it runs on the same numbers. Here it
does: arguments, parameters and buffers must be as they were, as autograd itself asks of what it keeps.
Attributes of modules (the training flag among them) and the tensors that are their buffers are put back for
the second run where others have taken their place.
What the function itself changes would be changed twice. The running statistics of a norm, on which its own
result does not depend while it trains, are changed the first time alone, and so are attributes; anything else
is refused. Python's and numpy's random numbers are drawn again as torch's are, and those of generators that
can be reached from the module: attributes, what containers hold, and globals of its forward.

What is kept may be handed to a *keeper* (:func:`kept_by`), which gives it back when backward asks.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ...errors import SMPError
from ..parameters.tables import plain_table
from ..state.python_state import PythonState
from ..state.random_state import all_states, kept, put_back_states, taken_states
from ..values.calls import Arguments

__all__ = ["Keeper", "changed_since", "kept_by", "recomputed"]

_MISSING = object()
_Generator = torch.Generator | random.Random
_TABLES = frozenset(nn.Module().__dict__) - {"training"}


class Keeper(Protocol):
    """Keeps inputs of checkpointed calls between forward and backward."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Takes one over; returns what stands for it."""
        ...

    def unpack(self, packed: Any) -> torch.Tensor:
        """The same numbers, for backward."""
        ...


_keeper: Keeper | None = None
_last_states: tuple[Any, Any] | None = None


@contextlib.contextmanager
def kept_by(keeper: Keeper) -> Iterator[None]:
    """Within: the keeper gets what checkpointed calls are given."""
    global _keeper
    before, _keeper = _keeper, keeper
    try:
        yield
    finally:
        _keeper = before


def recomputed(
    forward: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
) -> Any:
    """``forward(*args, **kwargs)`` of a module, of which only the arguments are kept.

    Raises:
        SMPError: it changes what it is given, or a buffer; in backward: something has changed since.
    """
    arguments = Arguments.of(args, kwargs)
    reads = _Reads(module, arguments.tensors, draws_again=preserve_rng_state)
    states = _states_now() if preserve_rng_state else None

    first = [(args, kwargs)]  # the caller's own lists and dicts

    def function(*tensors: torch.Tensor) -> Any:
        if first:
            given, options = first.pop()
            with reads.first():
                return forward(*given, **options)
        given, options = arguments.build(tensors)
        with reads.again(), _drawing_from(states):
            return forward(*given, **options)

    tensors = tuple(arguments.tensors)
    arguments.forget(range(len(tensors)))
    # Inside another checkpoint nothing is kept; a keeper would only confuse its books.
    is_outermost = torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if _keeper is not None and is_outermost:
        hooks = saved_tensors_hooks(_keeper.pack, _keeper.unpack)
    with hooks:
        return checkpoint(
            function,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=False,  # the streams of the device are among ours
        )


def _states_now() -> tuple[Any, ...]:
    """Where the processor's random streams are; the same object as before where nobody has drawn since."""
    global _last_states
    now = all_states()
    if _last_states is None or _last_states[0] != now:
        _last_states = (now, taken_states())
    return _last_states[1]


@contextlib.contextmanager
def _drawing_from(states: tuple[Any, ...] | None) -> Iterator[None]:
    """Within: all random streams go on from there."""
    if states is None:
        yield
        return
    with kept():
        put_back_states(states)
        yield


class _Reads:
    """What a call reads, and whether it is the same when it runs again."""

    def __init__(self, module: nn.Module, given: list[torch.Tensor], *, draws_again: bool) -> None:
        self._module = module
        # Autograd keeps the arguments, or a keeper does.
        self._given = [
            (f"its argument {i}", weakref.ref(tensor), tensor._version)
            for i, tensor in enumerate(given)
            if _has_version(tensor)
        ]
        self._state: list[tuple[str, torch.Tensor, int]] = []
        self._norms: list[tuple[dict[str, Any], str]] = []  # tables of buffers, and names in them
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []  # tables, and what was in them
        self._generators: dict[int, tuple[_Generator, Any]] = {}  # and where they were
        for path, part in module.named_modules():
            namespace = part.__dict__
            attributes = {key: value for key, value in namespace.items() if key not in _TABLES}
            self._attributes.append((namespace, attributes))
            if draws_again:
                found = [value for value in attributes.values() if isinstance(value, _Generator)]
                found += _reachable_generators(part)
                self._generators |= {id(each): (each, _state_of(each)) for each in found}
            buffers = plain_table(part._buffers)
            if buffers:
                self._buffers.append((buffers, dict(buffers)))
            counts = isinstance(part, _NormBase) and part.training
            for table, is_norms in ((part._parameters, False), (plain_table(part._buffers), counts)):
                for name, tensor in table.items():
                    if is_norms and tensor is not None:
                        self._norms.append((table, name))
                    elif _has_version(tensor):
                        self._state.append((f"{path}.{name}".lstrip("."), tensor, tensor._version))

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        yield
        if (name := self._changed()) is not None:
            raise SMPError(
                f"smp.set_activation_checkpointing: a call of {type(self._module).__name__} changes {name}, "
                "and would do so again when backward computes it once more: leave it out"
            )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if (name := self._changed()) is not None:
            raise changed_since(f"{name} of {type(self._module).__name__}")
        now = [(table, dict(table)) for table, _ in self._buffers]
        generators = [(each, _state_of(each)) for each, _ in self._generators.values()]
        for table, before in self._buffers:
            _fill(table, before)
        for table, name in self._norms:
            dict.__setitem__(table, name, table[name].clone())
        for each, state in self._generators.values():
            _put_state(each, state)
        try:
            with self._attributes_as_they_were():
                yield
        finally:
            for table, content in now:
                _fill(table, content)
            for each, state in generators:
                _put_state(each, state)

    @contextlib.contextmanager
    def _attributes_as_they_were(self) -> Iterator[None]:
        now = [
            (namespace, {key: value for key, value in namespace.items() if key not in _TABLES})
            for namespace, _ in self._attributes
        ]
        for namespace, attributes in self._attributes:
            _put(namespace, attributes)
        try:
            yield
        finally:
            for namespace, attributes in now:
                _put(namespace, attributes)

    def _changed(self) -> str | None:
        for name, reference, version in self._given:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                return name
        return next((name for name, tensor, version in self._state if tensor._version != version), None)


_reached: weakref.WeakKeyDictionary[nn.Module, tuple[_Generator, ...]] = weakref.WeakKeyDictionary()


def _reachable_generators(part: nn.Module) -> tuple[_Generator, ...]:
    """Those that a module's containers and objects hold, and globals that its forward names.

    Looked for once in the life of a module: it takes longer than a call.
    """
    found = _reached.get(part)
    if found is None:
        state = PythonState(lambda value: isinstance(value, nn.Module) and value is not part)
        state.add(part, "")
        forward = getattr(type(part).forward, "__wrapped__", type(part).forward)
        code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
        for name in code.co_names if code is not None else ():
            state.add(names.get(name), name)
        found = _reached[part] = tuple(g for g in state.generators() if isinstance(g, _Generator))
    return found


def _fill(table: dict[str, Any], content: dict[str, Any]) -> None:
    """Makes a table hold that, without anybody hearing of it."""
    dict.clear(table)
    dict.update(table, content)


def _state_of(generator: _Generator) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put_state(generator: _Generator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _put(namespace: dict[str, Any], attributes: dict[str, Any]) -> None:
    """Makes the attributes those, tables of tensors and modules apart."""
    for key in [key for key in namespace if key not in _TABLES and key not in attributes]:
        del namespace[key]
    for key, value in attributes.items():
        if namespace.get(key, _MISSING) is not value:
            namespace[key] = value


def changed_since(what: str) -> SMPError:
    """Something is no longer as it was when a checkpointed call ran."""
    return SMPError(
        f"smp.set_activation_checkpointing: {what} has changed between the call and its backward, which "
        "computes it once more: change it after the step"
    )


def _has_version(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()
