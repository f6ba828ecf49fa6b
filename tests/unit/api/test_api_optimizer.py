"""`DistributedOptimizer` against the plain optimizer that it wraps, in one process."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from smp_lite.optim.optimizer_check import check_pieces
from tests.api_support import batch, build, in_memory, plain_train, same, train, wrap

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.01, amsgrad=True)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture(autouse=True)
def _session() -> None:
    in_memory()


def plain(optimizer: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, Any]:
    net = build()
    return net, optimizer(net.parameters())


def run(model: Any, optimizer: Any, indices: range, *, scheduler: Any = None) -> None:
    """Trains on batches, by the library or plainly."""
    step = train if isinstance(optimizer, smp.DistributedOptimizer) else plain_train
    for index in indices:
        optimizer.zero_grad()
        step(model, *batch(index))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("kind", [SGD, MOMENTUM, ADAM, ADAMW])
def test_training_and_state_equal_the_plain_optimizers(kind: Any) -> None:
    net, reference = plain(kind)
    model, optimizer = wrap(build(), kind)
    run(net, reference, range(3))
    run(model, optimizer, range(3))
    assert same(model.state_dict(), net.state_dict())
    assert same(optimizer.state_dict(), reference.state_dict())
    assert same(optimizer.state_dict(gather_to_rank0=True), reference.state_dict())
    assert same(optimizer.local_state_dict(), {**reference.state_dict(), "_smp_is_partial": True})


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4),
    ],
)
@pytest.mark.filterwarnings("error:Detected call of")  # torch's check of the order of step() calls
def test_schedulers_built_on_it_work_as_on_the_plain_one(schedule: Callable[[Any], Any]) -> None:
    net, reference = plain(MOMENTUM)
    model, optimizer = wrap(build(), MOMENTUM)
    run(net, reference, range(3), scheduler=schedule(reference))
    scheduler = schedule(optimizer)
    run(model, optimizer, range(3), scheduler=scheduler)
    assert scheduler.get_last_lr() == [group["lr"] for group in reference.param_groups]
    assert same(model.state_dict(), net.state_dict())


def test_it_is_an_optimizer_that_shows_the_inner_one() -> None:
    _, optimizer = wrap(build(), MOMENTUM)
    inner = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(inner, torch.optim.SGD)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "SGD" in repr(optimizer)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("partial_state", [False, True])
def test_state_saved_by_it_loads_before_and_after_partition(before: int, partial_state: bool) -> None:
    model, optimizer = wrap(build(), ADAMW)
    run(model, optimizer, range(2))
    weights = model.state_dict()
    state = optimizer.local_state_dict() if partial_state else optimizer.state_dict()
    state = pickle.loads(pickle.dumps(state))
    run(model, optimizer, range(2, 4))
    wanted = model.state_dict()
    smp.reset()
    in_memory()
    model, optimizer = wrap(build(seed=8), ADAMW)
    run(model, optimizer, range(before))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    run(model, optimizer, range(2, 4))
    assert same(model.state_dict(), wanted)


def test_state_goes_to_a_plain_optimizer_and_comes_from_one() -> None:
    net, reference = plain(ADAM)
    run(net, reference, range(2))
    model, optimizer = wrap(copy.deepcopy(net), ADAM)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    run(net, reference, range(2, 4))
    run(model, optimizer, range(2, 4))
    assert same(model.state_dict(), net.state_dict())
    back = ADAM(net.parameters())
    back.load_state_dict(optimizer.state_dict())
    assert same(back.state_dict(), reference.state_dict())


def test_settings_of_a_loaded_state_count_at_once() -> None:
    model, optimizer = wrap(build(), MOMENTUM)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.03125
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.03125
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.param_groups[0]["lr"] = 0.25
    run(model, optimizer, range(1))
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_state_of_another_optimizer_is_refused() -> None:
    model, optimizer = wrap(build(), MOMENTUM)
    for _ in range(2):
        two = torch.optim.SGD([{"params": [p]} for p in build().parameters()][:2], lr=0.1)
        with pytest.raises(ValueError, match="2 parameter groups, but the optimizer has 1"):
            optimizer.load_state_dict(two.state_dict())
        few = MOMENTUM(list(build().parameters())[:3])
        with pytest.raises(ValueError, match=r"of sizes \[3\], but the optimizer's have \[8\]"):
            optimizer.load_state_dict(few.state_dict())
        run(model, optimizer, range(1))


def grouped(net: nn.Module, kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Two groups whose parameters lie on both stages, as weight decay groups do."""
    decayed = [p for name, p in net.named_parameters() if name.endswith("weight")]
    others = [p for name, p in net.named_parameters() if not name.endswith("weight")]
    return kind([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.05}])


def test_groups_keep_their_settings_and_changes_of_them_count() -> None:
    net = build()
    reference = grouped(net, ADAMW)
    other = build()
    model = smp.DistributedModel(other)
    optimizer = smp.DistributedOptimizer(grouped(other, ADAMW))
    for some, its in ((net, reference), (model, optimizer)):
        run(some, its, range(2))
        its.param_groups[1]["lr"] = 0.2
        run(some, its, range(2, 4))
    assert same(model.state_dict(), net.state_dict())
    assert same(optimizer.state_dict(), reference.state_dict())


def test_a_group_can_be_added_before_partition_only() -> None:
    net, other = build(), build()
    reference = SGD(net.first.parameters())
    model = smp.DistributedModel(other)
    optimizer = smp.DistributedOptimizer(SGD(other.first.parameters()))
    for some, its in ((net, reference), (other, optimizer)):
        its.add_param_group({"params": list(some.last.parameters()), "lr": 0.5})
    run(net, reference, range(2))
    run(model, optimizer, range(2))
    assert same(model.state_dict(), net.state_dict())
    with pytest.raises(smp.SMPError, match=r"before smp\.DistributedOptimizer wraps it"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(smp.SMPError, match="exists once"):
        copy.deepcopy(optimizer)


def test_named_parameters_keep_their_names() -> None:
    net, other = build(), build()
    reference = MOMENTUM(net.named_parameters())
    model = smp.DistributedModel(other)
    optimizer = smp.DistributedOptimizer(MOMENTUM(other.named_parameters()))
    run(net, reference, range(1))
    run(model, optimizer, range(1))
    assert same(optimizer.state_dict(), reference.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    assert same(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    model, optimizer = wrap(build(), SGD)
    train(model, *batch())
    optimizer.zero_grad(set_to_none=set_to_none)
    gradients = [parameter.grad for parameter in model.local_parameters()]
    assert all((g is None) if set_to_none else not g.any() for g in gradients)


def test_gradients_add_up_over_steps_until_they_are_cleared() -> None:
    net, _ = plain(SGD)
    model, _ = wrap(build(), SGD)
    for index in range(2):
        plain_train(net, *batch(index))
        train(model, *batch(index))
    for mine, wanted in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


def test_a_closure_is_called() -> None:
    model, optimizer = wrap(build(), SGD)
    train(model, *batch())
    assert optimizer.step(lambda: 3.5) == 3.5


def test_an_optimizer_of_all_frozen_but_one_parameters() -> None:
    net = build()
    net.first.requires_grad_(False)
    model, optimizer = wrap(net, MOMENTUM)
    run(model, optimizer, range(2))
    assert [p.grad is None for p in net.parameters()] == [True] * 4 + [False] * 4
    assert sorted(optimizer.state_dict()["state"]) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "options",
    [
        {"static_loss_scale": 128.0},
        {"static_loss_scale": None, "dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 1000}},
        {"init_scale": 2.0},
    ],
)
def test_loss_scaling_means_nothing_without_fp16(options: dict[str, Any]) -> None:
    net, reference = plain(MOMENTUM)
    run(net, reference, range(3))
    model = smp.DistributedModel(build())
    optimizer = smp.DistributedOptimizer(MOMENTUM(model.parameters()), **options)
    run(model, optimizer, range(3))
    assert same(model.state_dict(), net.state_dict())
    assert optimizer.overflow is False


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_master_grads_clips_by_the_norm_of_the_whole_model(norm_type: float) -> None:
    net, reference = plain(SGD)
    plain_train(net, *batch(0))
    expected = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01, norm_type)
    model, optimizer = wrap(build(), SGD)
    train(model, *batch(0))
    found = optimizer.clip_master_grads(0.01, norm_type)
    assert isinstance(found, float)
    assert found == float(expected)
    optimizer.reload_model_params()  # the same tensors, without fp16
    reference.step()
    optimizer.step()
    assert same(model.state_dict(), net.state_dict())


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("loss_scaler", "fp16: True in the parameters"),
        ("_global_grad_norm", "sharded data parallelism, which is off"),
        ("redefined_params", ".* not supported yet"),
    ],
)
def test_what_belongs_to_features_that_are_off_is_refused(name: str, feature: str) -> None:
    _, optimizer = wrap(build(), SGD)
    with pytest.raises(smp.SMPError, match=f"optimizer.{name} belongs to {feature}"):
        getattr(optimizer, name)


@pytest.mark.parametrize("before", [0, 2])
def test_states_under_names_of_older_versions(before: int) -> None:
    model, optimizer = wrap(build(), ADAMW)
    run(model, optimizer, range(2))
    own = optimizer.orig_state_dict()
    assert own["state"].keys() == set(range(8))
    state = pickle.loads(pickle.dumps(optimizer.save_optimizer_backcompat(gather_if_shard=True)))
    weights = model.state_dict()
    run(model, optimizer, range(2, 4))
    expected = model.state_dict()
    smp.reset()
    in_memory()
    model, optimizer = wrap(build(), ADAMW)
    run(model, optimizer, range(before))
    model.load_state_dict(weights)
    optimizer.load_optimizer_backcompat(state, True)
    run(model, optimizer, range(2, 4))
    assert same(model.state_dict(), expected)


class Around:
    """A script's own object around an optimizer, as AWS's older scripts have."""

    def __init__(self, inner: Any) -> None:
        self.optimizer = inner
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["inner"])


def test_an_object_around_an_optimizer_is_read_and_set_through() -> None:
    net, reference = plain(MOMENTUM)
    run(net, reference, range(3))
    model = smp.DistributedModel(build())
    around = Around(MOMENTUM(model.parameters()))
    with pytest.warns(
        UserWarning, match="Around.step.. treats each parameter by itself could not be found out"
    ):
        optimizer = smp.DistributedOptimizer(around)
    run(model, optimizer, range(3))
    assert same(model.state_dict(), net.state_dict())
    assert optimizer.steps == 3
    optimizer.fp32_from_fp16 = "set by the script"
    assert around.fp32_from_fp16 == "set by the script"  # type: ignore[attr-defined]


class Keyed(torch.optim.SGD):
    """Knows its parameters by their identity, which a trial on others cannot have; looks at all of them at
    once, and makes nothing of a closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.rates = {id(p): 0.1 for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [(p, p.grad) for p in self.param_groups[0]["params"] if p.grad is not None]
        if not gradients:
            return
        norm = torch.stack([gradient.norm() for _, gradient in gradients]).norm()
        for parameter, gradient in gradients:
            parameter.sub_(self.rates[id(parameter)] * gradient / norm)


def test_a_trial_in_which_nothing_moves_tells_nothing() -> None:
    model = smp.DistributedModel(build())
    with pytest.warns(UserWarning, match=r"Keyed treats each parameter by itself could not be found out"):
        smp.DistributedOptimizer(Keyed(model.parameters()))
    with pytest.raises(smp.SMPError, match="whether it treats every element by itself could not be found"):
        check_pieces(Keyed(model.parameters()))


class Counting(torch.optim.SGD):
    """Its state has a key of its own."""

    count = 3

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict(state_dict)


def test_state_of_its_own_is_not_dropped() -> None:
    model = smp.DistributedModel(build())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = smp.DistributedOptimizer(Counting(model.parameters(), lr=0.1))
    run(model, optimizer, range(1))
    for state_dict in (optimizer.state_dict, optimizer.local_state_dict):
        with pytest.raises(smp.SMPError, match="that of Counting has 'count' beside 'state'"):
            state_dict()


@pytest.mark.parametrize("steps", [0, 1])
def test_state_of_its_own_is_not_dropped_where_it_is_loaded(steps: int) -> None:
    state = {**plain(SGD)[1].state_dict(), "count": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = wrap(build(), partial(Counting, lr=0.1))
    run(model, optimizer, range(steps))
    with pytest.raises(smp.SMPError, match=r"'count' beside 'state' and 'param_groups', which Counting"):
        optimizer.load_state_dict(state)
    smp.reset()
    in_memory()
    model, optimizer = wrap(build(), SGD)  # torch's own looks at no other key
    run(model, optimizer, range(steps))
    optimizer.load_state_dict(state)


def test_state_of_its_own_in_one_partition(tmp_path: Any) -> None:
    smp.reset()
    in_memory(partitions=1)
    model, optimizer = wrap(build(), partial(Counting, lr=0.1))
    run(model, optimizer, range(1))
    optimizer.load_state_dict({**optimizer.state_dict(), "count": 7})
    assert optimizer.count == optimizer.state_dict()["count"] == optimizer.local_state_dict()["count"] == 7
    with pytest.raises(smp.SMPError, match=r"has 'count' beside .* no portable form"):
        smp.save_checkpoint(str(tmp_path), "tag", model=model, optimizer=optimizer, portable=True)


def new_layer(net: Any) -> None:
    net.last[1] = nn.Linear(8, 1)


def new_weight(net: Any) -> None:
    net.last[1].weight = nn.Parameter(torch.zeros(1, 8))


def no_layer(net: Any) -> None:
    net.last[1] = nn.Identity()


@pytest.mark.parametrize("change", [new_layer, new_weight, no_layer])
def test_a_parameter_that_was_exchanged_before_the_first_step_is_told(change: Callable[[Any], None]) -> None:
    net = build()
    model, optimizer = wrap(net, MOMENTUM)
    change(net)
    with pytest.raises(smp.SMPError, match=r"the parameter 'last.1.weight', which is no longer in the model"):
        run(model, optimizer, range(1))


class Noisy(torch.optim.SGD):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad + torch.randn_like(parameter), alpha=-group["lr"])


def test_an_optimizer_that_draws_is_refused() -> None:
    model = smp.DistributedModel(build())
    before = torch.get_rng_state()
    with pytest.raises(
        smp.SMPError, match=r"Noisy over several partitions: its step\(\) draws random numbers"
    ):
        smp.DistributedOptimizer(Noisy(model.parameters(), lr=0.1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("before", [0, 2])
def test_the_state_of_an_object_around_an_optimizer_is_its_own(before: int) -> None:
    model = smp.DistributedModel(build())
    optimizer = smp.DistributedOptimizer(Around(MOMENTUM(model.parameters())))
    run(model, optimizer, range(2))
    state, weights = pickle.loads(pickle.dumps(optimizer.local_state_dict())), model.state_dict()
    assert state["steps"] == 2
    with pytest.raises(smp.SMPError, match="save local_state_dict"):
        optimizer.state_dict()
    run(model, optimizer, range(2, 4))
    expected = model.state_dict()
    smp.reset()
    in_memory()
    model = smp.DistributedModel(build())
    optimizer = smp.DistributedOptimizer(Around(MOMENTUM(model.parameters())))
    run(model, optimizer, range(before))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    run(model, optimizer, range(2, 4))
    assert same(model.state_dict(), expected)


class Scaling(Around):
    """With masters of its own, as far as the wrapper can see."""

    overflow = False

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        self.clipped = max_norm, norm_type
        return -1.0

    def reload_model_params(self) -> None:
        self.reloaded = True

    def state_dict(self) -> dict[str, Any]:
        return {"scale": 1.0}


def test_an_object_with_loss_scaling_of_its_own_is_asked() -> None:
    smp.reset()
    in_memory(1)
    model = smp.DistributedModel(build())
    around = Scaling(SGD(model.parameters()))
    optimizer = smp.DistributedOptimizer(around)
    assert optimizer.overflow is False
    around.overflow = True
    assert optimizer.overflow is True
    assert optimizer.clip_master_grads(0.5) == -1.0
    optimizer.reload_model_params()
    assert (around.clipped, around.reloaded) == ((0.5, 2.0), True)
    assert optimizer.state_dict() == {"scale": 1.0}


def test_a_misspelt_argument_of_loss_scaling_is_told() -> None:
    model = smp.DistributedModel(build())
    with pytest.raises(TypeError, match="unknown argument 'dynamic_loss_scal'"):
        smp.DistributedOptimizer(SGD(model.parameters()), dynamic_loss_scal=True)


def test_what_is_no_optimizer_is_told() -> None:
    model = smp.DistributedModel(build())
    with pytest.raises(TypeError, match="got list, which has no param_groups, step"):
        smp.DistributedOptimizer([])
    with pytest.raises(TypeError, match=r"no torch\.optim\.Optimizer and has none"):
        smp.DistributedOptimizer(type("Bare", (Around,), {"param_groups": []})(None))
    of_its_own = Around(SGD(model.parameters()))
    of_its_own.__class__ = type("Own", (Around,), {"param_groups": [{"params": list(model.parameters())}]})
    with pytest.raises(smp.SMPError, match=r"Own.param_groups are not those of the SGD inside it"):
        smp.DistributedOptimizer(of_its_own)


def test_the_order_of_wrapping_is_told() -> None:
    with pytest.raises(smp.SMPError, match=r"smp\.DistributedModel before the optimizer"):
        smp.DistributedOptimizer(SGD(build().parameters()))
    _, optimizer = wrap(build(), SGD)
    with pytest.raises(smp.SMPError, match="already"):
        smp.DistributedOptimizer(optimizer)


def test_an_optimizer_wrapped_after_the_first_step_trains_too() -> None:
    net, reference = plain(SGD)
    plain_train(net, *batch(9))
    model = smp.DistributedModel(build())
    train(model, *batch(9))
    optimizer = smp.DistributedOptimizer(SGD(model.parameters()))
    run(net, reference, range(2))
    run(model, optimizer, range(2))
    assert same([p.data for p in model.parameters()], [p.data for p in net.parameters()])


def test_a_learning_rate_that_warms_up_from_nothing_hides_no_limit_on_the_norm() -> None:
    model = smp.DistributedModel(build())
    optimizer = smp.optimizers.FusedLAMB(model.parameters(), lr=0.0)
    with pytest.raises(smp.SMPError, match="FusedLAMB over several partitions"):
        smp.DistributedOptimizer(optimizer)


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_cleared_as_the_inner_optimizer_does_by_itself(keeps: bool) -> None:
    model = smp.DistributedModel(build())
    inner = smp.optimizers.FusedNovoGrad(model.parameters(), set_grad_none=not keeps)
    optimizer = smp.DistributedOptimizer(inner)
    train(model, *batch())
    optimizer.zero_grad()
    assert all((p.grad is not None) == keeps for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:whether Ahead.step")
def test_an_optimizer_around_another_without_torchs_own_init() -> None:
    """As Lookahead is often written: an Optimizer by its class, which has none of torch's hooks."""

    class Ahead(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

        def step(self, closure: Any = None) -> None:
            before = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
            self.optimizer.step()
            with torch.no_grad():
                for group, were in zip(self.param_groups, before, strict=True):
                    for parameter, was in zip(group["params"], were, strict=True):
                        parameter.lerp_(was, 0.5)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.optimizer.zero_grad(set_to_none)

        def state_dict(self) -> Any:
            return self.optimizer.state_dict()

        def load_state_dict(self, state_dict: Any) -> None:
            self.optimizer.load_state_dict(state_dict)

    net, plain = build(), build()
    model, optimizer = wrap(net, lambda parameters: Ahead(torch.optim.SGD(parameters, lr=0.1)))
    expected = Ahead(torch.optim.SGD(plain.parameters(), lr=0.1))
    for index in range(2):
        optimizer.zero_grad()
        expected.zero_grad()
        train(model, *batch(index))
        plain_train(plain, *batch(index))
        optimizer.step()
        expected.step()
    assert same(model.state_dict(), plain.state_dict())
