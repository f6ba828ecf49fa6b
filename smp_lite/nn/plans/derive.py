"""A plan for a model that comes without one, of what is certainly safe: pairs of linear layers with nothing
but elementwise functions between them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from ...errors import SMPError
from ...record.describe.fake_mode import fake_mode
from .functions import ACTIVATIONS
from .source import words

__all__ = ["derive_plan"]


_ELEMENTWISE = words(
    """
    relu relu_ relu6 gelu silu silu_ mish elu celu selu leaky_relu hardswish hardsigmoid hardtanh softplus
    softsign tanhshrink softshrink hardshrink logsigmoid sigmoid tanh exp log1p expm1 erf sin cos square sqrt
    rsqrt abs neg clamp clip pow mul add sub div true_divide reciprocal sign
    __mul__ __rmul__ __add__ __radd__ __sub__ __rsub__ __truediv__ __pow__ __neg__
    to float type type_as contiguous clone
    """
)
"""Functions whose every output element depends on the input elements at its place alone."""

_SIZES = words("size numel nelement shape nbytes __len__")
_ABOUT = words("__get__ size dim numel is_floating_point element_size is_contiguous get_device")


def derive_plan(model: nn.Module) -> dict[str, str]:
    """A plan of the pairs that are safe: a Linear whose output goes only through elementwise functions into
    one other Linear, and with gates (``down(act(gate(x)) * up(x))``) all that meet there.

    Modules that hold such layers are run by themselves, on fake tensors; a Sequential is read. A Dropout
    between the two of a pair becomes ``local_dropout``. All else stays whole.

    Returns:
        Full names to styles, for :func:`~smp_lite.nn.plans.parallelize`.

    Raises:
        SMPError: nothing is safe.
    """
    plan: dict[str, str] = {}
    holders = _holders(model)
    for name, module in model.named_modules():
        if not any(isinstance(child, nn.Linear) for child in module.children()):
            continue
        found = _sequence(module) if isinstance(module, nn.Sequential) else _followed(module)
        full = {f"{name}.{child}" if name else child: style for child, style in found.items()}
        if all(
            holders[id(parameter)] == 1
            for each in found
            for parameter in module.get_submodule(each).parameters()
        ):
            plan.update(full)
    if not plan:
        raise SMPError(
            f"{type(model).__name__} has no pair of Linear layers with nothing but elementwise functions "
            "between them, so no plan can be derived that is certainly safe: give one, "
            '{"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}'
        )
    return plan


def _holders(model: nn.Module) -> dict[int, int]:
    """How many names each parameter has."""
    found: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)] = found.get(id(parameter), 0) + 1
    return found


def _is_plain(module: nn.Module) -> bool:
    """A Linear of torch's own, without hooks that would see a part."""
    hooked = (
        module._forward_hooks or module._forward_pre_hooks or nn.utils.parametrize.is_parametrized(module)
    )
    return type(module) is nn.Linear and not hooked


def _sequence(module: nn.Sequential) -> dict[str, str]:
    """Pairs in a Sequential, from the front; each layer is in one pair at most."""
    plan: dict[str, str] = {}
    first: str | None = None
    dropouts: list[str] = []
    for name, child in module._modules.items():
        if child is None:
            continue
        if _is_plain(child):
            if first is None:
                first, dropouts = name, []
            else:
                plan.update({first: "colwise", **dict.fromkeys(dropouts, "local_dropout"), name: "rowwise"})
                first = None
        elif type(child) is nn.Dropout and not child.inplace:
            dropouts.append(name)
        elif type(child) not in ACTIVATIONS:
            first = None
    return plan


# Other modules: run, and the values followed ----------------------------------------------------------------


def _followed(module: nn.Module) -> dict[str, str]:
    linears = {name: child for name, child in module.named_children() if _is_plain(child)}
    if len(linears) < 2 or type(module).forward is nn.Module.forward:
        return {}
    found: list[dict[str, str]] = []
    for width in dict.fromkeys(layer.in_features for layer in linears.values()):
        for shape in ((2, 3, width), (6, width)):
            with contextlib.suppress(Exception), _quiet():
                found += [_run(module, linears, shape, training=mode) for mode in (True, False)]
                break
    # Another input, another mode, another way through the code: what holds on all of them.
    if not found:
        return {}
    return {
        name: style for name, style in found[0].items() if all(other.get(name) == style for other in found)
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within: torch writes no traceback of an input that does not fit, which is only one of those tried."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _run(
    module: nn.Module, linears: dict[str, nn.Linear], shape: tuple[int, ...], *, training: bool
) -> dict[str, str]:
    follower = _Follower(module, linears)
    modes = {each: each.training for each in module.modules()}
    own = {each: dict(vars(each)) for each in module.modules()}
    try:
        with fake_mode(), follower.watching(), torch.no_grad():
            module.train(training)
            like = next(module.parameters())
            x = torch.empty(shape, dtype=like.dtype, device=like.device)
            with follower:
                output = module(x)
    finally:
        for each, mode in modes.items():
            vars(each).clear()
            vars(each).update(own[each])
            each.training = mode
    follower.leave(output)
    return follower.plan()


class _Follower(TorchFunctionMode):
    """Which Linear layers a value comes from, through elementwise functions alone."""

    def __init__(self, module: nn.Module, linears: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.names = {id(layer): name for name, layer in linears.items()}
        self.dropouts = {
            id(child): name for name, child in module.named_children() if type(child) is nn.Dropout
        }
        self.linears, self.module = linears, module
        self.sources: dict[int, frozenset[str]] = {}
        self.kept: list[Any] = []
        self.into: dict[str, set[str]] = {}
        self.through: dict[str, set[str]] = {}
        self.bad: set[str] = set()
        self.called: dict[str, int] = {}
        self.inside = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Sees calls of the layers, and of dropouts, as calls of modules."""
        handles = []
        for layer in self.module.children():
            if id(layer) in self.names or id(layer) in self.dropouts:
                handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(layer.register_forward_hook(self._exit))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inside += 1

    def _exit(self, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self.inside -= 1
        given = self._of(args)
        if id(layer) in self.dropouts:
            for source in given:
                self.through.setdefault(source, set()).add(self.dropouts[id(layer)])
            if given:
                self._mark(output, given)
            return
        name = self.names[id(layer)]
        self.called[name] = self.called.get(name, 0) + 1
        for source in given:
            self.into.setdefault(source, set()).add(name)
        self._mark(output, frozenset({name}))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.inside:
            return output
        given = self._of((args, kwargs))
        if given:
            name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
            if name in _ABOUT and not isinstance(output, torch.Tensor):
                if name in _SIZES or getattr(getattr(func, "__self__", None), "__name__", "") in _SIZES:
                    self.bad |= given  # a number that is made of it would be another one
                return output
            others = [
                leaf
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and id(leaf) not in self.sources and leaf.dim()
            ]
            if name == "dropout" or func is F.dropout:
                rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
                training = kwargs.get("training", args[2] if len(args) > 2 else True)
                if rate and (training or self.module.training):
                    self.bad |= given
                self._mark(output, given)
            elif name in _ELEMENTWISE and not others:
                self._mark(output, given)
            else:
                self.bad |= given
        return output

    def leave(self, output: Any) -> None:
        """What comes out of the module whole must not be a part."""
        self.bad |= self._of(output)

    def plan(self) -> dict[str, str]:
        plan: dict[str, str] = {}
        for sink in self.linears:
            sources = {source for source, sinks in self.into.items() if sink in sinks}
            group = [*sources, sink]
            safe = (
                sources
                and not sources & self.bad
                and all(self.into[source] == {sink} for source in sources)
                and all(self.called.get(name) == 1 for name in group)
                and len({self.linears[source].out_features for source in sources}) == 1
                and not any(name in plan for name in group)
                and self.linears[sink].in_features == self.linears[next(iter(sources))].out_features
            )
            if safe:
                dropouts = set().union(*(self.through.get(source, set()) for source in sources))
                plan.update(dict.fromkeys(sorted(sources), "colwise"))
                plan.update(dict.fromkeys(sorted(dropouts), "local_dropout"))
                plan[sink] = "rowwise"
        return plan

    def _of(self, values: Any) -> frozenset[str]:
        leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        return frozenset().union(*(self.sources.get(id(leaf), frozenset()) for leaf in leaves))

    def _mark(self, output: Any, sources: frozenset[str]) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.sources[id(leaf)] = sources
                self.kept.append(leaf)  # so that no other gets its id
