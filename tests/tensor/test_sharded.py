"""Sharded parameters: the same numbers as with whole ones, a share of the memory, and no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp_lite.checkpoints.portable.pieces import Piece, boxes_of
from smp_lite.comm.groups.axis import Axis
from smp_lite.nn.layout import ParameterLayout, part_of
from tests.harness import run_distributed

pytestmark = pytest.mark.sampled(3)

CASES = "tests.tensor.sharded_cases"

RULES = {
    "embed.weight": ["fsdp", None],
    "blocks.*.up.weight": ["fsdp", None],
    "blocks.*.up.bias": ["fsdp"],
    "blocks.*.down.weight": [None, "fsdp"],
    "blocks.*.norm.weight": ["fsdp"],
    "head.weight": ["fsdp", None],
    "out.weight": ["fsdp", None],
}
OF_SHARED = {
    **{name: spec for name, spec in RULES.items() if name != "head.weight"},
    "position": ["fsdp"],
    "out.bias": ["fsdp"],
}
OF_TWICE = {name: spec for name, spec in OF_SHARED.items() if name not in ("embed.weight", "position")}
OF_BLOCK = {"up.weight": ["fsdp", None], "down.weight": ["fsdp", None], "up.bias": ["fsdp"]}
SPLIT = {
    **RULES,
    "blocks.*.up.weight": ["tensor", "fsdp"],
    "blocks.*.up.bias": ["tensor"],
    "blocks.*.down.weight": ["fsdp", "tensor"],
}


def mesh(rules: dict[str, Any], smp: dict[str, Any] | None = None, **axes: int) -> dict[str, Any]:
    return {"ici_mesh": axes, "sharding": rules, **({"smp": smp} if smp else {})}


def both(
    rules: dict[str, Any], *, smp: dict[str, Any] | None = None, tensor: int = 1, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What ranks find with sharded parameters, and with whole ones."""
    ranks = 2 * tensor * (smp or {}).get("pipeline_parallel_degree", 1)
    return (
        run_distributed(
            f"{CASES}:train",
            ranks,
            kwargs={"config": mesh(rules, smp, fsdp=2, tensor=tensor), **options},
        ),
        run_distributed(
            f"{CASES}:train",
            ranks,
            kwargs={"config": mesh(rules, smp, data=2, tensor=tensor), **options},
        ),
    )


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], *, exactly: bool = True) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("losses", "norms"):
            assert mine[key] == (theirs[key] if exactly else pytest.approx(theirs[key], rel=1e-5))
        close = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(mine["outputs"], theirs["outputs"], **close)
        assert list(mine["state"]) == list(theirs["state"])
        torch.testing.assert_close(mine["state"], theirs["state"], **close)
        assert list(mine["optimizer"]["state"]) == list(theirs["optimizer"]["state"])
        torch.testing.assert_close(mine["optimizer"]["state"], theirs["optimizer"]["state"], **close)


def test_a_sharded_model_trains_like_a_whole_one_to_the_bit() -> None:
    found, expected = both(RULES, evaluate=True)
    check_same(found, expected)
    whole = expected[0]
    for rank in found:
        # All but the biases of three kinds lie in halves, and so do gradients and the optimizer's state.
        rest = 4 * (8 + 8) + 5
        assert rank["elements"] == (whole["elements"] - rest) // 2 + rest
        assert rank["gradients"] == rank["elements"]
        assert rank["of_state"] == 2 * rank["elements"]
        # At most two units are whole at a time: the one that works and the one that it hands on to.
        assert rank["most_bytes"] <= 2 * max(rank["groups"])
        assert 4 * max(rank["groups"]) <= sum(rank["groups"])


VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"model": "tied"},
    # Random numbers go by the modules that are called whole, which in a pipeline are the same ones.
    "dropout": {"model": "dropout", "smp": {"pipeline_parallel_degree": 2, "microbatches": 2}},
    "shared": {"rules": OF_SHARED, "model": "shared", "evaluate": True},
    "twice": {"rules": OF_TWICE, "model": "twice"},
    "one unit": {"rules": OF_BLOCK, "model": "one unit"},
    "checkpointing": {"checkpointing": True},
    "autocast": {"autocast": True},
    "sgd": {"optimizer": "SGD"},
    "pipeline": {"smp": {"pipeline_parallel_degree": 2, "microbatches": 4}},
    "pipeline, simple": {
        "smp": {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "simple"},
        "model": "tied",
    },
    "tensor": {"rules": SPLIT, "tensor": 2},
    "microbatches": {"smp": {"pipeline_parallel_degree": 1, "microbatches": 4}},
    "no overlap": {"options": {"overlapping_allreduce": False}},
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_the_same_to_the_bit(name: str) -> None:
    options = dict(VARIANTS[name])
    check_same(*both(options.pop("rules", RULES), **options))


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.1},
        {"clip": 0.1, "rules": SPLIT, "tensor": 2, "model": "tied"},
        {"passes": 2},
        {"passes": 2, "options": {"backward_passes_per_step": 2}},
    ],
    ids=["clipped", "clipped, tensor", "gradients add up", "fewer reductions"],
)
def test_norms_and_sums_of_gradients_differ_only_in_rounding(options: dict[str, Any]) -> None:
    check_same(*both(options.pop("rules", RULES), **options), exactly=False)


@pytest.mark.slow
def test_pieces_over_four_ranks_and_over_two_with_two_copies() -> None:
    expected = run_distributed(f"{CASES}:train", 4, kwargs={"config": mesh(RULES, data=4)})
    for axes in ({"fsdp": 4}, {"data": 2, "fsdp": 2}):
        found = run_distributed(f"{CASES}:train", 4, kwargs={"config": mesh(RULES, **axes)})
        check_same(found, expected, exactly=False)


def test_each_action_gathers_what_it_needs_once() -> None:
    found = run_distributed(f"{CASES}:collectives_of_a_step", 2, kwargs={"config": mesh(RULES, fsdp=2)})
    # Seven units, each forward and backward; the last one's is still there for its backward.
    in_blocks = 4 * (32 * 8 + 32 + 8 * 32 + 8)
    assert found[0]["gathers"] == 13
    assert found[0]["elements"] == 2 * (8 * 8 + in_blocks + 8 * 8) + 5 * 8


REFUSED = {
    "lamb": "FusedLAMB .*: tried on a few small tensors",
    "by dimensions": "DecaysMatrices with split or sharded parameters: .* in halves than whole",
    "changed behind autograd": "'blocks.2.up.weight' was changed in place inside an smp.step",
    "between: a norm": "norm of a sharded parameter, or of its gradient, between steps: .* of shape \\[32\\]",
    "between: a sum of what was made of it": "sum of a sharded parameter",
    "between: a row": "getitem.* of a sharded parameter",
    "between: noise": "randn_like of a sharded parameter",
    "between: initialised": "normal_ of a sharded parameter",
    "between: saved": "a piece of shape \\[32\\] of a sharded parameter would be saved",
    "between: multiplied": "linear of a sharded parameter",
    "between: turned": "T of a sharded parameter",
    "hook": "register_comm_hook: parameters are sharded",
    "outside": "is sharded: a step brings its pieces together",
    "gathered copy": "others of this copy are pieces",
    "another piece": "was saved with piece . of 2 of each parameter, and this rank holds piece",
    "whole part": "was saved with whole parameters, and this rank holds piece . of 2",
    "other data": "'embed.weight' was given data of shape \\[8, 8\\].* a piece of it of shape \\[32\\]",
    "changed inside": "'embed.weight' was changed in place inside an smp.step",
}


@pytest.mark.ci(keep=3)
@pytest.mark.parametrize("what", REFUSED)
def test_what_pieces_cannot_do_is_refused(what: str) -> None:
    import re

    found = run_distributed(f"{CASES}:refused", 2, kwargs={"config": mesh(RULES, fsdp=2), "what": what})
    for text in found:
        assert re.search(REFUSED[what], text), text


def test_functions_of_every_element_are_right_on_pieces() -> None:
    found = run_distributed(f"{CASES}:element_by_element", 2, kwargs={"config": mesh(RULES, fsdp=2)})
    assert found == run_distributed(f"{CASES}:element_by_element", 2, kwargs={"config": mesh(RULES, data=2)})


def test_a_weight_of_another_unit_is_right_or_shows() -> None:
    kwargs = {"what": "hidden"}
    found = run_distributed(f"{CASES}:refused", 2, kwargs={"config": mesh(RULES, fsdp=2), **kwargs})
    expected = run_distributed(f"{CASES}:refused", 2, kwargs={"config": mesh(RULES, data=2), **kwargs})
    assert found == expected or all(text == "nan" or "blocks" in text for text in found)


def test_new_data_of_a_parameter_counts() -> None:
    found = run_distributed(f"{CASES}:data_replaced", 2, kwargs={"config": mesh(RULES, fsdp=2)})
    expected = run_distributed(f"{CASES}:data_replaced", 2, kwargs={"config": mesh(RULES, data=2)})
    assert found == expected
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_rank_ends_the_step_in_all(rank: int) -> None:
    found = run_distributed(f"{CASES}:fails", 2, kwargs={"config": mesh(RULES, fsdp=2), "rank": rank})
    losses = set()
    for text, took, loss in found:
        assert f"failed on rank {rank}" in text and "the cause" in text
        assert took < 5.0
        losses.add(loss)
    assert len(losses) == 1


LAYOUTS = {
    "pieces": mesh(RULES, fsdp=2),
    "whole": mesh(RULES, data=2),
    "pieces of parts": mesh(SPLIT, fsdp=2, tensor=2),
    "pipeline": mesh(RULES, {"pipeline_parallel_degree": 2, "microbatches": 2}, fsdp=2),
}


def ranks_of(layout: str) -> int:
    return 2 if layout in ("pieces", "whole") else 4


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ("pieces", "whole"),
        ("whole", "pieces"),
        ("pieces of parts", "pieces"),
        ("pieces", "pieces of parts"),
        ("pipeline", "pieces of parts"),
        ("pieces", "pieces"),
    ],
)
@pytest.mark.parametrize("after_a_step", [False, True])
def test_checkpoints_move(tmp_path: Path, saved: str, read: str, after_a_step: bool) -> None:
    losses = run_distributed(
        f"{CASES}:saves",
        ranks_of(saved),
        kwargs={"config": LAYOUTS[saved], "folder": str(tmp_path), "num_steps": 4},
    )
    found = run_distributed(
        f"{CASES}:resumes",
        ranks_of(read),
        kwargs={
            "config": LAYOUTS[read],
            "folder": str(tmp_path),
            "num_steps": 4,
            "after_a_step": after_a_step,
        },
    )
    for rank in found:
        assert rank == pytest.approx(losses[0][2:], rel=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_full_checkpoint_is_that_of_whole_parameters(tmp_path: Path, after_a_step: bool) -> None:
    more = {"folder": str(tmp_path), "num_steps": 4, "portable": False}
    losses = run_distributed(f"{CASES}:saves", 2, kwargs={"config": LAYOUTS["pieces"], **more})
    assert torch.load(tmp_path / "tag")["embed.weight"].shape == (8, 8)
    for layout in ("pieces", "whole"):
        kwargs = {"config": LAYOUTS[layout], "after_a_step": after_a_step, **more}
        for rank in run_distributed(f"{CASES}:resumes", 2, kwargs=kwargs):
            assert rank == pytest.approx(losses[0][2:], rel=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["pieces", "pipeline"])
def test_plain_state_dicts_load_before_the_first_step(layout: str) -> None:
    found = run_distributed(
        f"{CASES}:loads_state_before_partition", ranks_of(layout), kwargs={"config": LAYOUTS[layout]}
    )
    for expected, mine in found:
        assert mine == expected


# Pieces of a tensor's elements in row-major order, as boxes ------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (7,), (4, 4), (2, 3, 5), (1, 9), (6, 1), (2, 2, 2, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_boxes_of_a_flat_piece_are_its_elements(shape: tuple[int, ...], ranks: int) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    again = torch.zeros(shape)
    for index in range(ranks):
        layout = ParameterLayout(shape, ((),) * len(shape), flat=Axis("fsdp", range(ranks), index))
        piece = Piece(part_of(whole, layout), layout)
        for box in piece.boxes:
            target = again[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
            assert not target.any()
            target += piece.at(box.offsets)
        assert len(piece.boxes) <= 2 * len(shape)
    assert torch.equal(again, whole)


def test_boxes_of_a_piece_of_a_part_with_sections() -> None:
    whole = torch.arange(12.0 * 5).view(12, 5) + 1
    again = torch.zeros(12, 5)
    for first in range(2):
        for second in range(3):
            tensor, fsdp = Axis("tensor", range(2), first), Axis("fsdp", range(3), second)
            layout = ParameterLayout((12, 5), ((tensor,), ()), sections={0: (8, 4)}, flat=fsdp)
            piece = Piece(part_of(whole, layout), layout)
            for box in boxes_of(layout, (12, 5)):
                target = again[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
                assert not target.any()
                target += piece.at(box.offsets)
    assert torch.equal(again, whole)


@pytest.mark.parametrize(
    ("shape", "pieces"), [((3, 5), (4, 1)), ((7,), (2, 1)), ((4, 4), (4, 0))], ids=["3x5", "7", "4x4"]
)
def test_pieces_are_padded_at_the_end(shape: tuple[int, ...], pieces: tuple[int, int]) -> None:
    length, padding = pieces
    whole = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    parts = [
        part_of(whole, ParameterLayout(shape, ((),) * len(shape), flat=Axis("fsdp", range(4), index)))
        for index in range(4)
    ]
    assert [len(part) for part in parts] == [length] * 4
    assert parts[3].tolist()[length - padding :] == [0.0] * padding
    assert torch.cat(parts)[: whole.numel()].equal(whole.flatten())
