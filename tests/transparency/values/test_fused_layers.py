"""Torch's own transformer layers in evaluation: as in one process, or a word about it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import smp_lite as smp
from smp_lite.errors import SMPError


class Encoder(nn.Module):
    def __init__(self, *, nested: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=mask))


@pytest.fixture(autouse=True)
def fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(before)


X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
PADDED = torch.arange(6)[None] >= torch.tensor([6, 4, 6, 3])[:, None]


def evaluated(module: Encoder, mask: Tensor | None, split: str = "encoder.layers.1") -> tuple[Tensor, Tensor]:
    """What the library gives, with the named module and what follows on a second stage, and plain torch."""
    plain = copy.deepcopy(module).eval()
    smp.init_in_memory({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    model = smp.DistributedModel(module)
    smp.set_partition(module.get_submodule(split), 1)
    smp.set_partition(module.head, 1)

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor, mask: Tensor | None) -> Tensor:
        return model(x, mask)

    model.eval()
    with torch.no_grad():
        step(model, X, mask)  # the first one is recorded before the model is placed
        masks = [None, None] if mask is None else mask.chunk(2)
        expected = torch.cat([plain(x, m) for x, m in zip(X.chunk(2), masks, strict=True)])
        return step(model, X, mask).concat(), expected


@pytest.mark.filterwarnings("error")
def test_whole_layers_are_fused_on_their_stages() -> None:
    ours, plain = evaluated(Encoder(nested=False), None)
    assert torch.equal(ours, plain)


@pytest.mark.host
def test_padding_that_one_process_takes_out_is_refused() -> None:
    plain = copy.deepcopy(Encoder()).eval()
    with torch.no_grad():
        assert (plain.encoder(X, src_key_padding_mask=PADDED)[1, 4:] == 0).all()
    with pytest.raises(SMPError, match=r"encoder: in evaluation torch takes the padding out.*enable_nested"):
        evaluated(Encoder(), PADDED)


@pytest.mark.parametrize("mask", [torch.zeros(4, 6, dtype=torch.bool), PADDED.flip(1)], ids=["none", "left"])
def test_a_mask_that_takes_nothing_out_is_as_in_one_process(mask: Tensor) -> None:
    torch.testing.assert_close(*evaluated(Encoder(), mask))


def test_padding_without_nested_tensors() -> None:
    ours, plain = evaluated(Encoder(nested=False), PADDED)
    assert torch.equal(ours, plain)


def test_the_fast_path_can_be_off_in_both() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    ours, plain = evaluated(Encoder(), PADDED, split="encoder.layers.1.linear1")
    assert torch.equal(ours, plain)


def test_a_layer_that_is_split_says_what_differs() -> None:
    with pytest.warns(
        UserWarning, match=r"encoder.layers.1: in evaluation torch computes .* by one fused kernel"
    ):
        ours, plain = evaluated(Encoder(nested=False), None, split="encoder.layers.1.linear1")
    torch.testing.assert_close(ours, plain)


@pytest.mark.filterwarnings("error:.*fused kernel")
def test_gradients_are_never_fused() -> None:
    module = Encoder()
    plain = copy.deepcopy(module)
    smp.init_in_memory({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    model = smp.DistributedModel(module)
    smp.set_partition(module.encoder.layers[1].linear1, 1)

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
        loss = model(x, PADDED[:2]).square().mean()
        model.backward(loss)
        return loss

    step(model, X)
    step(model, X)
    for x in [*X.chunk(2), *X.chunk(2)]:
        (plain(x, PADDED[:2]).square().mean() / 2).backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
