"""What a step takes and what it gives back: options, spellings, results on every rank."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

import smp_lite as smp
from tests.harness import run_distributed
from tests.models import CASES
from tests.models.layers import WIDTH, Chain, regression_batch
from tests.transparency.comparison import NUM_MICROBATCHES, rolled
from tests.transparency.conftest import OpenSession
from tests.transparency.rounds import Round, assert_rounds_equal, leaves_of

BATCH = regression_batch(8)


@pytest.fixture
def model(open_session: OpenSession) -> smp.DistributedModel:
    open_session(2)
    return smp.DistributedModel(Chain())


def test_step_output_methods(model: smp.DistributedModel) -> None:
    @smp.step
    def run(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        output = model(x)
        return output, output.mean()

    output, mean = run(model, BATCH["x"])
    assert isinstance(output, smp.StepOutput)
    assert [tuple(part.shape) for part in output.outputs] == [(2, WIDTH)] * NUM_MICROBATCHES
    assert output.concat().shape == (8, WIDTH)
    assert torch.equal(output.concat(), torch.cat(output.outputs))
    assert output.stack().shape == (NUM_MICROBATCHES, 2, WIDTH)
    assert torch.allclose(mean.reduce_mean(), output.concat().mean())
    assert torch.allclose(output.reduce_sum(), output.stack().sum(0))
    assert mean.reduce_mean().shape == ()
    assert torch.allclose(model.module(BATCH["x"]), output.concat(), atol=1e-6)


def test_structure_of_results(model: smp.DistributedModel) -> None:
    @dataclass
    class Result:
        loss: Tensor
        numbers: list[int]
        rest: Any = None

    @smp.step
    def run(model: Any, x: Tensor) -> Result:
        output = model(x)
        return Result(output.sum(), [3, 4], OrderedDict(a=output, b=("text", None)))

    result = run(model, BATCH["x"])
    assert isinstance(result, Result)
    assert isinstance(result.loss, smp.StepOutput)
    assert result.numbers == [[3] * NUM_MICROBATCHES, [4] * NUM_MICROBATCHES]
    assert type(result.rest) is OrderedDict
    assert isinstance(result.rest["a"], smp.StepOutput)
    assert result.rest["b"] == (["text"] * NUM_MICROBATCHES, None)


def test_results_are_detached_unless_asked(model: smp.DistributedModel) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model(x)

    detached = smp.step(forward)(model, BATCH["x"])
    assert not any(part.requires_grad for part in detached.outputs)
    kept = smp.step(forward, detach_outputs=False)(model, BATCH["x"])
    assert all(part.requires_grad and part.grad_fn is not None for part in kept.outputs)
    assert torch.equal(kept.concat(), detached.concat())


def test_three_spellings_and_a_class_body(model: smp.DistributedModel) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        """Runs it."""
        return model(x)

    class Trainer:
        @smp.step()
        def forward(model: Any, x: Tensor) -> Tensor:
            return model(x)

    found = [smp.step(forward), smp.step()(forward), smp.step(non_split_inputs=[])(forward)]
    results = [step(model, x=BATCH["x"]).concat() for step in (*found, Trainer().forward)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert found[0].__name__ == "forward"
    assert found[0].__doc__ == "Runs it."


def test_options_that_say_how_to_split(model: smp.DistributedModel) -> None:
    seen = []

    @smp.step(non_split_inputs=["scale", "table"], input_split_axes={"columns": 1, "nested": -1})
    def run(
        model: Any,
        x: Tensor,
        columns: Tensor,
        nested: dict[str, list[Tensor]],
        scale: Tensor,
        table: list[Tensor],
        flag: bool = True,
        **more: Tensor,
    ) -> Tensor:
        seen.append((columns, nested, scale, table, flag, more))
        return model(x) * scale[0]

    columns, last = torch.arange(16).view(2, 8), torch.arange(24).view(3, 8)
    scale, table = torch.arange(1.0, 3.0), [torch.zeros(3)]
    run(model, BATCH["x"], columns, {"a": [last]}, scale, table=table, flag=False, y=BATCH["target"])
    assert len(seen) == NUM_MICROBATCHES
    for m, (c, n, s, t, flag, more) in enumerate(seen):
        assert torch.equal(c, columns[:, 2 * m : 2 * m + 2])
        assert torch.equal(n["a"][0], last[:, 2 * m : 2 * m + 2])
        assert torch.equal(s, scale)
        assert t[0].shape == (3,)
        assert flag is False
        assert torch.equal(more["y"], BATCH["target"][2 * m : 2 * m + 2])


def test_objects_that_split_themselves(model: smp.DistributedModel) -> None:
    class Images:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Images:
            assert axis == 0
            return Images(self.tensor.chunk(num_mb)[mb])

    @smp.step
    def run(model: Any, images: Images) -> Tensor:
        return model(images.tensor)

    @smp.step
    def plain(model: Any, x: Tensor) -> Tensor:
        return model(x)

    x = BATCH["x"]
    assert torch.equal(run(model, Images(x)).concat(), plain(model, x).concat())


def test_body_runs_once_for_each_microbatch(model: smp.DistributedModel) -> None:
    calls = []

    @smp.step
    def run(model: Any, x: Tensor) -> Tensor:
        calls.append(x.sum().item())
        output = model(x)
        model.backward(output.sum())
        return output

    for num_steps in (1, 2, 3):
        run(model, BATCH["x"])
        assert len(calls) == num_steps * NUM_MICROBATCHES
    assert len(set(calls)) == NUM_MICROBATCHES


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["gpt", "batchnorm", "data_branch", "layer_drop", "dropout", "stateful"])
@pytest.mark.parametrize("inference", [False, True])
def test_evaluation(name: str, inference: bool, open_session: OpenSession) -> None:
    case = CASES[name]
    open_session(3, "zigzag")

    def evaluate(model: Any, batch: dict[str, Tensor], backward: Any) -> Any:
        with torch.inference_mode(inference):
            return case.loss_of(case.forward_loss(model, batch))

    batches = [rolled(case.batch(8), step_index) for step_index in range(2)]
    assert_rounds_equal(
        case.build,
        [Round(evaluate, batch, before=torch.nn.Module.eval, no_grad=True) for batch in batches],
    )


@pytest.mark.unpretended
def test_batches_made_in_inference_mode(open_session: OpenSession) -> None:
    """As by a loader that is read there; the model is partitioned by one, and trains afterwards."""
    open_session(2)
    plain = Chain()
    model = smp.DistributedModel(copy.deepcopy(plain))

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    for step_index in range(3):
        with torch.inference_mode():
            x = regression_batch(8)["x"] + step_index
            assert torch.equal(evaluate(model, x).concat(), torch.cat([plain(part) for part in x.chunk(4)]))


def test_only_forward_schedule(open_session: OpenSession) -> None:
    open_session(3, pipeline="_only_forward")
    case = CASES["unet"]

    def evaluate(model: Any, batch: dict[str, Tensor], backward: Any) -> Any:
        return case.forward_loss(model, batch)

    assert_rounds_equal(case.build, [Round(evaluate, case.batch(8), no_grad=True)], "auto")


def results_of_every_kind() -> list[Any]:
    """On one rank: results made on the first and on the last stage, floats and parameters."""
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(Chain())

    @smp.step
    def run(model: Any, x: Tensor) -> Any:
        first = model.module.blocks[0](x)
        output = model(x)
        loss = output.square().mean()
        model.backward(loss)
        return {
            "loss": loss,
            "first": first,
            "output": output,
            "integers": output.argmax(-1),
            "item": output.detach().mean().item(),
            "weight": model.module.head.weight,
            "batch": x,
            "large": output.repeat(1, 4096),
        }

    results = [leaves_of(run(model, BATCH["x"])) for _ in range(2)]
    return [
        [part.tolist() for part in leaf] if isinstance(leaf, list) else leaf
        for leaves in results
        for leaf in leaves
    ]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_results_are_valid_on_every_rank(num_ranks: int) -> None:
    found = run_distributed(
        "tests.transparency.values.test_step_results:results_of_every_kind",
        num_ranks,
        parameters={"partitions": num_ranks, "microbatches": NUM_MICROBATCHES},
    )
    assert len(found[0]) == 2 * (7 + NUM_MICROBATCHES)  # numbers are leaves one by one
    assert all(result == found[0] for result in found)


def numbers_of_each_kind() -> tuple[list[tuple[str, list[float], list[int]]], list[float]]:
    """Single numbers that a step returns: dtype, values, bytes of memory that each holds; and the losses."""
    smp.init()
    torch.manual_seed(0)
    plain = Chain()
    model = smp.DistributedModel(copy.deepcopy(plain))

    @smp.step
    def run(model: Any, x: Tensor, number: int) -> Tensor:
        loss = model(x).mean()
        wide = [loss.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64)]
        return [loss, *wide, (loss > 0).sum(), loss > 0, loss.to(torch.uint8)][number]

    expected = [float(plain(x).mean()) for x in BATCH["x"].chunk(NUM_MICROBATCHES)]
    found = []
    for kind in range(8):
        output = run(model, BATCH["x"], kind)
        numbers = [complex(number.item()).real for number in output.outputs]
        sizes = [number.untyped_storage().nbytes() for number in output.outputs]
        assert all(number.shape == () and not number.requires_grad for number in output.outputs)
        found.append((str(output.outputs[0].dtype), numbers, sizes))
    return found, expected


def test_single_numbers_of_each_kind() -> None:
    """They travel side by side; each has memory of its own, so that a kept loss keeps no other."""
    found = run_distributed(
        "tests.transparency.values.test_step_results:numbers_of_each_kind",
        2,
        parameters={"partitions": 2, "microbatches": NUM_MICROBATCHES},
    )
    for kinds, losses in found:
        assert len(kinds) == 8
        for kind, numbers, sizes in kinds:
            dtype = getattr(torch, kind.removeprefix("torch."))
            signs = [float(loss > 0) for loss in losses]
            made = signs if kind in ("torch.int64", "torch.bool") else losses
            assert numbers == [complex(torch.tensor(number).to(dtype).item()).real for number in made], kind
            assert sizes == [dtype.itemsize] * NUM_MICROBATCHES, kind


class Last:
    """Returns what the microbatch before has made, also that of an earlier step."""

    def __init__(self) -> None:
        self.last: dict[int, Any] = {}

    def __call__(self, model: Any, batch: Any, backward: Any) -> Any:
        output = model(batch["x"])
        backward(output.mean())
        last = self.last.get(id(model), output)
        self.last[id(model)] = output.detach()
        return last, {"more": output * 2.0}


@pytest.mark.parametrize("num_steps", [1, 6])
def test_a_value_of_an_earlier_microbatch_is_returned(num_steps: int, open_session: OpenSession) -> None:
    open_session(2)
    assert_rounds_equal(Chain, [Round(Last(), BATCH)] * num_steps, "auto")


def test_a_gradient_that_is_written_anew(open_session: OpenSession) -> None:
    """Given to ``model.backward``, which in one process has used it by then."""
    gradient = torch.ones(2, WIDTH)

    def step(model: Any, batch: Any, backward: Any) -> Tensor:
        output = model(batch["x"])
        gradient.fill_(float(batch["x"][0, 0]))
        backward(output, gradient)
        gradient.zero_()
        return output

    open_session(2)
    assert_rounds_equal(Chain, [Round(step, BATCH)] * 5, "auto")


@pytest.mark.parametrize("on_all", [False, True])
def test_hooks_that_are_put_on_in_the_midst_of_a_step(on_all: bool, open_session: OpenSession) -> None:
    """They are for the calls after that line, also where those before it run later; left on to the end."""
    calls: dict[int, int] = {}
    handles: list[Any] = []

    def doubled(module: torch.nn.Module, args: Any, result: Any) -> Any:
        return result * 2.0 if type(module) is torch.nn.Linear else None

    def step(model: Any, batch: Any, backward: Any) -> Tensor:
        number = calls[id(model)] = calls.get(id(model), 0) + 1
        head = (model.module if isinstance(model, smp.DistributedModel) else model).head
        if number % NUM_MICROBATCHES == 3:
            register = register_module_forward_hook if on_all else head.register_forward_hook
            handles.append(register(doubled))
        output = model(batch["x"])
        backward(output.mean())
        return output

    def remove(module: torch.nn.Module) -> None:
        while handles:
            handles.pop().remove()

    open_session(2)
    try:
        assert_rounds_equal(Chain, [Round(step, BATCH, remove)] * 5, "auto")
    finally:
        remove(torch.nn.Identity())


def test_hooks_inside_that_are_put_on_in_the_midst_of_a_step(open_session: OpenSession) -> None:
    open_session(2)
    model = smp.DistributedModel(Chain())

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        inner = next(iter(model.module.blocks[0].children()))
        inner.register_forward_hook(lambda module, args, result: result * 2.0)
        model.backward(output.mean())
        return output

    with pytest.raises(smp.SMPError, match="put hooks on between steps"):
        step(model, BATCH["x"])


@pytest.mark.parametrize("on", [[0, 1], [0], [1]])
def test_values_that_are_kept_on_some_ranks(on: list[int]) -> None:
    """Others do not know that somebody wants them, so they have no data, which is said when they are read."""
    found = run_distributed(
        "tests.transparency.ranks:keep_values",
        2,
        kwargs={"on": on, "num_steps": 5},
        parameters={"partitions": 2, "microbatches": NUM_MICROBATCHES},
    )
    for rank, (right, texts) in enumerate(found):
        if len(on) == 2:
            assert right == [True] * 5 * NUM_MICROBATCHES
        else:
            assert right == []
            assert len(texts) == (5 * NUM_MICROBATCHES if rank in on else 0)
            assert all("or keep it on every rank" in text for text in texts)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_backward_outside_of_the_step(num_stages: int, open_session: OpenSession) -> None:
    """It would reach one stage's part of the graph, and on other ranks nothing."""
    kept: list[Tensor] = []

    def forward(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        kept.append(output.square().mean())
        return output

    open_session(num_stages)
    model = smp.DistributedModel(Chain())
    with_graph = smp.step(forward, detach_outputs=False)(model, BATCH["x"]).reduce_mean()
    penalty = next(model.parameters()).sum()  # sums save nothing
    if num_stages == 1:
        (with_graph.mean() + penalty).backward()
    else:
        with pytest.raises(smp.SMPError, match=r"model\.backward\(loss\) inside"):
            (with_graph.mean() + penalty).backward()
    kept[0] += 1.0
    with pytest.raises(smp.SMPError, match=r"model\.backward\(loss\) inside"):
        (sum(kept) + penalty).backward()


def test_what_is_no_tensor_says_what_to_take(model: smp.DistributedModel) -> None:
    loss = smp.step(lambda model, x: model(x).mean())(model, BATCH["x"])
    for use in (lambda: loss.item(), lambda: loss.mean()):
        with pytest.raises(AttributeError, match=r"reduce_mean\(\)"):
            use()
    for use in (lambda: float(loss), lambda: loss[0], lambda: f"{loss:.3f}"):
        with pytest.raises(TypeError, match=r"reduce_mean\(\)"):
            use()
    assert f"{loss}".startswith("StepOutput([")
    assert copy.deepcopy(loss).outputs[0] == loss.outputs[0]
    assert not hasattr(loss, "shape")
    with pytest.raises(TypeError, match=r"smp.step: <lambda>\(\): missing a required argument: 'x'"):
        smp.step(lambda model, x: model(x))(model)
