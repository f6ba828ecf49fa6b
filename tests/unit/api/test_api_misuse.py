"""What a user can do wrong in a step: each gets an error that says what and what to do instead.

A failed step must leave nothing behind: after each error the same model is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.api_support import Net, batch, build, in_memory, plain_train, same, train, wrap

pytestmark = pytest.mark.filterwarnings("ignore:Stage ")
SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(autouse=True)
def _session() -> None:
    in_memory()


@pytest.fixture
def model() -> Iterator[Any]:
    """A model; checks afterwards that it still trains as the plain one does."""
    net = build()
    model, _ = wrap(net, SGD)
    state = model.state_dict()
    yield model
    model.load_state_dict(state)
    model.train()
    for parameter in net.parameters():
        parameter.grad = None
    plain = Net()
    plain.load_state_dict(state)
    assert same(train(model, *batch()).stack(), plain_train(plain, *batch()))
    assert same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def attempt(model: Any, body: Callable[[Any, Tensor, Tensor], Any], *, first: bool) -> Any:
    """One step with that body, as the first or the second step of the model."""
    if not first:
        train(model, *batch())
    return smp.step(body)(model, *batch(1))


FIRST_OR_LATER = pytest.mark.parametrize("first", [True, False], ids=["first", "later"])


@FIRST_OR_LATER
def test_an_exception_in_the_step_comes_out_as_it_is(model: Any, first: bool) -> None:
    def before(model: Any, x: Tensor, target: Tensor) -> None:
        raise KeyError("mine")

    def after_forward(model: Any, x: Tensor, target: Tensor) -> None:
        model(x)
        raise KeyError("mine")

    def after_backward(model: Any, x: Tensor, target: Tensor) -> None:
        model.backward(F.mse_loss(model(x), target))
        raise KeyError("mine")

    for body in (before, after_forward, after_backward):
        with pytest.raises(KeyError, match="mine"):
            attempt(model, body, first=first)


@FIRST_OR_LATER
def test_an_exception_inside_the_model_comes_out_as_it_is(first: bool) -> None:
    class Fails(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("mine")
            return super().forward(x)

    net = Fails()
    model, _ = wrap(net, SGD)
    if not first:
        train(model, *batch())
    net.fails = True
    with pytest.raises(KeyError, match="mine"):
        train(model, *batch())
    net.fails = False
    train(model, *batch())


def test_the_model_called_outside_a_step(model: Any) -> None:
    for _ in range(2):
        with pytest.raises(smp.SMPError, match=r"outside a function decorated with @smp\.step"):
            model(batch()[0])
        train(model, *batch())


def test_backward_outside_a_step(model: Any) -> None:
    loss = train(model, *batch()).reduce_mean()
    with pytest.raises(smp.SMPError, match=r"model\.backward\(\) was called outside a function"):
        model.backward(loss)


@FIRST_OR_LATER
def test_the_losss_own_backward_inside_a_step(model: Any, first: bool) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        F.mse_loss(model(x), target).backward()

    with pytest.raises(smp.SMPError, match=r"model\.backward"):
        attempt(model, body, first=first)


def test_a_returned_losss_own_backward_after_the_step(model: Any) -> None:
    loss = train(model, *batch()).reduce_mean()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model, x: (x * x).mean(),
        lambda model, x: torch.zeros((), requires_grad=True) * 2,
        lambda model, x: model(x).mean().detach(),
        lambda model, x: (model(x) * 0).detach().mean() + x.mean(),
        lambda model, x: no_grad_loss(model, x),
    ],
    ids=["inputs", "own leaf", "detached", "detached part", "no_grad"],
)
@FIRST_OR_LATER
def test_a_loss_that_depends_on_no_parameter(
    model: Any, first: bool, loss_of: Callable[[Any, Tensor], Tensor]
) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        model(x)
        model.backward(loss_of(model, x))

    with pytest.raises(smp.SMPError, match="does not depend on any parameter"):
        attempt(model, body, first=first)


def no_grad_loss(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).mean()


def test_a_loss_without_calling_the_model(model: Any) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        model.backward(x.mean())

    with pytest.raises(smp.SMPError, match="does not depend on any parameter"):
        attempt(model, body, first=True)


@FIRST_OR_LATER
def test_a_loss_with_several_elements(model: Any, first: bool) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        model.backward(model(x) - target)

    with pytest.raises(smp.SMPError, match=r"shape \(2, 1\), not one element"):
        attempt(model, body, first=first)


def test_a_loss_that_is_no_tensor(model: Any) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        model(x)
        model.backward(3.0)

    with pytest.raises(smp.SMPError, match="does not depend on any parameter"):
        attempt(model, body, first=True)


def test_losses_and_output_gradients_of_different_numbers(model: Any) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        out = model(x)
        model.backward([out, out], [target])

    with pytest.raises(ValueError, match="2 tensors and 1 grad_tensors"):
        attempt(model, body, first=True)


@FIRST_OR_LATER
def test_several_backwards_over_shared_values_add_up(model: Any, first: bool) -> None:
    # Plain torch needs retain_graph=True; here the graph is kept until the step's end anyway.
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        out = model(x)
        model.backward(F.mse_loss(out, target))
        model.backward(out.mean())

    attempt(model, body, first=first)
    plain = build()
    if not first:
        plain_train(plain, *batch())
    for x, target in zip(*(part.chunk(2) for part in batch(1)), strict=True):
        out = plain(x)
        ((F.mse_loss(out, target) + out.mean()) / 2).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_explicit_output_gradients(model: Any) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> Tensor:
        out = model(x)
        model.backward([out], [torch.full_like(target, 0.5)])
        return out

    plain = build()
    out = attempt(model, body, first=True).concat()
    for part, got in zip(batch(1)[0].chunk(2), out.chunk(2), strict=True):
        wanted = plain(part)
        wanted.backward(torch.full_like(wanted, 0.25))
        assert same(got, wanted.detach())
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_a_batch_that_microbatches_do_not_divide_names_the_argument(model: Any) -> None:
    x, target = batch(samples=5)
    with pytest.raises(ValueError, match=r"'x' has 5 samples on axis 0, which microbatches=2"):
        train(model, x, target)
    nested = smp.step(lambda model, inputs: None)
    with pytest.raises(ValueError, match=r"inputs\['a'\]\[1\]\" has 3 samples"):
        nested(model, {"a": [x[:4], x[:3]]})


def test_a_data_loader_as_an_argument(model: Any) -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3, 4])
    for argument in (loader, iter(loader)):
        with pytest.raises(TypeError, match="take the batch out of it first"):
            smp.step(lambda model, data: None)(model, argument)


def test_a_step_in_a_step(model: Any) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        train(model, x, target)

    with pytest.raises(smp.SMPError, match="inside another step"):
        attempt(model, body, first=True)


def test_options_of_step_that_name_no_argument() -> None:
    with pytest.raises(ValueError, match=r"body\(\) has no argument 'y'; it has \['x'\]"):

        @smp.step(non_split_inputs=["y"])
        def body(x: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"detach_outputs": "no"}, TypeError, r"detach_outputs='no' \(str\): write True or False"),
        ({"detach_outputs": None}, TypeError, r"detach_outputs=None \(NoneType\): write True or False"),
        ({"non_split_inputs": 3}, TypeError, r"non_split_inputs=3 \(int\): give a list of names"),
        ({"non_split_inputs": "x"}, TypeError, r"non_split_inputs='x' \(str\): give a list of names"),
        ({"non_split_inputs": [0]}, TypeError, r"non_split_inputs=\[0\] \(list\): give a list of names"),
        ({"input_split_axes": [0]}, TypeError, r"input_split_axes=\[0\] \(list\): give a dictionary of axes"),
        ({"input_split_axes": {"x": "0"}}, TypeError, r"the axis of 'x' must be a whole number"),
        ({"input_split_axes": {"x": True}}, TypeError, r"the axis of 'x' must be a whole number"),
        ({"input_split_axes": {0: 1}}, TypeError, r"its key 0 must be the name of an argument"),
        (
            {"input_split_axes": {"x": 1}, "non_split_inputs": ["x"]},
            ValueError,
            r"argument 'x' is in non_split_inputs, so it is not cut, and in input_split_axes.* leave it out",
        ),
    ],
)
def test_options_of_step_of_another_kind(options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=rf"^smp\.step: .*{text}"):

        @smp.step(**options)
        def body(x: Tensor) -> None: ...


def test_options_of_step_in_other_containers() -> None:
    @smp.step(non_split_inputs=("x",), input_split_axes={"y": np.int64(1)}, detach_outputs=False)
    def body(x: Tensor, y: Tensor) -> None: ...


def test_a_second_model_and_double_wrapping(model: Any) -> None:
    for module in (build(), model):
        with pytest.raises(smp.SMPError, match="there is a DistributedModel already"):
            smp.DistributedModel(module)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_that_cannot_be_wrapped() -> None:
    with pytest.raises(smp.SMPError, match="TorchScript"):
        smp.DistributedModel(torch.jit.trace(nn.Linear(4, 1), torch.zeros(1, 4)))
    with pytest.raises(TypeError, match=r"nn\.Module"):
        smp.DistributedModel(lambda x: x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_traced_part_is_refused_in_the_first_step_by_its_name(stages: int) -> None:
    smp.reset()
    smp.init_in_memory({"partitions": stages, "microbatches": 2})
    traced = torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))
    model = smp.DistributedModel(nn.Sequential(traced, nn.Linear(4, 1)))
    with pytest.raises(smp.SMPError, match=r"Linear with weight, bias, was made by torch\.jit\.trace"):
        train(model, *batch())


def test_init_twice_and_calls_before_init() -> None:
    assert smp.is_initialized()
    with pytest.raises(smp.SMPError, match="twice"):
        in_memory()
    has = smp.state.cfg.model_dump()
    for again in (None, {"partitions": 2, "microbatches": has["microbatches"]}):
        smp.init(again)  # transformers calls it before the script does
    with pytest.raises(
        smp.SMPError, match=r"other parameters: microbatches=3 \(is \d\). The first call counts"
    ):
        smp.init({"partitions": 2, "microbatches": 3})
    assert smp.state.cfg.model_dump() == has
    smp.reset()
    assert not smp.is_initialized()
    assert not smp.is_tracing()
    for call in (smp.rank, smp.mp_size, smp.barrier, lambda: smp.DistributedModel(build())):
        with pytest.raises(smp.SMPError, match=r"call smp\.init\(\) first"):
            call()
    with pytest.raises(smp.SMPError, match=r"call smp\.init\(\) first"):
        train(None, *batch())


@pytest.mark.ci
def test_groups_of_torch_where_one_process_plays_all_stages() -> None:
    """Scripts reduce losses over the dp group, also under `smp-lite check`."""
    with pytest.raises(smp.SMPError, match="set ddp: True"):
        smp.get_dp_process_group()
    for _ in range(2):
        smp.reset()
        in_memory(ddp=True)
        loss = torch.ones(1)
        for group in (smp.get_dp_process_group(), smp.get_world_process_group(), smp.get_mp_process_group()):
            torch.distributed.all_reduce(loss, group=group)
        assert float(loss) == 1
    smp.reset()
    assert not torch.distributed.is_initialized()


def _twice(module: nn.Module, *gradients: Any) -> Any:
    return tuple(None if each is None else each * 2 for each in gradients[0])


PUT_ON = {
    "module": lambda net: net.last[1].register_full_backward_hook(_twice),
    "before": lambda net: net.last[1].register_full_backward_pre_hook(_twice),
    "parameter": lambda net: net.last[1].weight.register_hook(lambda gradient: gradient * 2),
}


@FIRST_OR_LATER
@pytest.mark.parametrize("kind", PUT_ON)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_backward_hook_taken_off_before_the_backward_runs(kind: str, at_the_end: bool, first: bool) -> None:
    net = build()
    model, _ = wrap(net, SGD)

    def body(model: Any, x: Tensor, target: Tensor) -> None:
        loss = F.mse_loss(model(x), target)
        if not at_the_end:
            handle.remove()
        model.backward(loss)
        handle.remove()

    if not first:
        train(model, *batch())
    handle = PUT_ON[kind](net)
    with pytest.raises(smp.SMPError, match=r"a backward hook was taken off 'last\.1.* inside an smp\.step"):
        smp.step(body)(model, *batch(1))
    handle.remove()
    train(model, *batch())


def test_a_backward_hook_may_be_taken_off_before_anything_or_by_itself() -> None:
    net, plain = build(), build()
    model, _ = wrap(net, SGD)
    handles: dict[int, Any] = {}

    def twice_once(module: nn.Module, *gradients: Any) -> Any:
        handles.pop(id(module)).remove()
        return _twice(module, *gradients)

    def body(model: Any, x: Tensor, target: Tensor, first: Any, is_plain: bool) -> None:
        first.remove()
        loss = F.mse_loss(model(x), target)
        (loss / 2).backward() if is_plain else model.backward(loss)

    for module in (net.last[1], plain.last[1]):
        handles[id(module)] = module.register_full_backward_pre_hook(twice_once)
    smp.step(body)(model, *batch(), PUT_ON["module"](net), False)
    first = PUT_ON["module"](plain)
    for x, target in zip(*(each.chunk(2) for each in batch()), strict=True):
        body(plain, x, target, first, True)
    assert not handles
    assert same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


@FIRST_OR_LATER
def test_a_tensor_changed_where_nobody_sees_it_after_a_call_has_read_it(model: Any, first: bool) -> None:
    def body(model: Any, x: Tensor, target: Tensor) -> None:
        weight = torch.ones(3)
        loss = F.mse_loss(model(x) + weight, target)
        with torch._C.DisableTorchFunction():
            weight.mul_(2)
        model.backward(loss)

    with pytest.raises(smp.SMPError, match=r"of shape \(3,\) was changed in place after a call had read it"):
        attempt(model, body, first=first)
