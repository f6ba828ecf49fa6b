"""What the partitioner takes the loss to keep, which it cannot see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smp_lite.record.describe.metadata import MetadataInference
from smp_lite.record.describe.tracing import cost_tree, trace_model

TOKENS = torch.zeros(4, 6, dtype=torch.int64)
LOGITS_BYTES = 4 * 6 * 1000 * 4


class LanguageModel(nn.Module):
    def __init__(self, finish: Callable[[Tensor, Tensor], object] = lambda logits, tokens: logits) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 8)
        self.head = nn.Linear(8, 1000, bias=False)
        self.finish = finish

    def forward(self, tokens: Tensor) -> object:
        return self.finish(self.head(self.embedding(tokens)), tokens)


def head_activations(model: nn.Module, *, losses_in_flight: int = 1) -> int:
    costs = cost_tree(
        model,
        trace_model(model, (TOKENS,), {}, MetadataInference()),
        optimizer_states=2,
        microbatches_in_flight=3,
        losses_in_flight=losses_in_flight,
    )
    by_name = {cost.name: cost.activation_bytes for cost in costs.walk()}
    assert by_name["embedding"] == 3 * TOKENS.nbytes
    return by_name["head"] - 3 * 4 * 6 * 8 * 4  # the head's own input


@pytest.mark.parametrize("losses_in_flight", [1, 5])
def test_a_loss_outside_of_the_model_keeps_as_much_as_the_results(losses_in_flight: int) -> None:
    found = head_activations(LanguageModel(), losses_in_flight=losses_in_flight)
    assert found == losses_in_flight * LOGITS_BYTES


def test_a_model_with_its_own_loss_has_shown_what_that_keeps() -> None:
    """The log-probabilities, the targets and the total weight of the mean; nothing is added."""

    def finish(logits: Tensor, tokens: Tensor) -> object:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits

    assert head_activations(LanguageModel(finish)) == 3 * (LOGITS_BYTES + 4)


def test_results_that_are_kept_already_are_not_kept_twice() -> None:
    kept = head_activations(LanguageModel(lambda logits, tokens: logits.relu()))
    assert kept == 3 * LOGITS_BYTES


def test_results_without_a_gradient_are_not_kept() -> None:
    assert head_activations(LanguageModel(lambda logits, tokens: logits.argmax(-1))) == 0
