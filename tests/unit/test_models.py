"""The test models do what their cases promise, and the notebooks' model and text what they say.

A case that never branches, or whose gradient is silently zero, would let a wrong library pass; so
each promise is checked here on the plain model, without the library.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from notebooks.gpt import GPT
from notebooks.text import get_batch, read_text
from tests.models import CASES, Case, PlainStep, plain_step, split_batch

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = 8
NUM_MICROBATCHES = 4

each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=pytest.mark.skipif(not case.available, reason=f"{case.requires} not installed"),
        )
        for case in CASES.values()
    ],
)


def run_once(case: Case, seed: int = 0) -> tuple[nn.Module, PlainStep]:
    torch.manual_seed(seed)
    model = case.build()
    if case.install_hooks is not None:
        case.install_hooks(model)
    return model, plain_step(case, model, case.batch(NUM_SAMPLES), NUM_MICROBATCHES)


def forward_calls(case_name: str) -> list[list[str]]:
    """Names of the modules that each microbatch of a case calls, in order."""
    case = CASES[case_name]
    torch.manual_seed(0)
    model = case.build()
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    calls_by_microbatch = []
    for batch in split_batch(case.batch(NUM_SAMPLES), NUM_MICROBATCHES):
        calls.clear()
        case.forward_loss(model, batch)
        calls_by_microbatch.append(list(calls))
    return calls_by_microbatch


@each_case
def test_step_gives_finite_losses_and_the_promised_gradients(case: Case) -> None:
    model, step = run_once(case)

    assert all(torch.isfinite(loss) and loss.shape == () for loss in step.losses)
    with_gradient = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert with_gradient == trainable - case.unused_parameters
    assert case.unused_parameters <= trainable


@each_case
def test_same_seed_gives_the_same_bits(case: Case) -> None:
    first_model, first = run_once(case)
    second_model, second = run_once(case)

    assert torch.equal(torch.stack(first.losses), torch.stack(second.losses))
    second_parameters = dict(second_model.named_parameters())
    for name, parameter in first_model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, second_parameters[name].grad), name
    second_buffers = dict(second_model.named_buffers())
    for name, buffer in first_model.named_buffers():
        assert torch.equal(buffer, second_buffers[name]), name


@each_case
def test_batch_has_samples_first_and_leaves_the_global_stream_alone(case: Case) -> None:
    state = torch.get_rng_state()
    first, second = case.batch(NUM_SAMPLES), case.batch(NUM_SAMPLES)

    assert torch.equal(torch.get_rng_state(), state)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.shape[0] == NUM_SAMPLES
        assert torch.equal(tensor, second[name])


@each_case
def test_model_is_small(case: Case) -> None:
    assert sum(parameter.numel() for parameter in case.build().parameters()) < 200_000


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@each_case
def test_zigzag_uses_all_stages_and_keeps_shared_parameters_together(case: Case, num_stages: int) -> None:
    state = torch.get_rng_state()
    stages = case.manual_stages(num_stages)

    assert torch.equal(torch.get_rng_state(), state)
    assert set(stages.values()) == set(range(num_stages))
    stages_of_parameter: dict[nn.Parameter, set[int]] = {}
    modules = dict(case.build().named_modules())
    for name, stage in stages.items():
        for parameter in modules[name].parameters():
            stages_of_parameter.setdefault(parameter, set()).add(stage)
    assert all(len(found) == 1 for found in stages_of_parameter.values())


def test_zigzag_jumps_both_ways() -> None:
    stages = CASES["gpt"].manual_stages(4)
    order = ["token_embedding", "position_embedding", *(f"blocks.{i}" for i in range(4)), "norm"]
    assert [stages[name] for name in order] == [0, 3, 1, 2, 0, 3, 1]
    assert stages["blocks.0.mlp.2"] == stages["blocks.0"]


def test_names_are_keys() -> None:
    assert all(name == case.name for name, case in CASES.items())


def test_split_refuses_uneven_batches() -> None:
    with pytest.raises(ValueError, match="'x' has 8 samples, which do not divide into 3"):
        split_batch(CASES["reuse"].batch(8), 3)


def test_models_know_nothing_of_the_library() -> None:
    files = [*(ROOT / "tests" / "models").glob("*.py"), ROOT / "notebooks" / "gpt.py"]
    assert len(files) > 5
    assert [path.name for path in files if "smp_lite" in path.read_text()] == []


def test_reuse_calls_one_module_three_times() -> None:
    assert [calls.count("shared") for calls in forward_calls("reuse")] == [3] * NUM_MICROBATCHES


def test_data_branch_goes_both_ways() -> None:
    taken = [{"positive", "negative"} & set(calls) for calls in forward_calls("data_branch")]
    assert {"positive"} in taken
    assert {"negative"} in taken


def test_data_loop_has_different_lengths_and_repeats_a_block() -> None:
    all_calls = forward_calls("data_loop")
    num_rounds = [sum(calls.count(f"blocks.{i}") for i in range(4)) for calls in all_calls]
    assert len(set(num_rounds)) >= 3
    assert max(num_rounds) > 4


def test_layer_drop_skips_other_blocks_each_time() -> None:
    ran = [
        frozenset(name for name in calls if name in {f"blocks.{i}" for i in range(6)})
        for calls in forward_calls("layer_drop")
    ]
    assert len(set(ran)) > 1


@pytest.mark.parametrize("name", ["index_boolean", "index_activations"])
def test_selected_rows_differ_between_microbatches(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    num_rows = []
    model.blocks[2].register_forward_hook(lambda _module, args, _out: num_rows.append(len(args[0])))
    for batch in split_batch(case.batch(NUM_SAMPLES), NUM_MICROBATCHES):
        case.forward_loss(model, batch)
    assert len(set(num_rows)) > 1
    assert min(num_rows) > 0


def test_hooks_count_and_change_values() -> None:
    case = CASES["hooks"]
    torch.manual_seed(0)
    model = case.build()
    batch = case.batch(NUM_SAMPLES)
    loss_without = plain_step(case, model, batch, 1).losses[0]
    gradient_without = model.stem.weight.grad.clone()
    model.zero_grad()
    record = case.install_hooks(model)
    loss_with = plain_step(case, model, batch, NUM_MICROBATCHES).losses

    expected = {f"blocks.{i}": NUM_MICROBATCHES for i in range(4)}
    assert record.forward_calls == expected
    assert record.backward_calls == expected
    assert not torch.isclose(torch.stack(loss_with).mean(), loss_without)
    assert not torch.allclose(model.stem.weight.grad, gradient_without)


@pytest.mark.parametrize("name", ["batchnorm", "stateful"])
def test_step_changes_buffers(name: str) -> None:
    torch.manual_seed(0)
    before = {key: buffer.clone() for key, buffer in CASES[name].build().named_buffers()}
    model, _ = run_once(CASES[name])
    assert before
    for key, buffer in model.named_buffers():
        assert not torch.equal(buffer, before[key]), key


def test_dropout_and_layer_drop_draw_from_the_global_stream() -> None:
    for name in ("dropout", "layer_drop"):
        case = CASES[name]
        torch.manual_seed(0)
        model = case.build()
        batch = case.batch(NUM_SAMPLES)
        losses = [case.loss_of(case.forward_loss(model, batch)) for _ in range(6)]
        assert len({loss.item() for loss in losses}) > 1, name


def test_autocast_runs_its_blocks_in_bfloat16() -> None:
    case = CASES["autocast_part"]
    model = case.build()
    dtypes = {}
    for name, module in (("block", model.blocks[1]), ("head", model.head)):
        module.register_forward_hook(lambda _module, _args, out, name=name: dtypes.update({name: out.dtype}))
    case.forward_loss(model, case.batch(2))
    assert dtypes == {"block": torch.bfloat16, "head": torch.float32}


def test_gpt_gives_logits_and_reads_no_later_token() -> None:
    model = GPT(d_model=16, num_blocks=2, num_heads=2, context=8)
    tokens = torch.randint(256, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    logits, changed_logits = model(tokens), model(changed)

    assert logits.shape == (2, 8, 256)
    assert torch.equal(logits[:, :5], changed_logits[:, :5])
    assert not torch.allclose(logits[:, 5:], changed_logits[:, 5:])


def test_gpt_names_the_way_out_of_bad_sizes() -> None:
    with pytest.raises(ValueError, match="d_model=10 is not divisible by num_heads=4"):
        GPT(d_model=10, num_heads=4)
    with pytest.raises(ValueError, match="9 tokens do not fit context=8"):
        GPT(d_model=16, num_heads=2, context=8)(torch.zeros(1, 9, dtype=torch.int64))


def test_gpt_learns_the_text() -> None:
    torch.manual_seed(0)
    text = read_text(200_000)
    model = GPT(d_model=32, num_blocks=2, num_heads=2, context=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        tokens, targets = get_batch(text, step, batch_size=16, context=16)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # log 256: nothing known yet
    assert sum(losses[-5:]) / 5 < 3.5


def test_text_is_the_librarys_source_and_the_same_each_time() -> None:
    text = read_text(100_000)
    assert text.dtype == torch.uint8
    assert text.shape == (100_000,)
    assert b"\nimport " in bytes(text.tolist())
    assert torch.equal(text, read_text(100_000))
    assert torch.equal(text[:5_000], read_text(5_000))


def test_replicas_share_one_draw() -> None:
    text = read_text(50_000)
    sizes = {"batch_size": 4, "context": 10}
    replicas = [get_batch(text, 3, **sizes, dp_rank=rank, dp_size=2) for rank in (0, 1)]
    tokens, targets = get_batch(text, 3, batch_size=8, context=10)

    assert torch.equal(torch.cat([replicas[0][0], replicas[1][0]]), tokens)
    assert torch.equal(torch.cat([replicas[0][1], replicas[1][1]]), targets)
    assert not torch.equal(replicas[0][0], replicas[1][0])
    assert not torch.equal(get_batch(text, 4, batch_size=8, context=10)[0], tokens)


def test_targets_are_the_next_bytes() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    tokens, targets = get_batch(text, 0, batch_size=5, context=7)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (5, 7)
    assert torch.equal(targets, tokens + 1)


def test_text_shorter_than_a_sample_is_refused() -> None:
    text = torch.arange(8, dtype=torch.uint8)
    assert get_batch(text, 0, batch_size=2, context=7)[1][0, -1] == 7
    with pytest.raises(ValueError, match="context=8 needs a text of at least 9 bytes, not 8"):
        get_batch(text, 0, batch_size=2, context=8)
