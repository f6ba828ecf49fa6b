"""What scripts do with parameters, gradients and optimizer state between steps: one script, run in the ranks
and in plain torch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.session import current
from tests.tensor.runtime_cases import CLASSES, Net, batches, split

STEPS = 4


class Square(Net):
    """A weight with as many rows as there are ranks: its piece is as long as one of them."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.two = nn.Parameter(torch.linspace(-1.0, 1.0, 2 * CLASSES).view(2, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.two[0] + self.two[1]


class Run:
    """What a script has in its hands.

    Attributes:
        net, model: the module, and what is trained.
        optimizers: all of them.
        inner: the optimizer of torch in the first one.
        step: a training step on the data of its number; gives the loss.
        early: a copy of the module, made before anything else.
        clip: clips the whole model's gradient; in the ranks it is the configuration that asks for it.
        kept: what the script keeps.
    """

    def __init__(
        self,
        net: nn.Module,
        model: Any,
        optimizers: list[Any],
        step: Callable[[int], Any],
        early: Any,
        clip: Callable[[], None] | None = None,
    ) -> None:
        self.net, self.model, self.optimizers, self.step, self.clip = net, model, optimizers, step, clip
        self.inner = getattr(optimizers[0], "optimizer", optimizers[0])
        self.early = early
        self.kept: list[Any] = []
        self.said: list[float] = []

    def parameters(self) -> list[torch.Tensor]:
        """Those that live here."""
        local = getattr(self.model, "local_parameters", self.model.parameters)
        return list(local())

    @property
    def state(self) -> Any:
        return self.inner.state


class Around(torch.optim.Optimizer):
    """An optimizer around one, in timm's form: it shares its groups and state, and calls its step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        # Not that of torch, on purpose.
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._base_optimizer = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base_optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self._base_optimizer.step(closure)


def optimizers_of(net: nn.Module, what: str) -> list[torch.optim.Optimizer]:
    kind: Any = torch.optim.AdamW if "state" in what else torch.optim.SGD
    of_blocks = [p for name, p in net.named_parameters() if name.startswith("blocks")]
    rest = [p for name, p in net.named_parameters() if not name.startswith("blocks")]
    if what == "several optimizers":
        return [kind(of_blocks, lr=0.1), kind(rest, lr=0.1)]
    if what == "an optimizer of some":
        return [kind(of_blocks, lr=0.1)]
    if what == "an optimizer around one":
        return [Around(kind(net.parameters(), lr=0.1))]
    return [kind(net.parameters(), lr=0.1)]


def _scaled_by_norm(run: Run) -> None:
    for parameter in run.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(parameter.grad.norm() + 1)


def _hook(run: Run, after: bool) -> None:
    def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    tensor = parameter if after else parameter.grad
                    if tensor is not None:
                        tensor.div_(1 + 0.1 * tensor.norm())

    (run.inner.register_step_post_hook if after else run.inner.register_step_pre_hook)(scale)


def prepare(run: Run, what: str) -> None:
    if what.startswith("hook"):
        _hook(run, after="after" in what)


def after_backward(run: Run, what: str, number: int) -> None:
    parameters = run.parameters()
    if what == "noise by shape":
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.grad.add_(noise, alpha=0.1)
    elif what == "a buffer by shape":
        run.kept = run.kept or [torch.zeros(parameter.shape) for parameter in parameters]
        for buffer, parameter in zip(run.kept, parameters, strict=True):
            buffer.mul_(0.9).add_(parameter.grad)
    elif what == "a buffer like it":
        run.kept = run.kept or [torch.zeros_like(parameter) for parameter in parameters]
        for buffer, parameter in zip(run.kept, parameters, strict=True):
            buffer.mul_(0.9).add_(parameter.grad)
            parameter.grad.copy_(buffer)
    elif what == "kept gradients":
        run.kept = run.kept or [parameter.grad for parameter in parameters]
        for gradient in run.kept:
            gradient.mul_(0.5)
    if run.clip is not None:
        run.clip()


@torch.no_grad()
def after_step(run: Run, what: str, number: int) -> None:
    parameters = run.parameters()
    if what == "count":
        run.said.append(sum(parameter.numel() for parameter in run.model.parameters()))
        run.said.append(sum(len(parameter) for parameter in run.model.parameters()))
        run.said.append(sum(parameter.grad.nelement() for parameter in run.model.parameters()))
    elif what == "by dimensions":
        for parameter in parameters:
            if parameter.ndim > 1 and parameter.data.dim() == 2 and parameter.grad.ndimension() == 2:
                parameter.mul_(0.9)
    elif what == "by shape":
        for parameter in parameters:
            parameter.mul_(1 - 0.5 / parameter.shape[-1] - 0.1 / parameter.size(0))
    elif what == "an early copy":
        run.early.two.mul_(0.9).add_(run.net.two, alpha=0.1)
    elif what == "a row":
        run.net.two.mul_(torch.linspace(0.5, 1.5, CLASSES))
    elif what == "state: a norm":
        run.said += [state["exp_avg"].norm().item() for state in run.state.values()]
    elif what == "state: a rate":
        for parameter in parameters:
            parameter.sub_(0.1 * run.state[parameter]["exp_avg"].abs().max())
    elif what == "state: by element":
        for parameter in parameters:
            run.state[parameter]["exp_avg"].mul_(0.5)
            run.state[parameter]["exp_avg_sq"].clamp_(max=1e-3)
    elif what == "other data, kept":
        if number == 0:
            run.kept = [parameter.data.clone() for parameter in parameters]
            for parameter, other in zip(parameters, run.kept, strict=True):
                parameter.data = other
        else:
            for other in run.kept:
                other.mul_(0.9)
    elif what == "other data, for a while":
        run.kept = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data * 0.5
        with torch.enable_grad():
            run.said.append(float(run.step(number)))
        for parameter, old in zip(parameters, run.kept, strict=True):
            parameter.data = old


def script(run: Run, what: str) -> dict[str, Any]:
    """Trains; losses, what else was said, weights."""
    prepare(run, what)
    losses = []
    for number in range(STEPS):
        if what != "kept gradients" or number == 0:
            run.net.zero_grad()
        else:
            run.net.zero_grad(set_to_none=False)
        if what == "a norm in a closure":

            def closure(number: int = number) -> Any:
                run.net.zero_grad()
                loss = run.step(number)
                _scaled_by_norm(run)
                return loss

            losses.append(float(run.optimizers[0].step(closure)))
            continue
        losses.append(float(run.step(number)))
        after_backward(run, what, number)
        for optimizer in run.optimizers:
            optimizer.step()
        after_step(run, what, number)
    return {"losses": losses, "said": run.said}


def ranks(parameters: dict[str, Any], what: str, wrapped: bool = True) -> Any:
    """What becomes of it in the ranks: the same as in plain torch, or a text."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Square()
    early = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    optimizers: list[Any] = optimizers_of(net, what)
    if wrapped:
        optimizers = [smp.DistributedOptimizer(optimizer) for optimizer in optimizers]

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    data = batches(STEPS, smp.rdp_rank())
    run = Run(net, model, optimizers, lambda number: step(*data[number]).reduce_mean(), early)
    try:
        found = script(run, what)
    except smp.SMPError as error:
        return str(error)
    return {**found, "state": model.state_dict(), "losses": smp.allgather(found["losses"], smp.DP_GROUP)}


def plain(replicas: int, what: str, clip: float | None = None, microbatches: int = 1) -> dict[str, Any]:
    """One process, plain torch, the batches of all replicas."""
    torch.manual_seed(0)
    net = Square()
    data = [batches(STEPS, replica) for replica in range(replicas)]

    def step(number: int) -> torch.Tensor:
        losses = [F.cross_entropy(net(of[number][0]), of[number][1]) for of in data]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.detach()

    def clips() -> None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)

    run = Run(net, net, optimizers_of(net, what), step, copy.deepcopy(net), None if clip is None else clips)
    found = script(run, what)
    return {**found, "state": net.state_dict()}


FORBIDDEN: dict[str, Callable[[nn.Module], Any]] = {
    "a sum": lambda net: net.two.sum(),
    "a whole one times it": lambda net: torch.ones(2, CLASSES) * net.two.detach(),
    "a whole one changed by it": lambda net: torch.ones(2, CLASSES).add_(net.two.detach()),
    "a row changed by it": lambda net: torch.zeros(CLASSES).add_(net.two.detach()),
    "a row that is set to it": lambda net: torch.zeros(CLASSES).copy_(net.two.detach()),
    "rows in a list": lambda net: torch._foreach_add_([torch.zeros(CLASSES)], [net.two.detach()]),
    "out": lambda net: torch.add(net.two.detach(), 1, out=torch.empty(CLASSES)),
    "another class": lambda net: net.two.as_subclass(torch.Tensor),
    "whether they are equal": lambda net: torch.equal(net.two, net.two),
    "a largest": lambda net: net.two.max(),
    "a largest of a row": lambda net: net.two.detach().max(0, keepdim=True),
    "two of them": lambda net: net.embed.weight.detach().add(net.blocks[0].up.bias.detach()),
    "a gradient of the whole": lambda net: setattr(net.two, "grad", torch.zeros(2, CLASSES)),
}


def forbidden(parameters: dict[str, Any]) -> dict[str, str]:
    """What is said to each of them."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Square()
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    step(*batches(1, smp.rdp_rank())[0])
    told = {}
    for name, function in FORBIDDEN.items():
        try:
            function(net)
            told[name] = ""
        except smp.SMPError as error:
            told[name] = str(error)
    return told


def norms_of_copies(parameters: dict[str, Any]) -> dict[str, Any]:
    """``get_total_norm`` of gradients, of what is made of them, and of those of another model."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Square()
    other = copy.deepcopy(net)
    if parameters.get("tensor_parallel_degree", 1) > 1:
        split(net, current().axis("tp"))
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    x, y = batches(1)[0]
    step(x, y)
    F.cross_entropy(other(x), y).backward()
    own = [p.grad for p in model.local_parameters()]
    leaves = [torch.ones_like(p).requires_grad_() for p in other.parameters()]
    sum(leaf.sum() for leaf in leaves).backward()
    alike = [leaf for leaf in leaves if any(leaf.shape == gradient.shape for gradient in own)]
    asked: dict[str, Callable[[], Any]] = {
        "own": lambda: torch.nn.utils.get_total_norm(own),
        "another's": lambda: torch.nn.utils.get_total_norm([p.grad for p in other.parameters()]),
        "another's weights": lambda: torch.nn.utils.get_total_norm(list(other.parameters())),
        "leaves'": lambda: torch.nn.utils.get_total_norm([leaf.grad for leaf in leaves]),
        "some leaves'": lambda: torch.nn.utils.get_total_norm([leaf.grad for leaf in alike]),
        "of one shape": lambda: torch.nn.utils.get_total_norm([torch.ones_like(own[0])]),
        "of fewer shapes": lambda: torch.nn.utils.get_total_norm([torch.ones_like(g) for g in own[1:]]),
        "its own among them": lambda: torch.nn.utils.get_total_norm([own[0], *(g / 8 for g in own[1:-1])]),
        "divided": lambda: torch.nn.utils.get_total_norm([gradient / 8 for gradient in own]),
        "copied": lambda: torch.nn.utils.get_total_norm([gradient.clone() for gradient in own]),
        "converted": lambda: torch.nn.utils.get_total_norm([gradient.double() for gradient in own]),
    }
    told: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            told[name] = float(ask())
        except smp.SMPError as error:
            told[name] = str(error)
    return told


class Fails(torch.optim.SGD):
    """Fails in the step whose number it is told, half-way."""

    fails_at = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.fails_at -= 1
        result = super().step(closure)
        if self.fails_at == 0:
            raise MemoryError
        return result


def guarded_after_errors(parameters: dict[str, Any], fails_at: int, in_closure: bool) -> list[str]:
    """What is said to a norm after each of three steps of an optimizer that is not wrapped, one of which
    fails; and what its step is after all."""
    torch.optim.SGD([torch.zeros(1)])  # the first one of all changes the class
    around: Any = torch.optim.SGD.step
    cell = around.__closure__[around.__code__.co_freevars.index("func")]
    of_torch = cell.cell_contents
    smp.init(parameters)
    torch.manual_seed(0)
    net = Square()
    model = smp.DistributedModel(net)
    optimizer = (torch.optim.SGD if in_closure else Fails)(net.parameters(), lr=0.1)
    optimizer.fails_at = fails_at  # type: ignore[attr-defined]

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    told = []
    for number, data in enumerate(batches(3, smp.rdp_rank()), start=1):

        def closure(data: Any = data, number: int = number) -> Any:
            loss = step(*data).reduce_mean()
            if in_closure and number == fails_at:
                raise MemoryError
            return loss

        try:
            optimizer.step(closure)
            said = "stepped"
        except MemoryError:
            said = "failed"
        try:
            net.two.norm()
        except smp.SMPError:
            said += ", guarded"
        told.append(said)
    is_replaced = cell.cell_contents is not of_torch
    smp.reset()
    return [*told, "torch's own again" if is_replaced and cell.cell_contents is of_torch else "changed"]


def said_of_parameters(parameters: dict[str, Any], what: str) -> str:
    """Of a parameter that comes to a model, or to its optimizer, too late."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Net(tied=True)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(list(net.blocks.parameters()), lr=0.1))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    x, y = batches(1)[0]
    try:
        step(x, y)
        optimizer.step()
        if what == "added":
            optimizer.optimizer.add_param_group({"params": list(net.out.parameters())})
        else:
            net.head.weight = nn.Parameter(net.embed.weight.detach().clone())
        step(x, y)
        optimizer.step()
    except smp.SMPError as error:
        return str(error)
    return ""
