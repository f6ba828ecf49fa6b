"""What a delayed model becomes equals what plain construction makes, to the bit; so does the generator."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import smp_lite as smp
from smp_lite.deferred import Waiting, deferring, is_deferred
from smp_lite.lifecycle.starting import planning
from smp_lite.preview.memory_preview import preview_memory
from smp_lite.preview.step_preview import PlanReady, stop_when_planned
from smp_lite.record.state.flat_weights import renew_lists
from smp_lite.session import current
from tests.deferred import cases


def _layers() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Embedding(10, 3, padding_idx=1), nn.LSTM(3, 4, 2)),
        *(nn.MultiheadAttention(8, 2), nn.Conv2d(3, 4, 3), nn.Linear(5, 6).half(), nn.Linear(600, 1501)),
    )


def _inits() -> nn.Module:
    made = nn.ParameterList([nn.Parameter(torch.empty(33, 20)) for _ in range(12)])
    init = nn.init
    init.trunc_normal_(made[0])
    init.orthogonal_(made[1])
    init.sparse_(made[2], 0.3)
    init.eye_(made[3])
    init.kaiming_normal_(made[4])
    init.trunc_normal_(made[6], std=0.3, a=0.5, b=1.5)  # by rejection, of which few pass
    with torch.no_grad():
        made[7].bernoulli_(0.3)
        made[8].copy_(torch.randn(33, 20).abs().sqrt())
        made[9][3:5].normal_()
        made[9][0] = 7
        made[9][1:3] = made[9][0]
        made[9][5:] = 1
        made[5].normal_()[made[5] > 0] = 0.5
        made[10].uniform_().exponential_()
        made[11].zero_()
        made[3].add_(torch.distributions.Gamma(torch.ones(33, 20), 1.0).sample())
        made[4].mul_(torch.bernoulli(torch.rand(33, 20)))
    return made


def _copies() -> nn.Module:
    block = nn.Linear(3, 3)
    made = nn.ModuleList([copy.deepcopy(block) for _ in range(3)])
    made[2].weight = made[0].weight
    with torch.no_grad():
        made[1].bias.copy_(made[0].bias * 2)
        made[0].bias.zero_()
    made.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    made.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool().view(1, 1, 4, 4))
    made.rates = [x.item() for x in torch.linspace(0, 1, 4)]
    own = torch.Generator().manual_seed(4)
    made.first = nn.Parameter(torch.randn(4, generator=own))
    made.second = nn.Parameter(torch.empty(40).normal_(generator=own))
    made.given = nn.Parameter(torch.empty(50, 60))
    made.given.data.copy_(torch.from_numpy(np.random.RandomState(0).rand(50, 60)))
    return made


_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{"layers": _layers, "inits": _inits, "copies": _copies, "net": cases.Net},
    **{name: (lambda name=name: cases._transformer(name)) for name in ("gpt2", "llama", "bert", "t5")},
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", _MODELS)
def test_parameters_and_generator(name: str) -> None:
    torch.manual_seed(3)
    plain = _MODELS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with deferring():
        delayed = _MODELS[name]()
    assert torch.equal(after, torch.get_rng_state())
    assert all(is_deferred(p) for p in delayed.parameters())
    objects = {key: id(p) for key, p in delayed.named_parameters()}
    for module in delayed.modules():
        renew_lists(module)
    waiting = Waiting(delayed)
    waiting.check()
    waiting.make_others()
    waiting.make(reversed(list(delayed.parameters())))  # in any order
    assert objects == {key: id(p) for key, p in delayed.named_parameters()}
    wanted = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    found = dict(delayed.named_parameters(remove_duplicate=False)) | dict(delayed.named_buffers())
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        other = found[key]
        assert (type(value), value.dtype, value.stride()) == (type(other), other.dtype, other.stride()), key
        assert torch.equal(value, other) and value.requires_grad == other.requires_grad, key
    assert getattr(plain, "rates", None) == getattr(delayed, "rates", None)


def test_one_parameter_needs_only_its_own_draws() -> None:
    with smp.delay_param_initialization():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with smp.delay_param_initialization(enabled=False):
            real = nn.Linear(2, 2)
    assert not is_deferred(real.weight) and is_deferred(net[1].weight)
    waiting = Waiting(net)
    waiting.make([net[1].weight])
    assert not is_deferred(net[1].weight) and is_deferred(net[0].weight) and is_deferred(net[1].bias)


def test_the_configuration_delays_models_of_model_creation() -> None:
    smp.init_in_memory({"partitions": 2, "delayed_parameter_initialization": True})
    with smp.model_creation(dtype=torch.bfloat16):
        net = nn.Linear(2, 2)
    assert is_deferred(net.weight) and net.weight.dtype == torch.bfloat16
    assert not is_deferred(nn.Linear(2, 2).weight)


def test_a_constant_that_changes_is_an_error() -> None:
    given = torch.ones(200, 200)
    with deferring():
        made = nn.Parameter(torch.empty(200, 200))
        made.data.copy_(given)
    given[3, 4] = 2
    with pytest.raises(smp.SMPError, match="changed afterwards"):
        made.tolist()


@pytest.mark.ci
def test_refusals_name_what_they_refuse() -> None:
    class Own(nn.Parameter):
        pass

    with deferring():
        with pytest.raises(smp.SMPError, match="Own cannot be made"):
            Own(torch.empty(3))
        kept = nn.Linear(3, 3)
    for asked in ("data_ptr", "storage", "untyped_storage", "share_memory_", "__dlpack__"):
        with pytest.raises(smp.SMPError, match="has no memory before"):
            getattr(kept.weight.detach(), asked)()
    view = kept.weight[0]
    with pytest.raises(smp.SMPError, match="the parameter 'weight' is not initialized yet"):
        Waiting(kept).check()
    del view
    with deferring():
        viewed, normed = nn.BatchNorm1d(3), nn.utils.spectral_norm(nn.Linear(3, 3))
        viewed.register_buffer("first", viewed.running_mean[:1])
    with pytest.raises(smp.SMPError, match=r"the buffer '.*', whose init.* cannot be made"):
        Waiting(viewed).make_others()
    smp.init_in_memory({"partitions": 2})
    with pytest.raises(smp.SMPError, match="could not be described without its data"):
        smp.step(smp.DistributedModel(nn.Sequential(normed, nn.Linear(3, 3))))(torch.ones(4, 3))


def test_a_plan_knows_what_has_no_memory_before_the_first_step() -> None:
    with planning({"partitions": 2, "microbatches": 2}, stop_when_planned):
        smp.init()
        with smp.delay_param_initialization():
            net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        model = smp.DistributedModel(net)

        @smp.step
        def step(x: torch.Tensor) -> None:
            model.backward(model(x).sum())

        with pytest.raises(PlanReady) as ready:
            step(torch.ones(4, 256))
        found = ready.value
        notes = preview_memory(current(), found.batch, found.recordings, found.inputs).notes
    assert notes[-2:] == (
        "until the first step every rank holds the whole model as it was built: 0 B",
        "beside that, 514.0 KiB of parameters wait: their initialization is delayed",
    )
