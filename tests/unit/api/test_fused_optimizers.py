"""`FusedLAMB` and `FusedNovoGrad` against the papers' formulas, and over several partitions.

The references compute in float64 and from the whole history of gradients: an average with decay rate ``b`` is
``sum(b**(t - i) * g_i)``, without any state to carry along. Gradients are made up beforehand, so that they do
not depend on the weights.
"""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.optim.fused import FusedLAMB, FusedLamb, FusedNovoGrad
from smp_lite.preview.optimizer_memory import optimizer_memory
from tests.api_support import batch, build, in_memory, plain_train, same, train, wrap

NUM_STEPS = 5
SHAPES = [(3, 4), (4,), (), (2, 3)]
History = list[list[Tensor]]
"""Per tensor, per step."""


def made_up(seed: int = 0) -> tuple[list[Tensor], History]:
    """(weights, gradients) in float64; norms of all gradients lie on both sides of 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = [draw(shape, 0.5) for shape in SHAPES]
    scales = (0.05, 2.0, 0.1, 0.6, 0.02)
    return weights, [[draw(shape, scale) for scale in scales] for shape in SHAPES]


def trained(make: Callable[[list[nn.Parameter]], Any], weights: list[Tensor], history: History) -> list[Any]:
    """Where an optimizer takes the weights: per tensor, per step."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = make(parameters)
    ends: list[list[Tensor]] = [[] for _ in weights]
    for step in range(len(history[0])):
        for parameter, gradients in zip(parameters, history, strict=True):
            parameter.grad = gradients[step].clone()
        optimizer.step()
        for parameter, end in zip(parameters, ends, strict=True):
            end.append(parameter.detach().clone())
    return ends


def decayed_sum(values: list[Any], rate: float) -> Any:
    return sum(rate ** (len(values) - 1 - i) * value for i, value in enumerate(values))


def l2(tensor: Tensor) -> float:
    return math.sqrt(sum(x * x for x in tensor.flatten().tolist()))


# The papers' formulas ---------------------------------------------------------------------------------------


def lamb(
    weights: list[Tensor],
    history: History,
    *,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float | None = 1.0,
    use_nvlamb: bool = False,
) -> History:
    norms = [math.sqrt(sum(l2(g) ** 2 for g in together)) for together in zip(*history, strict=True)]
    ends: History = []
    for weight, gradients in zip(weights, history, strict=True):
        seen: list[Tensor] = []
        ends.append([])
        for t, (norm, gradient) in enumerate(zip(norms, gradients, strict=True), start=1):
            if max_grad_norm:
                gradient = gradient * min(1.0, max_grad_norm / norm)
            seen.append(gradient if adam_w_mode else gradient + weight_decay * weight)
            m = ((1 - betas[0]) if grad_averaging else 1.0) * decayed_sum(seen, betas[0])
            v = (1 - betas[1]) * decayed_sum([g**2 for g in seen], betas[1])
            if bias_correction:
                m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
            u = m / (v**0.5 + eps) + (weight_decay * weight if adam_w_mode else 0)
            trusted = (weight_decay != 0 or use_nvlamb) and l2(weight) > 0 and l2(u) > 0
            weight = weight - lr * (l2(weight) / l2(u) if trusted else 1.0) * u
            ends[-1].append(weight)
    return ends


def novograd(
    weights: list[Tensor],
    history: History,
    *,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    norm_type: int = 2,
    init_zero: bool = False,
) -> History:
    power = 2 if norm_type == 2 else 1
    ends: History = []
    for weight, gradients in zip(weights, history, strict=True):
        powers = [(l2(g) if norm_type == 2 else float(g.abs().max())) ** power for g in gradients]
        moments: list[Tensor] = []
        ends.append([])
        for t, gradient in enumerate(gradients, start=1):
            start = 0.0 if init_zero else powers[0]
            v = betas[1] ** t * start + (1 - betas[1]) * decayed_sum(powers[:t], betas[1])
            v = v ** (1 / power)
            if bias_correction:
                v /= math.sqrt(1 - betas[1] ** t)
            inside = gradient / (v + eps) + weight_decay * weight
            moments.append(inside if reg_inside_moment else gradient)
            m = ((1 - betas[0]) if grad_averaging else 1.0) * decayed_sum(moments, betas[0])
            if bias_correction:
                m = m / (1 - betas[0] ** t)
            update = m if reg_inside_moment else m / (v + eps) + weight_decay * weight
            weight = weight - lr * update
            ends[-1].append(weight)
    return ends


def assert_close(found: History, wanted: History) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.3},
        {"bias_correction": False},
        {"betas": (0.5, 0.7)},
        {"betas": (0.0, 0.9)},
        {"eps": 0.1},
        {"weight_decay": 0.0},
        {"weight_decay": 0.5},
        {"adam_w_mode": False, "weight_decay": 0.5},
        {"adam_w_mode": False, "weight_decay": 0.5, "max_grad_norm": None, "bias_correction": False},
        {"grad_averaging": False},
        {"max_grad_norm": 0.01},
        {"max_grad_norm": 0},
        {"max_grad_norm": None},
        {"weight_decay": 0.0, "use_nvlamb": True},
        {"weight_decay": 0.0, "use_nvlamb": True, "adam_w_mode": False, "grad_averaging": False},
    ],
    ids=str,
)
def test_lamb_is_the_papers(options: dict[str, Any]) -> None:
    options = {"lr": 0.05, **options}
    weights, history = made_up()
    weights[3].zero_()  # no trust ratio at its first step
    assert_close(trained(partial(FusedLAMB, **options), weights, history), lamb(weights, history, **options))


@pytest.mark.parametrize("norm_type", [2, 0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.3},
        {"bias_correction": False},
        {"betas": (0.5, 0.7)},
        {"betas": (0.0, 0.9)},
        {"eps": 0.1},
        {"weight_decay": 0.5},
        {"reg_inside_moment": True},
        {"reg_inside_moment": True, "weight_decay": 0.5},
        {"reg_inside_moment": True, "weight_decay": 0.5, "bias_correction": False, "grad_averaging": False},
        {"grad_averaging": False},
        {"init_zero": True},
        {"init_zero": True, "bias_correction": False, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_novograd_is_the_papers(options: dict[str, Any], norm_type: int) -> None:
    options = {"lr": 0.05, "norm_type": norm_type, **options}
    weights, history = made_up()
    found = trained(partial(FusedNovoGrad, **options), weights, history)
    assert_close(found, novograd(weights, history, **options))


def test_the_options_make_a_difference() -> None:
    """Otherwise the comparisons above would not see that one is passed over."""
    weights, history = made_up()

    def ends(make: Any, options: dict[str, Any]) -> Tensor:
        return torch.cat([end[-1].flatten() for end in make(weights, history, **options)])

    lambs: list[dict[str, Any]] = [
        {},
        {"bias_correction": False},
        {"eps": 0.1},
        {"weight_decay": 0.5},
        {"adam_w_mode": False},
        {"grad_averaging": False},
        {"max_grad_norm": 0},
        {"max_grad_norm": 0.01},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_nvlamb": True},
    ]
    novograds: list[dict[str, Any]] = [
        {},
        {"bias_correction": False},
        {"eps": 0.1},
        {"weight_decay": 0.5},
        {"weight_decay": 0.5, "reg_inside_moment": True},
        {"grad_averaging": False},
        {"norm_type": 0},
        {"init_zero": True},
    ]
    for make, choices in ((lamb, lambs), (novograd, novograds)):
        found = [ends(make, options) for options in choices]
        for i, one in enumerate(found):
            for other in found[:i]:
                assert (one - other).abs().max() > 1e-6


def test_groups_have_options_of_their_own_and_one_limit_on_gradients() -> None:
    weights, history = made_up()
    settings: list[dict[str, Any]] = [{"lr": 0.05}, {"lr": 0.2, "weight_decay": 0.0, "betas": (0.5, 0.9)}]

    def make(parameters: list[nn.Parameter]) -> FusedLAMB:
        groups = [parameters[:2], parameters[2:]]
        return FusedLAMB([{"params": p, **s} for p, s in zip(groups, settings, strict=True)])

    wanted = [lamb(weights, history, **s) for s in settings]  # each over all, so that the norm is
    assert_close(trained(make, weights, history), [*wanted[0][:2], *wanted[1][2:]])


def test_groups_of_novograd_have_options_of_their_own() -> None:
    weights, history = made_up()
    settings: list[dict[str, Any]] = [{"norm_type": 0}, {"init_zero": True, "lr": 0.2}]

    def make(parameters: list[nn.Parameter]) -> FusedNovoGrad:
        groups = [parameters[:2], parameters[2:]]
        return FusedNovoGrad([{"params": p, **s} for p, s in zip(groups, settings, strict=True)])

    wanted = [novograd(weights, history, **s) for s in settings]
    assert_close(trained(make, weights, history), [*wanted[0][:2], *wanted[1][2:]])


# What holds whatever the numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_of_lamb_is_as_long_as_lr_times_the_weights(weight_decay: float) -> None:
    weights, history = made_up(seed=1)
    make = partial(FusedLAMB, lr=0.02, weight_decay=weight_decay, max_grad_norm=0, use_nvlamb=True)
    for weight, ends in zip(weights, trained(make, weights, history), strict=True):
        for before, after in zip([weight, *ends], ends):
            assert l2(after - before) == pytest.approx(0.02 * l2(before), rel=1e-9)


def test_lamb_without_trust_ratio_and_limit_is_adam() -> None:
    weights, history = made_up(seed=2)
    found = trained(partial(FusedLAMB, lr=0.1, weight_decay=0.0, max_grad_norm=0), weights, history)
    assert_close(found, trained(partial(torch.optim.Adam, lr=0.1, eps=1e-6), weights, history))


@pytest.mark.parametrize(
    "make",
    [
        partial(FusedLAMB, eps=0.0, max_grad_norm=None),
        partial(FusedNovoGrad, eps=0.0),
        partial(FusedNovoGrad, eps=0.0, norm_type=0, reg_inside_moment=True, weight_decay=0.1),
    ],
)
def test_the_scale_of_gradients_is_nothing_to_them(make: Any) -> None:
    weights, history = made_up(seed=3)
    larger = [[1000 * gradient for gradient in gradients] for gradients in history]
    assert_close(trained(make, weights, larger), trained(make, weights, history))


def test_novograds_first_step_is_as_long_as_lr() -> None:
    weights, history = made_up(seed=4)
    for options, factor in (
        ({"bias_correction": False, "grad_averaging": False}, 1.0),
        ({}, math.sqrt(1e-3)),
    ):
        ends = trained(partial(FusedNovoGrad, lr=0.01, **options), weights, history)
        for weight, end in zip(weights, ends, strict=True):
            assert l2(end[0] - weight) == pytest.approx(0.01 * factor, rel=1e-5)


@pytest.mark.parametrize("limit", [None, 0, 0.0, 1e9, math.inf])
def test_a_limit_that_no_norm_reaches_is_none(limit: float | None) -> None:
    weights, history = made_up()
    free = trained(partial(FusedLAMB, eps=0.1, max_grad_norm=None), weights, history)
    assert same(trained(partial(FusedLAMB, eps=0.1, max_grad_norm=limit), weights, history), free)
    assert not same(trained(partial(FusedLAMB, eps=0.1, max_grad_norm=1), weights, history), free)


@pytest.mark.parametrize("decayed_too", [False, True])
@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_zeros_give_finite_numbers(kind: Any, decayed_too: bool) -> None:
    weights = [torch.zeros(3), torch.ones(3), torch.zeros(3), torch.zeros(0, 2)]
    history = [[torch.zeros(3)] * 2, [torch.zeros(3)] * 2, [torch.ones(3)] * 2, [torch.zeros(0, 2)] * 2]
    options: dict[str, Any] = {"weight_decay": 0.1} if decayed_too else {"weight_decay": 0.0}
    options.update({"use_nvlamb": True} if kind is FusedLAMB else {"norm_type": 0})
    ends = trained(partial(kind, **options), weights, history)
    assert all(bool(torch.isfinite(tensor).all()) for end in ends for tensor in end)
    assert not ends[0][-1].any()
    assert torch.equal(ends[1][-1], weights[1]) == (not decayed_too)
    assert bool((ends[2][-1] < 0).all())


# Types ------------------------------------------------------------------------------------------------------

HALF = [torch.float16, torch.bfloat16]
KINDS = [
    partial(FusedLAMB, lr=0.1),
    partial(FusedLAMB, lr=0.1, adam_w_mode=False, weight_decay=0.3),
    partial(FusedLAMB, lr=0.1, weight_decay=0.0, use_nvlamb=True),
    partial(FusedNovoGrad, lr=0.1, weight_decay=0.1),
    partial(FusedNovoGrad, lr=0.1, weight_decay=0.1, norm_type=0, reg_inside_moment=True),
]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scale", [1e-4, 5e3])
@pytest.mark.parametrize("make", KINDS)
def test_half_precision_is_computed_in_float32(make: Any, scale: float, dtype: torch.dtype) -> None:
    """Only the weights are rounded, after each step; the gradients' squares have no place in float16."""
    weights, history = made_up(seed=5)
    weights = [weight.to(dtype) for weight in weights]
    history = [[(scale * gradient).to(dtype) for gradient in gradients] for gradients in history]
    found = trained(make, weights, history)
    wide = [nn.Parameter(weight.float()) for weight in weights]
    optimizer = make(wide)
    for step in range(NUM_STEPS):
        for parameter, gradients in zip(wide, history, strict=True):
            parameter.grad = gradients[step].float()
        optimizer.step()
        for parameter, end in zip(wide, found, strict=True):
            parameter.data = parameter.to(dtype).float()
            assert end[step].dtype == dtype
            assert torch.equal(end[step].float(), parameter)
    assert not same([end[-1] for end in found], weights)


def test_types_may_be_mixed() -> None:
    weights, history = made_up()
    types = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
    mixed = [weight.to(t) for weight, t in zip(weights, types, strict=True)]
    gradients = [[g.to(t) for g in gs] for gs, t in zip(history, types, strict=True)]
    make = partial(FusedLAMB, lr=0.05)
    for end, wanted, t in zip(
        trained(make, mixed, gradients), lamb(weights, history, lr=0.05), types, strict=True
    ):
        assert end[-1].dtype == t
        torch.testing.assert_close(end[-1].double(), wanted[-1], rtol=0.02, atol=1e-3)


# State ------------------------------------------------------------------------------------------------------


def stepped(optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def parameters_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(weight.to(dtype)) for weight in made_up(seed=6)[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("make", KINDS)
def test_state_goes_round(make: Any, dtype: torch.dtype) -> None:
    parameters = parameters_of(dtype)
    optimizer = make(parameters)
    stepped(optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert state["param_groups"][0]["step"] == 3
    assert all(set(one) == {"exp_avg", "exp_avg_sq"} for one in state["state"].values())
    others = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    loaded = make(others)
    loaded.load_state_dict(copy.deepcopy(state))
    assert same(loaded.state_dict(), state)
    stepped(optimizer, range(3, 5))
    stepped(loaded, range(3, 5))
    assert same(others, parameters)
    assert same(loaded.state_dict(), optimizer.state_dict())


def test_state_is_of_these_shapes() -> None:
    lamb_, novograd_ = FusedLAMB(parameters_of()), FusedNovoGrad(parameters_of(torch.bfloat16))
    for optimizer in (lamb_, novograd_):
        stepped(optimizer, range(1))
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].shape == parameter.shape
            assert state["exp_avg_sq"].shape == (parameter.shape if optimizer is lamb_ else ())
            assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_state_of_half_precision_loads_from_a_narrower_one() -> None:
    optimizer = FusedLAMB(parameters_of(torch.bfloat16))
    stepped(optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {i: {k: v.bfloat16() for k, v in one.items()} for i, one in state["state"].items()}
    optimizer.load_state_dict(state)
    assert {v.dtype for one in optimizer.state.values() for v in one.values()} == {torch.float32}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_steps_alike(make: Any, copied: Callable[[Any], Any]) -> None:
    optimizer = make(parameters_of(), set_grad_none=False)
    stepped(optimizer, range(2))
    twin = copied(optimizer)
    for one in (optimizer, twin):
        stepped(one, range(2, 4))
    assert same(twin.param_groups, optimizer.param_groups)
    assert same(twin.state_dict(), optimizer.state_dict())
    twin.zero_grad()
    assert twin.param_groups[0]["params"][0].grad is not None


@pytest.mark.parametrize("make", KINDS)
def test_what_it_keeps_can_be_foretold(make: Any) -> None:
    parameters = parameters_of(torch.bfloat16)
    optimizer = make(parameters)
    foretold = optimizer_memory(optimizer, parameters)
    stepped(optimizer, range(1))
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert foretold.state == sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# Which parameters, which gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_a_parameter_without_a_gradient_is_left_alone(kind: Any) -> None:
    moved, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = kind([moved, idle], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert not optimizer.state
    for _ in range(2):
        moved.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(idle.detach(), torch.ones(3))
    assert not torch.equal(moved.detach(), torch.ones(3))
    assert list(optimizer.state) == [moved]
    idle.grad = torch.ones(3)
    optimizer.step()
    assert len(optimizer.state) == 2
    assert optimizer.param_groups[0]["step"] == 4  # of the group, from the first call


def test_a_later_parameter_is_corrected_for_its_groups_count() -> None:
    first, late = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = FusedLAMB([first, late], lr=0.1, weight_decay=0.0, eps=0.0, max_grad_norm=0)
    first.grad = torch.ones(1)
    optimizer.step()
    late.grad = torch.ones(1)
    optimizer.step()
    step = 0.1 * (0.1 / (1 - 0.9**2)) / math.sqrt(0.001 / (1 - 0.999**2))
    assert late.item() == pytest.approx(1 - step)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_gradients_are_left_as_they_are(kind: Any) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 5.0)
    kind([parameter], weight_decay=0.1).step()
    assert torch.equal(parameter.grad, torch.full((3,), 5.0))


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
@pytest.mark.parametrize(
    ("weight", "gradient", "text"),
    [
        (torch.ones(3), torch.ones(3).to_sparse(), "no sparse gradients"),
        (torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64), "real parameters"),
    ],
)
def test_gradients_that_it_cannot_take(kind: Any, weight: Tensor, gradient: Tensor, text: str) -> None:
    good, bad = nn.Parameter(torch.ones(3)), nn.Parameter(weight)
    good.grad, bad.grad = torch.ones(3), gradient
    optimizer = kind([good, bad])
    with pytest.raises(RuntimeError, match=f"{kind.__name__} takes {text}"):
        optimizer.step()
    assert torch.equal(good.detach(), torch.ones(3))
    assert not optimizer.state
    assert "step" not in optimizer.param_groups[0]


def test_settings_that_it_cannot_take() -> None:
    parameters = parameters_of()
    for kind in (FusedLAMB, FusedNovoGrad):
        with pytest.raises(RuntimeError, match=f"{kind.__name__}: it has no AMSGrad"):
            kind(parameters, amsgrad=True)
    with pytest.raises(ValueError, match="max_grad_norm=-1"):
        FusedLAMB(parameters, max_grad_norm=-1)
    with pytest.raises(RuntimeError, match="norm_type=1"):
        FusedNovoGrad(parameters, norm_type=1)
    with pytest.raises(RuntimeError, match="norm_type=3"):
        FusedNovoGrad([{"params": parameters, "norm_type": 3}])


def test_norms_that_lie_in_the_groups_are_refused() -> None:
    optimizer = FusedNovoGrad(parameters_of())
    stepped(optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["exp_avg_sq"] = [None, torch.ones(4)]
    with pytest.raises(ValueError, match="as apex saves"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_zero_grad_does_as_the_constructor_says(kind: Any) -> None:
    for removes, argument, none in (
        (True, (), True),
        (False, (), False),
        (True, (False,), False),
        (False, (True,), True),
    ):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        kind([parameter], set_grad_none=removes).zero_grad(*argument)
        assert parameter.grad is None if none else not parameter.grad.any()


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_a_closure_computes_the_gradients(kind: Any) -> None:
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = kind([parameter], lr=0.1)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = (parameter * torch.tensor([1.0, 2.0])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert len(calls) == 1
    other.grad = torch.tensor([1.0, 2.0])
    assert kind([other], lr=0.1).step() is None
    assert torch.equal(parameter, other)


def test_arguments_and_defaults_are_apexs() -> None:
    def arguments(kind: Any) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(kind).parameters.items() if name != "params"}

    assert FusedLamb is FusedLAMB
    common = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999)}
    assert list(arguments(FusedLAMB).items()) == [
        *common.items(),
        ("eps", 1e-6),
        ("weight_decay", 0.01),
        ("amsgrad", False),
        ("adam_w_mode", True),
        ("grad_averaging", True),
        ("set_grad_none", True),
        ("max_grad_norm", 1.0),
        ("use_nvlamb", False),
    ]
    assert list(arguments(FusedNovoGrad).items()) == [
        *common.items(),
        ("eps", 1e-8),
        ("weight_decay", 0.0),
        ("amsgrad", False),
        ("reg_inside_moment", False),
        ("grad_averaging", True),
        ("norm_type", 2),
        ("init_zero", False),
        ("set_grad_none", True),
    ]


# Over partitions --------------------------------------------------------------------------------------------


@pytest.fixture
def session() -> None:
    in_memory()


def run(model: Any, optimizer: Any, indices: range) -> None:
    step = train if isinstance(optimizer, smp.DistributedOptimizer) else plain_train
    for index in indices:
        optimizer.zero_grad()
        step(model, *batch(index))
        optimizer.step()


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    "make",
    [
        partial(FusedLAMB, lr=0.01, max_grad_norm=0),
        partial(FusedLAMB, lr=0.01, max_grad_norm=None, use_nvlamb=True, adam_w_mode=False),
        partial(FusedNovoGrad, lr=0.01),
        partial(FusedNovoGrad, lr=0.01, weight_decay=0.1, norm_type=0, reg_inside_moment=True),
    ],
)
@pytest.mark.filterwarnings("ignore:Stage ")
@pytest.mark.filterwarnings("error:whether Fused")
def test_over_two_partitions_they_equal_one_process(make: Any) -> None:
    net = build()
    reference = make(net.parameters())
    model, optimizer = wrap(build(), make)
    run(net, reference, range(3))
    run(model, optimizer, range(3))
    assert not same(net.state_dict(), build().state_dict())
    assert same(model.state_dict(), net.state_dict())
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert same(state, reference.state_dict())
    assert optimizer.param_groups[0]["step"] == 3
    weights = copy.deepcopy(model.state_dict())
    run(model, optimizer, range(3, 5))
    wanted = model.state_dict()
    smp.reset()
    in_memory()
    model, optimizer = wrap(build(seed=8), make)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    run(model, optimizer, range(3, 5))
    assert same(model.state_dict(), wanted)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.1},
        {"max_grad_norm": 10.0},
        {"lr": 0.1},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_nvlamb": True},
        {"adam_w_mode": False},
    ],
    ids=str,
)
def test_a_limit_on_all_gradients_is_refused_over_two_partitions(options: dict[str, Any]) -> None:
    with pytest.raises(smp.SMPError, match=r"FusedLAMB over several partitions: .* all parameters at once"):
        wrap(build(), partial(FusedLAMB, **options))


@pytest.mark.filterwarnings("ignore:Stage ")
def test_with_one_partition_there_may_be_a_limit() -> None:
    smp.reset()
    in_memory(partitions=1)
    make = partial(FusedLAMB, lr=0.1, max_grad_norm=0.01)
    net = build()
    reference = make(net.parameters())
    model, optimizer = wrap(build(), make)
    run(net, reference, range(2))
    run(model, optimizer, range(2))
    assert same(model.state_dict(), net.state_dict())
    smp.reset()


@pytest.mark.usefixtures("session")
@pytest.mark.filterwarnings("ignore:Stage ")
def test_torchs_clipping_before_the_step_does_what_the_limit_does() -> None:
    net = build()
    reference = FusedLAMB(net.parameters(), lr=0.1, max_grad_norm=0.1, eps=0.1)
    model, optimizer = wrap(build(), partial(FusedLAMB, lr=0.1, max_grad_norm=0, eps=0.1))
    run(net, reference, range(3))
    for index in range(3):
        optimizer.zero_grad()
        train(model, *batch(index))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), net.state_dict(), rtol=1e-4, atol=1e-6)
