"""Hooks that know of each other, over the parts that a pipeline cuts a backward into; run in ranks by
:mod:`tests.harness`.

Each way to hook is a function of the model; a model has blocks, of which some lie with a part of them on
another stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp_lite as smp
from tests.models import split_batch
from tests.transparency.comparison import NUM_MICROBATCHES

__all__ = ["ALLOWED", "READS", "SHARES", "outcomes"]

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def count_and_call(self, parameter: Tensor) -> None:
        self.calls += 1
        self.scale(parameter)

    def scale(self, parameter: Tensor) -> None:
        parameter.grad.mul_(1 + self.calls % 5)

    def count_and_scale(self, parameter: Tensor) -> None:
        self.calls += 1
        parameter.grad.mul_(1 + self.calls % 5)


Hooks = Callable[[Net], None]


def everywhere(net: Net, hook: Callable[[Tensor], None]) -> None:
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


# Gradients that depend on what hooks of other parts have counted -----------------------------------------


def counts_in_a_default(net: Net) -> None:
    state = [0]

    def hook(parameter: Tensor, state: list[int] = state) -> None:
        state[0] += 1
        parameter.grad.mul_(1 + state[0] % 5)

    everywhere(net, hook)


def counts_in_a_keyword(net: Net) -> None:
    state = {"n": 0}

    def hook(parameter: Tensor, *, state: dict[str, int] = state) -> None:
        state["n"] += 1
        parameter.grad *= 1 + state["n"] % 5

    everywhere(net, hook)


def counts_in_an_attribute(net: Net) -> None:
    everywhere(net, net.count_and_scale)


def counts_and_calls_a_method(net: Net) -> None:
    everywhere(net, net.count_and_call)


def counts_in_the_model(net: Net) -> None:
    def hook(parameter: Tensor) -> None:
        net.calls += 1
        parameter.grad[...] = parameter.grad * (1 + net.calls % 5)

    everywhere(net, hook)


def counts_in_the_function(net: Net) -> None:
    def hook(parameter: Tensor) -> None:
        hook.calls += 1
        gradient = parameter.grad
        gradient *= 1 + hook.calls % 5

    hook.calls = 0
    everywhere(net, hook)


def counts_around(net: Net) -> None:
    calls = 0

    def hook(parameter: Tensor) -> None:
        nonlocal calls
        calls += 1
        parameter.grad = parameter.grad * (1 + calls % 5)

    everywhere(net, hook)


def counts_in_what_it_is_given(net: Net) -> None:
    def hook(state: list[int], parameter: Tensor) -> None:
        state[0] += 1
        torch.mul(parameter.grad, 1 + state[0] % 5, out=parameter.grad)

    everywhere(net, functools.partial(hook, [0]))


def scaled(gradient: Tensor, factor: int) -> None:
    gradient.mul_(factor)


def counts_and_calls(net: Net) -> None:
    state = [0]

    def hook(parameter: Tensor) -> None:
        state[0] += 1
        scaled(parameter.grad, 1 + state[0] % 5)

    everywhere(net, hook)


def counts_before_and_calls(net: Net) -> None:
    """The gradient is changed before it is added, and nothing is returned."""
    state = [0]

    def hook(gradient: Tensor) -> None:
        state[0] += 1
        scaled(gradient, 1 + state[0] % 5)

    for parameter in net.parameters():
        parameter.register_hook(hook)


def counts_at_both_ends(net: Net) -> None:
    """Of each block, and not in the middle."""
    for block in net.blocks:
        state = [0]

        def hook(parameter: Tensor, state: list[int] = state) -> None:
            state[0] += 1
            parameter.grad.mul_(1 + state[0] % 5)

        for parameter in (*block.norm.parameters(), *block.down.parameters()):
            parameter.register_post_accumulate_grad_hook(hook)


SHARES: dict[str, Hooks] = {
    hooks.__name__: hooks
    for hooks in (
        *(counts_in_a_default, counts_in_a_keyword, counts_in_an_attribute, counts_in_the_model),
        *(counts_in_the_function, counts_around, counts_in_what_it_is_given, counts_and_calls),
        *(counts_before_and_calls, counts_at_both_ends, counts_and_calls_a_method),
    )
}


# Gradients of other parameters ------------------------------------------------------------------------------


def factor(other: Tensor) -> Any:
    return 1 if other.grad is None else 1 + other.grad.abs().mean().clamp(max=1)


def a_parameter_reads(net: Net) -> None:
    for block in net.blocks:

        def hook(parameter: Tensor, other: Tensor = block.down.weight) -> None:
            parameter.grad.mul_(factor(other))

        block.norm.weight.register_post_accumulate_grad_hook(hook)


def a_module_reads(net: Net) -> None:
    for block in net.blocks:

        def hook(module: nn.Module, given: Any, made: Any, other: Tensor = block.down.weight) -> Any:
            return (given[0] * factor(other),)

        block.norm.register_full_backward_hook(hook)


def a_value_reads(net: Net) -> None:
    for block in net.blocks:

        def put(module: nn.Module, args: Any, output: Tensor, other: Tensor = block.down.weight) -> None:
            output.register_hook(lambda gradient: gradient * factor(other))

        block.norm.register_forward_hook(put)


def a_later_layer_reads(net: Net) -> None:
    """What has arrived of the microbatches before."""
    for block in net.blocks:

        def hook(parameter: Tensor, other: Tensor = block.norm.weight) -> None:
            parameter.grad.mul_(factor(other))

        block.down.weight.register_post_accumulate_grad_hook(hook)


def a_layer_sets(net: Net) -> None:
    for block in net.blocks:

        def hook(parameter: Tensor, other: Tensor = block.down.bias) -> None:
            other.grad = None

        block.up.weight.register_post_accumulate_grad_hook(hook)


READS: dict[str, Hooks] = {
    hooks.__name__: hooks
    for hooks in (a_parameter_reads, a_module_reads, a_value_reads, a_later_layer_reads, a_layer_sets)
}


# Nobody's business ------------------------------------------------------------------------------------------


def only_logs(net: Net) -> None:
    calls, norms, said = [0], [], []

    def hook(parameter: Tensor, calls: list[int] = calls, norms: list[float] = norms) -> None:
        calls[0] += 1
        row = {}
        row["norm"] = float(parameter.grad.norm())
        total = 0.0
        total += row["norm"]
        norms.append(total)
        if calls[0] % 10 == 0:
            said.append(len(norms))

    everywhere(net, hook)


def logs_beside_a_change(net: Net) -> None:
    """One hook only counts for all, each gradient is changed by itself."""
    counts = {"all": 0}
    mine = {parameter: [0] for parameter in net.parameters()}

    def count(parameter: Tensor, counts: dict[str, int] = counts) -> None:
        counts["all"] += 1

    def hook_of(own: list[int]) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor, counts: dict[str, int] = counts) -> None:
            counts["all"] += 1
            own[0] += 1
            parameter.grad.mul_(1 + own[0] % 5)

        return hook

    everywhere(net, count)
    for parameter, own in mine.items():
        parameter.register_post_accumulate_grad_hook(hook_of(own))


def reads_its_own(net: Net) -> None:
    def hook(parameter: Tensor) -> None:
        parameter.grad.mul_(factor(parameter))

    everywhere(net, hook)


ALLOWED: dict[str, Hooks] = {
    hooks.__name__: hooks for hooks in (only_logs, logs_beside_a_change, reads_its_own)
}


# Comparison -------------------------------------------------------------------------------------------------


def _trained(net: Net, step: Callable[[dict[str, Tensor]], None]) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(list(net.parameters()), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        step({name: torch.randn(8, WIDTH, generator=generator) for name in ("x", "target")})
        yield
        optimizer.step()


def _outcome(hooks: Hooks, places: dict[str, int] | None, parameters: dict[str, Any]) -> str:
    num_microbatches = parameters.get("microbatches", NUM_MICROBATCHES)
    smp.reset()
    by_hand = {} if places is None else {"auto_partition": False, "default_partition": 0}
    smp.init({"partitions": 2, "microbatches": num_microbatches, **by_hand, **parameters})
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    net = Net()
    hooks(plain)
    hooks(net)
    model = smp.DistributedModel(net)
    for name, stage in (places or {}).items():
        smp.set_partition(net.get_submodule(name), stage)

    @smp.step
    def step(model: Any, batch: dict[str, Tensor]) -> None:
        model.backward(F.mse_loss(model(batch["x"]), batch["target"]))

    def plain_step(batch: dict[str, Tensor]) -> None:
        for part in split_batch(batch, num_microbatches):
            loss = F.mse_loss(plain(part["x"]), part["target"])
            loss.backward(torch.tensor(1 / num_microbatches))

    try:
        for _ in zip(
            _trained(plain, plain_step), _trained(net, lambda batch: step(model, batch)), strict=True
        ):
            wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
            for name, parameter in model.local_named_parameters():
                own = wanted[name.removeprefix("module.")]
                if (own is None) != (parameter.grad is None):
                    return f"other gradient of {name}: {own is None}"
                if own is not None and not torch.equal(own, parameter.grad):
                    return f"other gradient of {name}"
    except smp.SMPError as error:
        return f"error: {error}"
    return "equal"


def outcomes(
    names: Sequence[str], places: dict[str, int] | None, parameters: dict[str, Any]
) -> dict[str, str]:
    """Two steps with each way to hook: "equal" to plain torch, or what is not, or the error.

    Args:
        names: of the ways.
        places: stages of modules; None: the partitioner's.
        parameters: of the session.
    """
    ways = SHARES | READS | ALLOWED
    return {name: _outcome(ways[name], places, parameters) for name in names}
