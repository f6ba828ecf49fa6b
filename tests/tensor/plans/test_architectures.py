"""Unmodified models of ``transformers`` under the plans that come with them, or ours, on real ranks."""

from __future__ import annotations

import pytest

from smp_lite.comm.groups.axis import Axis
from smp_lite.errors import SMPError
from smp_lite.nn.plans import parallelize
from tests.harness import run_distributed
from tests.tensor.plans.architectures import ARCHITECTURES, MORE, NOT_EXACT, build_by_default
from tests.tensor.plans.known_models import FAMILIES, VARIANTS

CASES = "tests.tensor.plans.cases"
ATTENTION = dict(zip(ARCHITECTURES, ["eager", "sdpa"] * len(ARCHITECTURES), strict=False)) | {
    "gemma2": "eager"
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_on_two_ranks(name: str) -> None:
    run_distributed(f"{CASES}:architecture", 2, kwargs={"name": name, "attention": ATTENTION[name]})


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_both_kinds_of_attention(name: str, attention: str) -> None:
    if (name, attention) != ("gemma2", "sdpa"):  # it has none
        run_distributed(f"{CASES}:architecture", 2, kwargs={"name": name, "attention": attention})


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "phi3", "gpt_neox", "mixtral"])
def test_on_four_ranks(name: str) -> None:
    """Two key heads or one: fewer than ranks."""
    run_distributed(f"{CASES}:architecture", 4, kwargs={"name": name, "attention": "eager"}, timeout_s=100)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE)
def test_more_architectures(name: str) -> None:
    run_distributed(f"{CASES}:any_architecture", 2, kwargs={"name": name}, timeout_s=100)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NOT_EXACT)
def test_plans_that_come_with_models_and_are_not_exact(name: str) -> None:
    with pytest.raises(SMPError, match=NOT_EXACT[name]):
        parallelize(build_by_default(name), Axis("tp", range(2), 0))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_plans_of_our_own(name: str, attention: str) -> None:
    run_distributed(f"{CASES}:known_plan_of", 2, kwargs={"name": name, "attention": attention})


@pytest.mark.parametrize("name", VARIANTS)
def test_plans_of_our_own_for_variants(name: str) -> None:
    run_distributed(f"{CASES}:known_plan_of", 2, kwargs={"name": name})


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_plans_of_our_own_on_four_ranks(name: str) -> None:
    """One head on each."""
    run_distributed(f"{CASES}:known_plan_of", 4, kwargs={"name": name, "attention": "sdpa"}, timeout_s=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "given_plans",
        "fast_experts",
        "checkpointed",
        "states",
        "mismatches_are_seen",
        "derived_plans",
        "drawn_for_all_features",
        "known_plan_with_dropout",
    ],
)
def test_case(case: str) -> None:
    run_distributed(f"{CASES}:{case}", 2)
