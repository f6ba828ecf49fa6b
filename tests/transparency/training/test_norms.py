"""A norm means the whole model, whatever spelling reaches its parameters, to the bit of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from tests.harness import run_distributed
from tests.transparency.comparison import NUM_MICROBATCHES
from tests.transparency.conftest import OpenSession
from tests.transparency.training import norms

BUILT_IN = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_")


def on_ranks(function: str, ranks: int = 2, partitions: int = 2, **kwargs: Any) -> list[Any]:
    config: dict[str, Any] = {"partitions": partitions, "microbatches": NUM_MICROBATCHES, **norms.MANUAL}
    if ranks > partitions:
        config["ddp"] = True
    return run_distributed(
        f"tests.transparency.training.norms:{function}",
        ranks,
        kwargs=kwargs,
        parameters=config,
        timeout_s=90.0,
    )


@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_spelling_in_memory(num_stages: int, open_session: OpenSession) -> None:
    open_session(num_stages, **norms.MANUAL)
    stages = norms.STAGES if num_stages > 1 else dict.fromkeys(norms.STAGES, 0)
    assert norms.everything(stages) == []


def test_every_spelling_on_two_ranks() -> None:
    assert on_ranks("everything_on_ranks") == [[], []]


@pytest.mark.slow
def test_every_spelling_on_three_ranks_one_of_which_holds_nothing() -> None:
    """Nobody is on stage 1: that rank has no parameters, no gradients, and still takes part."""
    assert on_ranks("everything_on_ranks", 3, 3, stages=norms.SPREAD) == [[]] * 3


@pytest.mark.slow
def test_every_spelling_with_replicas() -> None:
    """Both replicas take the same batch, so their mean is a plain model's gradient."""
    assert on_ranks("everything_on_ranks", 4) == [[]] * 4


def test_many_gradients_of_one_dtype(open_session: OpenSession) -> None:
    assert on_ranks("many_in_one_dtype") == [[], []]
    open_session(2, **norms.MANUAL)
    assert norms.many_in_one_dtype(in_memory=True) == []


def test_training_with_clipping() -> None:
    assert on_ranks("training", num_steps=3) == [[], []]


def test_training_with_clipping_and_replicas() -> None:
    assert on_ranks("training", 4, num_steps=3, replicas=2) == [[]] * 4


def test_a_norm_that_is_not_finite_is_the_same_error_on_all_ranks() -> None:
    for found in on_ranks("not_finite"):
        assert found["ours"] == found["plain"]
        assert "The total norm of order 2.0 for gradients from `parameters` is non-finite" in found["ours"]


def test_the_lines_of_the_readme(open_session: OpenSession) -> None:
    plain = norms.plain_subject()
    norms.plain_backward(plain.module, norms.batch())
    wanted = float(norms.SPELLINGS["norm only"](plain))
    open_session(2, **norms.MANUAL)
    for norm, by_hand in (norms.by_hand(), *on_ranks("by_hand_on_ranks")):
        assert norm == wanted
        assert by_hand == pytest.approx(wanted, rel=1e-2)  # some gradients are in bfloat16


def test_one_rank_may_ask_alone_for_what_is_not_the_models() -> None:
    found, _ = on_ranks("alone")
    assert set(found.values()) == {"no error"}


@pytest.mark.unpretended
def test_what_fails_on_one_rank_fails_on_all() -> None:
    here, there = on_ranks("failing")
    assert here["ours"].startswith("SMPError: clip_grad_norm_ failed on rank 1: ")
    assert there["ours"] == there["plain"]


def test_a_sparse_gradient() -> None:
    """torch has norms of them from 2.14 on."""
    here, there = on_ranks("sparse")
    assert there["ours"] == there["plain"]
    assert here["ours"] == ("SMPError" if isinstance(there["plain"], str) else here["plain"])


@pytest.mark.ci
def test_a_rank_that_does_not_call_is_named() -> None:
    error, _ = on_ranks("absent_rank")
    assert "clip_grad_norm_ is collective over the MP group [0, 1], but rank(s) 1 did not call it" in error


def test_calls_that_differ_between_ranks_are_refused() -> None:
    for found in on_ranks("different_calls"):
        for name in ("one local tensor", "list of one", "some of the local", "some gradients"):
            assert "Give the same list on every rank" in found[name], name
            assert "rank 0 gave" in found[name] and "rank 1 gave" in found[name], name
        assert "norm_type" in found["other norms"]
        assert "max_norm" in found["other limits"]
        assert found["other functions"].startswith("SMPMismatch: ")


def check_inside_a_step(found: dict[str, str]) -> None:
    for name in ("wrapped", "kept", "value", "with norm", "step"):
        assert "inside a function decorated with @smp.step" in found[name], (name, found[name])
    assert len(found) == 6


def test_clipping_inside_a_step_is_refused(open_session: OpenSession) -> None:
    for found in on_ranks("inside_a_step"):
        check_inside_a_step(found)
    open_session(2, **norms.MANUAL)
    check_inside_a_step(norms.inside_a_step(in_memory=True))


def test_hooks_may_clip_one_gradient_where_it_arises(open_session: OpenSession) -> None:
    assert on_ranks("clipped_by_hooks") == [[], []]
    open_session(2, **norms.MANUAL)
    assert norms.clipped_by_hooks(in_memory=True) == []


def test_a_stage_without_gradients() -> None:
    assert on_ranks("clipped_values_of_a_frozen_stage") == [[], []]


def test_parameters_as_a_vector_are_never_silently_partial() -> None:
    for read, taken_over in on_ranks("vectors"):
        assert "lives on stage" in read
        assert taken_over


def test_torch_is_as_it_was_after_the_session(open_session: OpenSession) -> None:
    def inner() -> list[Any]:
        functions = [getattr(torch.nn.utils, name) for name in BUILT_IN]
        return [function.__closure__[0].cell_contents for function in functions]

    before = inner()
    open_session(2)
    assert all(a is not b for a, b in zip(inner(), before, strict=True))
    smp.reset()
    assert all(a is b for a, b in zip(inner(), before, strict=True))


def test_other_models_need_no_session_and_no_step(open_session: OpenSession) -> None:
    open_session(2)
    smp.DistributedModel(nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert smp.clip_grad_norm_(other.parameters(), 1.0) == torch.tensor(6.0).sqrt()
    with pytest.warns(UserWarning, match="empty generator"):
        assert smp.clip_grad_norm_((p for p in []), 1.0) == 0.0
