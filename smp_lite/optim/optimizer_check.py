"""Whether an optimizer looks at all parameters at once; then it cannot work on one stage's.

``DistributedOptimizer`` lets each rank step the parameters of its stage. That equals one process for
optimizers that treat every parameter by itself, as all of ``torch.optim`` do but LBFGS. One that clips by the
norm of all gradients, or estimates one step size for the whole model (D-Adaptation, Prodigy, SAM, LAMB with
``max_grad_norm``), would compute something else on every stage, and nobody would see it. So would one that
draws random numbers (Langevin dynamics), which each rank would draw for its own parameters alone.

Nothing in a class says which kind it is, so an unknown one is tried out: a copy of it steps a few small
tensors together, and more copies step each of them alone, from the same starts and along the same losses,
which are sums over the tensors. If the tensors end at different places, it looks across them.

Where parameters are split over the ranks of a stage, each rank steps its part, and that equals one process
for optimizers that treat every element by itself. So the tensors are also stepped in halves: Adafactor, Muon
and LAMB end at other places than with the whole. Pieces of sharded parameters have one dimension, so one that
asks for the number of dimensions is found out as well. Some look at whole tensors only where these are large
(Adafactor of other libraries from 128 rows and columns on, optimizers of 8 bits in blocks), so halves are
tried with larger tensors, too.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_hooks

from ..devices import CPU
from ..errors import SMPError
from ..nn.layout import is_sharded, layout_of

__all__ = ["check_optimizer", "check_pieces"]

NUM_STEPS = 12
_MOST_PER_KIND = 2  # small tensors for each group and number of dimensions
_MOST = 6
_LONGEST = 4  # of a small tensor's dimensions
_LARGE = 2**16  # elements: of two dimensions each is 128 or more, of one it is several blocks
_TOLERANCE = 1e-4
_SMALLEST_RATE = 1e-3

_TORCHS_OWN = {
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.LBFGS
}

_BY_ELEMENT = {
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
    torch.optim.Rprop,
}

_warned: set[type] = set()


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that looks at all parameters at once; warns once where that cannot be told.

    Leaves no trace: the optimizer, random streams and hooks are as before.

    Raises:
        SMPError: it does; or it looks at a whole parameter, and some are split over ranks.
    """
    kind = type(optimizer)
    if kind not in _BY_ELEMENT and any(layout_of(p) for g in optimizer.param_groups for p in g["params"]):
        _check_within(optimizer, "split or sharded parameters")
    if kind in _TORCHS_OWN:
        return
    way_out = (
        "each stage would compute something else. Use one that treats each parameter by itself, as those of "
        "torch.optim do but LBFGS (for a limit on the whole gradient: torch.nn.utils.clip_grad_norm_ before "
        "step()), or partitions=1"
    )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SMPError(
            f"{kind.__name__} over several partitions: it looks at all parameters at once, so {way_out}"
        )
    try:
        with _no_trace(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            looks_across = _looks_across(optimizer)
    except _Draws:
        raise SMPError(
            f"{kind.__name__} over several partitions: its step() draws random numbers, which each rank "
            "would draw for its own parameters only, and so others than one process. Draw them in the script "
            "between step and optimizer.step(), for instance into the gradients; or use partitions=1"
        ) from None
    except _CannotTell as reason:
        if kind not in _warned:
            _warned.add(kind)
            warnings.warn(
                f"whether {kind.__name__} treats each parameter by itself could not be found out ({reason}). "
                "If it looks at all of them at once (a norm over all gradients, one step size for all), "
                "training over several partitions differs from one process",
                stacklevel=3,
            )
        return
    if looks_across:
        raise SMPError(
            f"{kind.__name__} over several partitions: tried on a few small tensors, it steps them otherwise "
            f"together than one by one, so it looks at all parameters at once, and {way_out}"
        )


def check_pieces(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that cannot step each parameter in flat pieces; leaves no trace.

    Raises:
        SMPError: it looks at a whole parameter, or whether it does could not be found out.
    """
    if type(optimizer) not in _BY_ELEMENT:
        _check_within(optimizer, "shard_optimizer_state", in_pieces=True)


def _check_within(optimizer: torch.optim.Optimizer, what: str, *, in_pieces: bool = False) -> None:
    kind = type(optimizer)
    way_out = (
        "the parts of a parameter that is split over ranks would be stepped otherwise than the whole. Use "
        "one that treats every element by itself, as Adam, AdamW and SGD do"
    )
    try:
        with _no_trace(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            looks_within = _looks_within(optimizer, in_pieces)
    except _CannotTell as reason:
        raise SMPError(
            f"{kind.__name__} with {what}: whether it treats every element by itself could not be found out "
            f"({reason}), and if not, {way_out}"
        ) from None
    if looks_within:
        raise SMPError(
            f"{kind.__name__} with {what}: tried on small tensors, it steps them "
            f"otherwise in halves than whole, so {way_out}"
        )


class _CannotTell(Exception):
    """The trial did not run, or its result says nothing; the text says why."""


class _Draws(Exception):
    """It has drawn random numbers."""


@dataclass(frozen=True)
class _Chosen:
    """A parameter that is tried out, and where the tensor that takes its place begins."""

    parameter: torch.Tensor
    start: torch.Tensor


@dataclass(frozen=True)
class _Trial:
    """What a copy of the optimizer made of its tensors.

    Attributes:
        ends: the tensors after the last step.
        evaluations: of the closure, if it asked for one.
    """

    ends: list[torch.Tensor]
    evaluations: int


def _looks_across(optimizer: torch.optim.Optimizer) -> bool:
    chosen = _choose(optimizer)
    if len(chosen) < 2:
        return False
    before = _random_state()
    failure: Exception | None = None
    for with_closure in (False, True):
        try:
            together = _run(optimizer, chosen, range(len(chosen)), with_closure)
            alone = [_run(optimizer, chosen, [i], with_closure) for i in range(len(chosen))]
        except _CannotTell:
            raise
        except Exception as error:  # whatever a foreign class raises
            failure = failure or error
            continue
        if with_closure and not together.evaluations:
            break  # it has failed without one, and makes nothing of it
        same = all(
            one.evaluations == together.evaluations and _same(one.ends[0], together.ends[i], chosen[i].start)
            for i, one in enumerate(alone)
        )
        if _random_state() != before:
            raise _Draws
        return not same
    raise _CannotTell(f"{type(failure).__name__}: {failure}")


def _looks_within(optimizer: torch.optim.Optimizer, in_pieces: bool) -> bool:
    """Whether it steps a tensor otherwise than its halves, along any dimension."""
    failure: Exception | None = None
    for with_closure in (False, True):
        try:
            return any(
                _differs_in_halves(optimizer, chosen, i, in_pieces, with_closure)
                for chosen in (_choose(optimizer), _choose(optimizer, _large_shape))
                for i in range(len(chosen))
            )
        except Exception as error:  # whatever a foreign class raises
            failure = failure or error
    raise _CannotTell(f"{type(failure).__name__}: {failure}")


def _differs_in_halves(
    optimizer: torch.optim.Optimizer, chosen: list[_Chosen], i: int, in_pieces: bool, with_closure: bool
) -> bool:
    def end(cut: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> torch.Tensor:
        trial = _run(optimizer, chosen, [i], with_closure, cut)
        if with_closure and not trial.evaluations:
            raise RuntimeError("it makes nothing of a closure")
        return trial.ends[0]

    start = chosen[i].start
    whole = end()
    if (in_pieces or is_sharded(chosen[i].parameter)) and start.numel() > 1:
        pieces = [end(_piece(at)) for at in (0, 1)]
        if not _same(torch.cat(pieces), whole.reshape(-1), start.reshape(-1)):
            return True
    return any(
        not _same(torch.cat([end(_half(dim, which)) for which in (0, 1)], dim), whole, start)
        for dim in range(whole.ndim)
        if whole.shape[dim] > 1
    )


def _half(dim: int, which: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.tensor_split(2, dim)[which]


def _piece(which: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.reshape(-1).tensor_split(2)[which]


def _shape_of(parameter: torch.Tensor) -> torch.Size:
    """Of the whole parameter, where it lies in pieces: an optimizer may ask for the number of dimensions."""
    layout = layout_of(parameter)
    return parameter.shape if layout is None or layout.flat is None else torch.Size(layout.shape)


def _small_shape(shape: torch.Size) -> list[int]:
    return [min(size, _LONGEST) for size in shape]


def _large_shape(shape: torch.Size) -> list[int]:
    """That of the parameter, the longest dimension halved until it is small enough to be tried."""
    sizes = list(shape)
    while math.prod(sizes) > _LARGE:
        longest = sizes.index(max(sizes))
        sizes[longest] = -(-sizes[longest] // 2)
    return sizes


def _choose(
    optimizer: torch.optim.Optimizer, shape: Callable[[torch.Size], list[int]] = _small_shape
) -> list[_Chosen]:
    """A few of its parameters, of every group and number of dimensions."""
    chosen: list[_Chosen] = []
    for group in optimizer.param_groups:
        count: defaultdict[int, int] = defaultdict(int)
        for parameter in group["params"]:
            whole = _shape_of(parameter)
            if count[len(whole)] < _MOST_PER_KIND and parameter.numel() and len(chosen) < _MOST:
                count[len(whole)] += 1
                chosen.append(_Chosen(parameter, _start(parameter.dtype, shape(whole), len(chosen))))
    return chosen


def _start(dtype: torch.dtype, shape: list[int], number: int) -> torch.Tensor:
    wide = dtype in (torch.float32, torch.float64) or dtype.is_complex
    values = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device=CPU)
    small = 0.02 * torch.sin(values * (number + 1)) + 0.01 * (number + 1)
    return small.reshape(shape).to(dtype if wide else torch.float32)


def _slope(start: torch.Tensor, number: int, step_index: int) -> torch.Tensor:
    """Of a tensor's own loss, as different from the others' as can be.

    Each grows or shrinks at a rate of its own, so that limits on norms are passed at other times. Every other
    one keeps its direction, from which estimated step sizes grow, and the others turn back and forth.
    """
    rate = (1.0, 3.0, 0.5, 2.0, 0.8, 1.5)[number]
    sign = -1 if number % 2 and step_index // 2 % 2 else 1
    values = torch.arange(start.numel(), dtype=torch.float64, device=CPU).reshape(start.shape)
    return (sign * 0.05 * (number + 1) * rate**step_index * (1.5 + torch.cos(values))).to(start.dtype)


def _run(
    optimizer: torch.optim.Optimizer,
    chosen: Sequence[_Chosen],
    members: Sequence[int],
    with_closure: bool,
    cut: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> _Trial:
    """Steps a copy of the optimizer over some of the small tensors, or over what ``cut`` leaves of them.

    The loss of each is ``slope * (p + p**2 / 2)``: its gradient depends on where the tensor is, so
    that optimizers which look around before they step show it.
    """
    small = {i: nn.Parameter(cut(chosen[i].start).clone()) for i in members}
    slopes = [{i: cut(_slope(chosen[i].start, i, at)) for i in members} for at in range(NUM_STEPS)]
    trial = _copy(optimizer, {id(chosen[i].parameter): parameter for i, parameter in small.items()})
    step = _bare_step(trial)
    if callable(train := getattr(type(trial), "train", None)):
        train(trial)  # schedule-free ones want to be told
    evaluations = 0
    for step_index in range(NUM_STEPS):

        def evaluate(step_index: int = step_index) -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            loss = torch.zeros((), dtype=torch.float64, device=CPU)
            for i, parameter in small.items():
                slope = slopes[step_index][i]
                at = parameter.detach()
                parameter.grad = slope * (1 + at)
                loss = loss + (slope * (at + at * at / 2)).abs().sum().double()
            return loss.float()

        if with_closure:
            step(trial, evaluate)
        else:
            evaluate()
            step(trial)
    return _Trial([small[i].detach() for i in members], evaluations)


def _copy(optimizer: torch.optim.Optimizer, small: dict[int, nn.Parameter]) -> torch.optim.Optimizer:
    """The same class with the same settings over other parameters, and nothing else shared.

    Args:
        optimizer: to copy; its state must be empty where it matters, since that is not copied.
        small: takes a parameter's place, by the parameter's id; the others are left out.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Where else the optimizer keeps it: one without a gradient, which is not stepped.
            if id(parameter) in small:
                memo[id(parameter)] = small[id(parameter)]
            else:
                memo[id(parameter)] = nn.Parameter(torch.zeros((1,) * parameter.ndim, device=CPU))
    return _copied(optimizer, small, memo)


def _copied(
    optimizer: torch.optim.Optimizer, small: dict[int, nn.Parameter], memo: dict[int, Any]
) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = made
    groups = []
    for group in optimizer.param_groups:
        if id(group) not in memo:
            members = [small[id(p)] for p in group["params"] if id(p) in small]
            settings = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
            rate = settings.get("lr")
            if isinstance(rate, float | int | torch.Tensor) and rate < _SMALLEST_RATE:
                settings["lr"] = _SMALLEST_RATE  # a schedule that warms up begins at 0, which moves nothing
            names = {"param_names": [str(i) for i in range(len(members))]} if "param_names" in group else {}
            memo[id(group)] = {**settings, **names, "params": members}
        if memo[id(group)]["params"]:
            groups.append(memo[id(group)])
    memo.setdefault(id(optimizer.param_groups), groups)
    memo.setdefault(id(optimizer.state), defaultdict(dict))
    for name, value in vars(optimizer).items():
        if isinstance(value, nn.Module):
            raise _CannotTell(f"it holds a model, as {name}")
        if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            _copied(value, small, memo)
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(made)[name] = OrderedDict()
        elif not (callable(value) and hasattr(type(optimizer), name)):  # a scheduler's wrapper of step
            vars(made)[name] = copy.deepcopy(value, memo)
    return made


def _bare_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's own step, without torch's wrapper that calls hooks and the profiler."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _same(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> bool:
    """Whether both went the same way, but for rounding (a class may compute several tensors in one)."""
    finite = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return False
    moved = (one - start)[finite].abs()
    apart = (one - other)[finite].abs()
    return not apart.numel() or bool(apart.max() <= _TOLERANCE * moved.max())


# No trace ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_trace() -> Iterator[None]:
    """Random streams and the hooks that are called at every optimizer's step are put back; no output."""
    state = _random_state()
    hooks = [(table, dict(table)) for table in _global_hooks()]
    for table, _ in hooks:
        table.clear()
    try:
        with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for table, entries in hooks:
            table.update(entries)
        _set_random_state(state)


def _global_hooks() -> list[dict[int, Any]]:
    return [torch_hooks._global_optimizer_pre_hooks, torch_hooks._global_optimizer_post_hooks]


def _random_state() -> tuple[Any, ...]:
    """Of torch, Python and, if it is loaded, numpy; comparable."""
    numpy = sys.modules.get("numpy")
    numpys = None
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        numpys = (name, tuple(keys.tolist()), *rest)
    return bytes(torch.get_rng_state().tolist()), random.getstate(), numpys


def _set_random_state(state: tuple[Any, ...]) -> None:
    torchs, pythons, numpys = state
    torch.set_rng_state(torch.tensor(list(torchs), dtype=torch.uint8, device=CPU))
    random.setstate(pythons)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)
