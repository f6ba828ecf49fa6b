"""What is asked of gradient norms in the library and in plain torch: one step of training, then every way
to spell a norm, from the same gradients.

``torch.nn.utils`` is imported here before any session is open, as scripts and other libraries do.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import smp_lite as smp
from tests.models import split_batch
from tests.transparency.comparison import NUM_MICROBATCHES, place
from tests.transparency.training.replicas import half

__all__ = ["SPELLINGS", "ask_all", "everything"]

WIDTH = 6


class Block(nn.Module):
    """A layer that computes in a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.to(self.dtype))).to(torch.float32)


class Net(nn.Module):
    """Three dtypes, a shared weight, a frozen and an unused parameter, and one that the root holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64, torch.float32)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks[3].linear.weight = self.blocks[0].linear.weight
        self.blocks[1].linear.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


STAGES = {
    "blocks.0": 0,
    "blocks.1": 1,
    "blocks.2": 0,
    "blocks.3": 0,
    "blocks.4": 1,
    "blocks.5": 1,
    "head": 1,
    "unused": 1,
}
STAGES |= {f"blocks.{i}.linear": STAGES[f"blocks.{i}"] for i in range(6)}
SPREAD = {name: 2 * stage for name, stage in STAGES.items()}
"""Of three stages the middle one is empty."""
MANUAL = {"auto_partition": False, "default_partition": 0}


def batch(step_index: int = 0, samples: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step_index)
    return {"x": torch.randn(samples, WIDTH, generator=generator)}


def loss_of(output: Tensor) -> Tensor:
    return 40 * output.square().mean()


@dataclass
class Subject:
    """A model in training: the library's, or a plain one.

    Attributes:
        model: what the script calls, the wrapper.
        module: the user's own.
        optimizer: three groups: weights, the rest, and what is not the model's.
        kept: a list of the parameters that was made before the first step.
        local: this process's own parameters.
        foreign: a parameter in that optimizer that is not the model's, alike on all ranks, with a gradient.
        loose: another one, in no optimizer.
        clip: ``smp.clip_grad_norm_``, or torch's.
    """

    model: Any
    module: Net
    optimizer: Any
    kept: list[nn.Parameter]
    local: Callable[[], Iterable[nn.Parameter]]
    foreign: nn.Parameter
    loose: nn.Parameter
    clip: Callable[..., Tensor]

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """What this process holds, by name."""
        held = {id(parameter) for parameter in self.local()}
        return {name: p for name, p in self.module.named_parameters() if id(p) in held}


def groups_of(module: nn.Module, foreign: nn.Parameter) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "lr": 0.01},
        {"params": [foreign]},
    ]


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def foreign() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([0.3, 2.0, -7.0])
    return parameter


def plain_subject() -> Subject:
    net, other, loose = build(), foreign(), foreign()
    optimizer = torch.optim.AdamW(groups_of(net, other), lr=0.05)
    return Subject(net, net, optimizer, list(net.parameters()), net.parameters, other, loose, clip_grad_norm_)


def plain_backward(net: nn.Module, inputs: dict[str, Tensor]) -> None:
    for part in split_batch(inputs, NUM_MICROBATCHES):
        (loss_of(net(part["x"])) / NUM_MICROBATCHES).backward()


@smp.step
def train(model: Any, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    model.backward(loss)
    return loss


def smp_subject(stages: dict[str, int] = STAGES) -> Subject:
    """In the session that is open, with manual placement; nothing has run yet."""
    net, other, loose = build(), foreign(), foreign()
    model = smp.DistributedModel(net)
    if smp.state.num_stages > 1:
        place(net, stages)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(net, other), lr=0.05))
    return Subject(
        model,
        net,
        optimizer,
        list(net.parameters()),
        model.local_parameters,
        other,
        loose,
        smp.clip_grad_norm_,
    )


# Ways to spell a norm ---------------------------------------------------------------------------------------


def _clip(items: Any, **options: Any) -> Tensor:
    return clip_grad_norm_(items, 1.5, **options)


def _with_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _total_then_clip(subject: Subject) -> Tensor:
    total = get_total_norm(_gradients(subject.model.parameters()))
    clip_grads_with_norm_(subject.model.parameters(), 1.5, total)
    return total


def _deprecated(subject: Subject) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.clip_grad_norm(subject.model.parameters(), 1.5)


SPELLINGS: dict[str, Callable[[Subject], Any]] = {
    "wrapped model": lambda s: _clip(s.model.parameters()),
    "by the module": lambda s: torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.5),
    "by the file": lambda s: torch.nn.utils.clip_grad.clip_grad_norm_(s.model.parameters(), 1.5),
    "by its old name": _deprecated,
    "get_module": lambda s: _clip(list(s.module.parameters())),
    "by smp": lambda s: s.clip(s.model.parameters(), 1.5),
    "local": lambda s: _clip(s.local()),
    "local with gradients": lambda s: _clip(_with_gradients(s.local())),
    "all groups": lambda s: _clip(p for g in s.optimizer.param_groups for p in g["params"]),
    "each group": lambda s: [_clip(g["params"]) for g in s.optimizer.param_groups],
    "each group's gradients": lambda s: [
        get_total_norm(_gradients(g["params"])) for g in s.optimizer.param_groups
    ],
    "kept": lambda s: _clip(s.kept),
    "kept, reversed": lambda s: _clip(s.kept[::-1]),
    "kept, twice": lambda s: _clip([*s.kept, *s.kept[:3]]),
    "with gradients": lambda s: _clip(_with_gradients(s.model.parameters())),
    "gradients": lambda s: get_total_norm(_gradients(s.model.parameters())),
    "gradients of the local": lambda s: get_total_norm(_gradients(s.local())),
    "detached gradients": lambda s: get_total_norm([g.detach() for g in _gradients(s.kept)]),
    "total, then clip": _total_then_clip,
    "norm only": lambda s: clip_grad_norm_(s.model.parameters(), math.inf),
    "one module": lambda s: _clip(s.module.blocks[4].parameters()),
    "one module's with gradients": lambda s: _clip(_with_gradients(s.module.blocks[2].parameters())),
    "one module's gradients": lambda s: get_total_norm(_gradients(s.module.head.parameters())),
    "a split module": lambda s: _clip(s.module.blocks.parameters()),
    "by size": lambda s: _clip([p for p in s.module.parameters() if p.ndim == 1]),
    "one tensor": lambda s: _clip(s.module.head.weight),
    "one tensor, kept": lambda s: _clip(s.kept[1]),
    "each tensor": lambda s: [_clip(p) for p in s.module.parameters()],
    "the unused": lambda s: _clip(s.module.unused.parameters()),
    "weights": lambda s: get_total_norm(s.model.parameters()),
    "weights, kept": lambda s: get_total_norm(s.module.head.parameters()),
    "with another model's": lambda s: _clip([*s.module.parameters(), s.foreign]),
    "another model's first": lambda s: _clip([s.foreign, *s.module.parameters()]),
    "another model's between": lambda s: _clip([*s.kept[:4], s.foreign, *s.kept[4:]]),
    "local with another model's": lambda s: _clip([*s.local(), s.foreign]),
    "another model's gradients among them": lambda s: get_total_norm(
        [*_gradients(s.kept), *_gradients([s.foreign])]
    ),
    "another model's only": lambda s: _clip(s.foreign),
    "a loose one only": lambda s: _clip([s.loose]),
    "a loose one's gradient only": lambda s: get_total_norm([s.loose.grad]),
    "with a loose one": lambda s: _clip([s.loose, *s.kept]),
    "nothing": lambda s: _clip([]),
    "value": lambda s: clip_grad_value_(s.model.parameters(), 0.01),
    "value, local": lambda s: clip_grad_value_(s.local(), 0.01),
} | {
    f"norm {norm_type}, foreach {foreach}": (
        lambda s, options={"norm_type": norm_type, "foreach": foreach}: _clip(s.model.parameters(), **options)
    )
    for norm_type in (2, 1, math.inf, "inf", 0.5, -math.inf, 3, 0, 2.5)
    for foreach in (None, True, False)
}


def asked(subject: Subject, spelling: str) -> tuple[Any, dict[str, Tensor | None]]:
    """The answer, and what then is in the gradients; afterwards they are as before."""
    parameters = {**subject.own, "foreign": subject.foreign, "loose": subject.loose}
    before = {name: p.grad for name, p in parameters.items()}
    for name, parameter in parameters.items():
        gradient = before[name]
        parameter.grad = None if gradient is None else gradient.clone()
    answer = SPELLINGS[spelling](subject)
    after = {name: parameter.grad for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = before[name]
    return answer, after


def same(ours: Any, plain: Any) -> bool:
    """To the bit; NaN equals NaN."""
    if isinstance(ours, list) and isinstance(plain, list):
        return len(ours) == len(plain) and all(map(same, ours, plain))
    if not isinstance(ours, Tensor) or not isinstance(plain, Tensor):
        return ours is plain
    return (
        ours.dtype == plain.dtype
        and ours.shape == plain.shape
        and ours.device == plain.device
        and torch.equal(ours.nan_to_num(nan=123.0), plain.nan_to_num(nan=123.0))
    )


def ask_all(ours: Subject, plain: Subject, spellings: Iterable[str] = SPELLINGS) -> list[str]:
    """The spellings whose answers or clipped gradients differ."""
    wrong = []
    for spelling in spellings:
        answer, gradients = asked(ours, spelling)
        wanted, wanted_gradients = asked(plain, spelling)
        if not same(answer, wanted):
            wrong.append(f"{spelling}: {answer} for {wanted}")
        wrong += [
            f"{spelling}: gradient of {name}"
            for name, gradient in gradients.items()
            if not same(gradient, wanted_gradients[name])
        ]
    return wrong


def everything(stages: dict[str, int] = STAGES) -> list[str]:
    """All spellings before and after the first step, in the session that is open."""
    plain, ours = plain_subject(), smp_subject(stages)
    wrong = [f"before the first step, {found}" for found in ask_all(ours, plain, BEFORE)]
    plain_backward(plain.module, batch())
    train(ours.model, **batch())
    wrong += ask_all(ours, plain)
    for subject in (plain, ours):
        for name, gradient in subject.own.items():
            if name == "blocks.4.linear.weight" and gradient.grad is not None:
                gradient.grad[0, 0] = math.inf
    wrong += [f"with an infinity, {found}" for found in ask_all(ours, plain)]
    return wrong


BEFORE = ("wrapped model", "gradients", "weights", "kept", "with another model's", "nothing")
"""Without any gradient ``clip_grad_value_`` is an error of torch's."""


def many_in_one_dtype(in_memory: bool = False) -> list[str]:
    """So many gradients that the order in which their norms are summed shows in the last bit."""
    if not in_memory:
        smp.init()

    def chain() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(30)))

    plain, net = chain(), chain()
    model = smp.DistributedModel(net)
    place(net, {name: int(name.partition(".")[0]) // 2 % 2 for name, _ in net.named_modules() if name})
    kept, its_kept = list(net.parameters()), list(plain.parameters())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(groups_of(net, foreign()), lr=0.1))
    plain_optimizer = torch.optim.SGD(groups_of(plain, foreign()), lr=0.1)
    loose = foreign()
    ours = Subject(model, net, optimizer, kept, model.local_parameters, loose, loose, smp.clip_grad_norm_)
    theirs = Subject(
        plain,
        plain,
        plain_optimizer,
        its_kept,
        plain.parameters,
        loose,
        loose,
        clip_grad_norm_,
    )
    wrong = []
    for step_index in range(6):
        model.zero_grad()
        plain.zero_grad()
        plain_backward(plain, batch(step_index))
        train(model, **batch(step_index))
        spellings = ("wrapped model", "local", "gradients", "kept, reversed", "all groups", "each group")
        wrong += [f"step {step_index}, {found}" for found in ask_all(ours, theirs, spellings)]
    return wrong


# What ranks run ---------------------------------------------------------------------------------------------


def everything_on_ranks(stages: dict[str, int] = STAGES) -> list[str]:
    smp.init()
    return everything(stages)


def training(num_steps: int, replicas: int = 1) -> list[str]:
    """Steps with clipping, against plain replicas that average their gradients."""
    smp.init()
    ours = smp_subject()
    plains = [plain_subject() for _ in range(replicas)]
    wrong = []
    for step_index in range(num_steps):
        inputs = batch(step_index, 8 * replicas)
        ours.optimizer.zero_grad()
        train(ours.model, half(inputs, smp.dp_rank())["x"] if replicas > 1 else inputs["x"])
        norm = _clip(ours.model.parameters())
        ours.optimizer.step()
        for replica, plain in enumerate(plains):
            plain.optimizer.zero_grad()
            plain_backward(plain.module, half(inputs, replica) if replicas > 1 else inputs)
        for parameters in zip(*(plain.module.parameters() for plain in plains)):
            found = [parameter.grad / replicas for parameter in parameters if parameter.grad is not None]
            for parameter in parameters:
                parameter.grad = sum(found[1:], found[0]).clone() if found else None
        for plain in plains:
            wanted = _clip(plain.module.parameters())
            plain.optimizer.step()
        if not same(norm, wanted):
            wrong.append(f"step {step_index}: norm {norm} for {wanted}")
        wanted_parameters = dict(plains[0].module.named_parameters())
        wrong += [
            f"step {step_index}: {name}"
            for name, parameter in ours.own.items()
            if not same(parameter.data, wanted_parameters[name].data)
        ]
    return wrong


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def not_finite() -> dict[str, str]:
    """The error that torch raises on request, here and in plain torch."""
    smp.init()
    plain, ours = plain_subject(), smp_subject()
    plain_backward(plain.module, batch())
    train(ours.model, **batch())
    for subject in (plain, ours):
        if (weight := subject.own.get("head.weight")) is not None:
            weight.grad[0, 0] = math.nan
    return {
        name: error_of(lambda s=s: _clip(s.model.parameters(), error_if_nonfinite=True))
        for name, s in (("ours", ours), ("plain", plain))
    }


def by_hand() -> tuple[float, float]:
    """The lines of the README, in the session that is open."""
    ours = smp_subject()
    model = ours.model
    train(model, **batch())
    norm = smp.clip_grad_norm_(model.parameters(), float("inf"))
    squares = sum(p.grad.square().sum() for p in model.local_parameters() if p.grad is not None)
    return float(norm), float(sum(smp.allgather(squares, smp.MP_GROUP)) ** 0.5)


def by_hand_on_ranks() -> tuple[float, float]:
    smp.init()
    return by_hand()


def alone() -> dict[str, str]:
    """What one rank may ask for without the others."""
    smp.init()
    ours = smp_subject()
    train(ours.model, **batch())
    other = nn.Linear(2, 2)
    if smp.rank() == 1:
        return {}
    found = {"no gradients": error_of(lambda: _clip(other.parameters()))}
    other(torch.ones(1, 2)).sum().backward()
    found["other model"] = error_of(lambda: _clip(other.parameters()))
    found["tensors"] = error_of(lambda: get_total_norm([torch.ones(2), torch.ones(3)]))
    found["value"] = error_of(lambda: clip_grad_value_(other.parameters(), 1.0))
    return found


def failing() -> dict[str, str]:
    """A gradient on stage 1 of which torch has no norm: sparse, of no elements (before 2.14 any sparse)."""
    smp.init()
    plain, ours = plain_subject(), smp_subject()
    train(ours.model, **batch())
    for subject in (plain, ours):
        if (weight := subject.own.get("head.weight")) is not None:
            weight.grad = torch.zeros(WIDTH, WIDTH).to_sparse()
    both = (("ours", ours), ("plain", plain))
    return {name: error_of(lambda s=s: _clip(s.kept, norm_type=math.inf)) for name, s in both}


def sparse() -> dict[str, Any]:
    """A sparse gradient on stage 1, beside the usual ones: the norm, and the gradients as they are then."""
    smp.init()
    plain, ours = plain_subject(), smp_subject()
    train(ours.model, **batch())
    plain_backward(plain.module, batch())
    for subject in (plain, ours):
        if (weight := subject.own.get("head.weight")) is not None:
            weight.grad = torch.eye(WIDTH).to_sparse()
    found = {}
    names = list(ours.own)
    for name, subject in (("plain", plain), ("ours", ours)):
        try:
            norm = float(_clip(subject.kept))
        except Exception as error:
            found[name] = type(error).__name__
            continue
        own = (subject.own[key].grad for key in names)
        found[name] = (norm, [None if g is None else g.to_dense().tolist() for g in own])
    return found


def absent_rank() -> str:
    """Rank 1 does not call."""
    smp.init()
    ours = smp_subject()
    train(ours.model, **batch())
    smp.set_watchdog(1.0)
    try:
        if smp.rank() == 1:
            time.sleep(3.0)
            return ""
        return error_of(lambda: _clip(ours.model.parameters()))
    finally:
        smp.set_watchdog(None)


def different_calls() -> dict[str, str]:
    """What ranks may not ask for, each in turn: all ranks must get the error."""
    smp.init()
    ours = smp_subject()
    train(ours.model, **batch())
    local = list(ours.local())
    own_gradients = _gradients(local)
    own_biases = [p for p in _with_gradients(local) if p.ndim == 1]
    return {
        "one local tensor": error_of(lambda: _clip(own_biases[0])),
        "list of one": error_of(lambda: _clip([local[0]])),
        "some of the local": error_of(lambda: _clip(own_biases[:2])),
        "some gradients": error_of(lambda: get_total_norm([p.grad for p in own_biases[:2]])),
        "other norms": error_of(lambda: _clip(ours.kept, norm_type=1 + smp.rank())),
        "other limits": error_of(lambda: clip_grad_norm_(ours.kept, 1.0 + smp.rank())),
        "other functions": error_of(
            lambda: _clip(ours.kept) if smp.rank() else get_total_norm(own_gradients)
        ),
    }


def inside_a_step(in_memory: bool = False) -> dict[str, str]:
    """Clipping in the step function, where gradients are not there yet."""
    if not in_memory:
        smp.init()
    ours = smp_subject()
    found = {}
    train(ours.model, **batch())

    @smp.step
    def clips(model: Any, x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        model.backward(loss)
        found["wrapped"] = error_of(lambda: _clip(model.parameters()))
        found["kept"] = error_of(lambda: _clip(ours.kept))
        found["value"] = error_of(lambda: clip_grad_value_(ours.kept, 1.0))
        found["with norm"] = error_of(lambda: clip_grads_with_norm_(ours.kept, 1.0, torch.ones(())))
        found["step"] = error_of(ours.optimizer.step)
        found["gradients"] = error_of(lambda: get_total_norm(_gradients(ours.kept)))
        return loss

    clips(ours.model, **batch(1))
    return found


def clipped_by_hooks(in_memory: bool = False) -> list[str]:
    """Each gradient is clipped where it arises, one tensor at a time: that stays torch's own affair."""
    if not in_memory:
        smp.init()
    plain, ours = plain_subject(), smp_subject()
    for subject in (plain, ours):
        for name, parameter in subject.module.named_parameters():
            # The shared weight gets its gradient in two parts, and a hook would see either of them.
            if parameter.requires_grad and name != "blocks.0.linear.weight":
                parameter.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
                parameter.register_post_accumulate_grad_hook(lambda p: _clip(p) and None)
    plain_backward(plain.module, batch())
    train(ours.model, **batch())
    return [name for name, p in ours.own.items() if not same(p.grad, dict(plain.own)[name].grad)]


def clipped_values_of_a_frozen_stage() -> list[str]:
    """Stage 0 has no gradients at all."""
    smp.init()
    plain, ours = plain_subject(), smp_subject()
    for subject in (plain, ours):
        for name, parameter in subject.module.named_parameters():
            parameter.requires_grad_(STAGES.get(name.rpartition(".")[0], 0) == 1)
    plain_backward(plain.module, batch())
    train(ours.model, **batch())
    assert not smp.mp_rank() or _gradients(ours.local())
    return ask_all(ours, plain)


def vectors() -> tuple[str, bool]:
    """Parameters as one vector: what becomes of its numbers, and whether a whole one is taken over here."""
    smp.init()
    ours = smp_subject()
    train(ours.model, **batch())
    parameters = list(ours.model.parameters())
    vector = torch.arange(sum(p.numel() for p in parameters), dtype=torch.float64)
    read = error_of(lambda: torch.nn.utils.parameters_to_vector(parameters).norm().item())
    torch.nn.utils.vector_to_parameters(vector, parameters)
    local = {id(p) for p in ours.model.local_parameters()}
    pieces = vector.split([p.numel() for p in parameters])
    return read, all(torch.equal(p.flatten(), v) for p, v in zip(parameters, pieces) if id(p) in local)
