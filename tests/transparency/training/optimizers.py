"""Optimizers of other make: some treat each parameter by itself, some look at all of them at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import smp_lite as smp
from tests.transparency.training import norms
from tests.transparency.training.norms import error_of, same

__all__ = ["ACROSS", "SINGLE", "UNKNOWN"]

Closure = Callable[[], Any]


class Simple(torch.optim.Optimizer):
    """Plain descent; the others differ from it in one way each."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def descend(self, factor: Any = 1.0) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * factor * p.grad)

    def step(self, closure: Closure | None = None) -> Any:
        loss = closure() if closure is not None else None
        self.descend()
        return loss


class Normed(Simple):
    """Clips by the norm of all its gradients, as LAMB variants do; at a high limit."""

    def __init__(self, params: Any, limit: float = 50.0) -> None:
        super().__init__(params)
        self.limit = limit

    def step(self, closure: Closure | None = None) -> Any:
        norm = torch.stack([p.grad.norm() for p in self._parameters()]).norm()
        self.descend((self.limit / norm).clamp(max=1.0))


class NormedByTorch(Simple):
    """The same by torch's function, which would even be right on ranks; not told apart."""

    def step(self, closure: Closure | None = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self._parameters(), 1.0)
        self.descend()


class Estimating(Simple):
    """One step size for the model, which grows with the way gone along the gradients (Prodigy)."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        group = self.param_groups[0]
        size = group.get("size", 1e-3)
        for p in self._parameters():
            self.state[p].setdefault("start", p.clone())
        way = sum(float((p.grad * (self.state[p]["start"] - p)).sum()) for p in self._parameters())
        length = sum(float(p.grad.abs().sum()) for p in self._parameters())
        group["size"] = max(size, way / max(length, 1e-12))
        for p in self._parameters():
            p.sub_(size * p.grad.sign())


class Sharpness(Simple):
    """Looks uphill by a step of the gradient's norm, then goes down from where it was (SAM)."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        super().__init__(params)
        self.base = base(self.param_groups, lr=0.05)
        self.param_groups = self.base.param_groups

    def step(self, closure: Closure | None = None) -> Any:
        assert closure is not None
        loss = closure()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self._parameters()]).norm()
            before = {p: p.clone() for p in self._parameters()}
            for p in before:
                p.add_(0.05 * p.grad / norm)
        closure()
        with torch.no_grad():
            for p, value in before.items():
                p.copy_(value)
        self.base.step()
        return loss


class Polyak(Simple):
    """Its step size is the loss over the square of the gradient."""

    def step(self, closure: Closure | None = None) -> Any:
        assert closure is not None
        loss = closure()
        square = sum(p.grad.square().sum() for p in self._parameters())
        self.descend(float(loss) / square)
        return loss


class MyLBFGS(torch.optim.LBFGS):
    pass


class AcrossGroups(Simple):
    """Only two of different groups see each other."""

    def step(self, closure: Closure | None = None) -> Any:
        firsts = [group["params"][0] for group in self.param_groups if group["params"]]
        largest = max(float(p.grad.abs().max()) for p in firsts)
        self.descend(1.0 / (1.0 + largest) if len(firsts) > 1 else 1.0)


class MyAdam(torch.optim.AdamW):
    """A subclass without a change."""


class Kept(Simple):
    """Keeps a list of its own, and its own list of groups' settings."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Closure | None = None) -> Any:
        with torch.no_grad():
            for p in self.mine:
                if p.grad is not None:
                    p.sub_(0.05 * p.grad)


class Ahead(Simple):
    """Moves slow copies toward what an inner optimizer reaches (Lookahead)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = MyAdam(self.param_groups, lr=0.05)
        self.param_groups = self.inner.param_groups
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        for p in self._parameters():
            self.state[p].setdefault("slow", p.clone())
        self.inner.step()
        self.calls += 1
        if self.calls % 3 == 0:
            for p in self._parameters():
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Extragradient(Simple):
    """Evaluates twice, each parameter by itself."""

    def step(self, closure: Closure | None = None) -> Any:
        assert closure is not None
        loss = closure()
        before = [(p, p.detach().clone()) for p in self._parameters()]
        self.descend()
        closure()
        with torch.no_grad():
            for p, value in before:
                p.copy_(value)
        self.descend()
        return loss


class Noisy(Simple):
    """Adds noise of its own to each."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        self.descend()
        for p in self._parameters():
            p.add_(torch.randn_like(p), alpha=1e-3)


class Demanding(Simple):
    """Wants a setting that is made before its first step."""

    def step(self, closure: Closure | None = None) -> Any:
        if not hasattr(self, "ready"):
            raise ValueError("call prepare() first")
        self.descend()


class WithModel(Simple):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)
        self.model = model


class Unequal(torch.optim.SGD):
    """Evaluates as often as this rank's number says, and once in a trial."""

    def step(self, closure: Closure | None = None) -> Any:
        assert closure is not None
        for _ in range(smp.rank() + 1 if any(p.numel() > 60 for p in self._all()) else 1):
            loss = closure()
        super().step()
        return loss

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def two_groups(kind: type[torch.optim.Optimizer]) -> Callable[[Any], torch.optim.Optimizer]:
    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, *others = params
        return kind([{"params": [first]}, {"params": others}])

    return make


Make = Callable[[Any], torch.optim.Optimizer]


class Factored(Simple):
    """Scales matrices of 128 rows and columns by the sizes of these; smaller ones by each element's."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        for p in self._parameters():
            assert p.grad is not None
            size = p.grad.square()
            if p.dim() == 2 and min(p.shape) >= 128:
                size = size.mean(0) * size.mean(1, keepdim=True) / size.mean()
            p.sub_(0.05 * p.grad / (size.sqrt() + 1e-8))


class Blocks(Simple):
    """Rounds gradients by the largest of each 256 elements, where there are 4,096, as 8-bit optimizers do."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        for p in self._parameters():
            assert p.grad is not None
            way = p.grad
            if p.numel() >= 4096:
                blocks = torch.nn.functional.pad(way.reshape(-1), (0, -p.numel() % 256)).view(-1, 256)
                most = blocks.abs().amax(1, keepdim=True) / 127
                way = ((blocks / most).round() * most).reshape(-1)[: p.numel()].view_as(p)
            p.sub_(0.05 * way)


WITHIN_LARGE: dict[str, Make] = {"Factored": Factored, "Blocks": Blocks}
ACROSS: dict[str, Make] = {
    "LBFGS": torch.optim.LBFGS,
    "MyLBFGS": MyLBFGS,
    "Normed": Normed,
    "NormedByTorch": NormedByTorch,
    "Estimating": Estimating,
    "Sharpness": Sharpness,
    "Polyak": Polyak,
    "AcrossGroups": two_groups(AcrossGroups),
}
SINGLE: dict[str, Make] = {
    "Simple": Simple,
    "MyAdam": MyAdam,
    "MyAdam, two groups": two_groups(MyAdam),
    "MyAdam, fused": lambda params: MyAdam(params, fused=True),
    "MyAdam, a tensor for lr": lambda params: MyAdam(params, lr=torch.tensor(0.05)),
    "Kept": Kept,
    "Ahead": Ahead,
    "Extragradient": Extragradient,
    "Normed, never reached": lambda params: Normed(params, limit=1e30),
}
UNKNOWN: dict[str, tuple[Make, str]] = {
    "Demanding": (Demanding, r"ValueError: call prepare\(\) first"),
    "WithModel": (lambda params: WithModel(params, nn.Linear(1, 1)), "holds a model"),
}


def training(name: str, with_closure: bool) -> list[str]:
    """Steps with one of ``SINGLE`` in the session that is open, against plain torch.

    With a closure the first step, and so partition, happens in it.
    """
    make = SINGLE[name]
    plain, net = norms.build(), norms.build()
    plain_optimizer = make([p for p in plain.parameters() if p.requires_grad])
    model = smp.DistributedModel(net)
    norms.place(net, norms.STAGES if smp.state.num_stages == 2 else norms.SPREAD)
    optimizer = smp.DistributedOptimizer(make([p for p in net.parameters() if p.requires_grad]))
    wrong = []
    for step_index in range(4):
        inputs = norms.batch(step_index)

        def plain_closure(inputs: dict[str, Tensor] = inputs) -> Tensor:
            plain_optimizer.zero_grad()
            norms.plain_backward(plain, inputs)
            return torch.ones(())

        def closure(inputs: dict[str, Tensor] = inputs) -> Tensor:
            optimizer.zero_grad()
            norms.train(model, **inputs)
            return torch.ones(())

        for its, evaluate in ((plain_optimizer, plain_closure), (optimizer, closure)):
            if with_closure:
                assert its.step(evaluate) == 1.0
            else:
                evaluate()
                its.step()
        wanted = dict(plain.named_parameters())
        wrong += [
            f"step {step_index}: {name}"
            for name, p in model.local_named_parameters()
            if not same(p.data, wanted[name].data)
        ]
    return wrong


# What ranks run ---------------------------------------------------------------------------------------------


def training_on_ranks(name: str, with_closure: bool) -> list[str]:
    smp.init()
    return training(name, with_closure)


def refusals() -> dict[str, str]:
    """What each of ``ACROSS`` gets, wrapped and not."""
    warnings.simplefilter("ignore")
    smp.init()
    net = norms.build()
    model = smp.DistributedModel(net)
    norms.place(net, norms.STAGES)
    found = {
        name: error_of(lambda m=make: smp.DistributedOptimizer(m(net.parameters())))
        for name, make in ACROSS.items()
    }
    norms.train(model, **norms.batch())
    loose = torch.optim.LBFGS(norms._with_gradients(net.parameters()))
    found["not wrapped"] = error_of(lambda: loose.step(lambda: torch.zeros(())))
    return found


def unequal_closures() -> str:
    """Rank 1 wants a second evaluation."""
    smp.init()
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = smp.DistributedModel(net)
    norms.place(net, {"0": 0, "1": 1})
    optimizer = smp.DistributedOptimizer(Unequal(net.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return error_of(lambda: optimizer.step(lambda: train(model, torch.ones(8, 8)).reduce_mean()))


def hooks_on_steps(name: str, with_closure: bool) -> list[str]:
    """The optimizer has parameters of the last stage only."""
    smp.init()
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = smp.DistributedModel(net)
    norms.place(net, {"0": 0, "1": 1})
    inner = {**SINGLE, "Adam": torch.optim.Adam}[name](net[1].parameters())
    calls: list[str] = []
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    inner.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer = smp.DistributedOptimizer(inner)

    @smp.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def closure() -> Tensor:
        calls.append("closure")
        return train(model, torch.ones(8, 8)).reduce_mean()

    for _ in range(2):
        if with_closure:
            optimizer.step(closure)
        else:
            train(model, torch.ones(8, 8))
            optimizer.step()
    return calls
