"""The count of living memory: what counts, once, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from smp_lite.record.describe.live_bytes import LiveBytes
from tests.allocated import memory_profile, most_and_left


def test_memory_counts_once_and_until_nobody_holds_it() -> None:
    live = LiveBytes()
    with live:
        x = torch.empty(10, 10)
        view = x.t()[2:]
        assert live.alive == 400
        del x
        assert live.alive == 400
        del view
        assert live.alive == 0
    assert live.peak == 400


def test_what_is_ignored_does_not_count_nor_do_its_views() -> None:
    weight = torch.empty(10, 10)
    with LiveBytes([weight]) as live:
        kept = weight.t().reshape(100)[1:]
        assert live.alive == 400  # the copy that reshape makes of a transposed tensor
        del kept
        kept = weight.view(100)[:3]
        assert live.alive == 0
        del kept


def test_saved_tensors_live_as_long_as_their_graph() -> None:
    with LiveBytes() as live:
        x = torch.empty(100, requires_grad=True)
        loss = x.exp().sin().sum()
        # exp keeps its result, which is sin's input; sum keeps nothing.
        assert live.alive == 400 + 400 + 4
        loss.backward()
        assert live.alive == 400 + 4 + 400  # the gradient of x


def test_changes_in_place_allocate_nothing() -> None:
    with LiveBytes() as live:
        x = torch.zeros(100)
        x.add_(1).mul_(2)
        x[3:] = 7
        assert live.alive == 400
    assert live.peak in (400, 404)  # before torch 2.15 the 7 is a tensor


def test_lists_of_results_count() -> None:
    with LiveBytes() as live:
        parts = torch._foreach_add([torch.zeros(10), torch.zeros(5)], 1.0)
        assert live.alive == 60
        del parts
        assert live.alive == 0


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def convolve_back(x: Tensor, weight: Tensor) -> Tensor:
    output = convolve(x.requires_grad_(), weight.requires_grad_())
    output.backward(torch.ones_like(output))
    return output


def losses(x: Tensor, weight: Tensor) -> list[Tensor]:
    functions = (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss, F.l1_loss)
    return [function(x, x) for function in functions]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="convolutions without oneDNN differ")
@pytest.mark.parametrize("call", [convolve, convolve_back, losses])
@pytest.mark.parametrize("width", [16, 64])
def test_fake_tensors_tell_what_real_ones_take(call: Callable[..., object], width: int) -> None:
    """Within 5 %, what the kernels themselves allocate included."""
    torch.manual_seed(0)
    x, weight = torch.rand(4, width, 16, 16), torch.rand(width, width, 3, 3)
    call(x.clone(), weight.clone())
    with memory_profile() as profile:
        real = call(x, weight)
    most, left = most_and_left(profile)
    with FakeTensorMode():
        fake, fake_weight = torch.empty(4, width, 16, 16), torch.empty(width, width, 3, 3)
        with LiveBytes([fake, fake_weight]) as live:
            result = call(fake, fake_weight)
    assert live.alive == pytest.approx(left, rel=0.05, abs=64)
    assert live.peak == pytest.approx(most, rel=0.05)
    del result, real
