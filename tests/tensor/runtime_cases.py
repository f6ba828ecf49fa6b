"""What the tests of stages of several ranks run in the ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.comm.groups.axis import Axis
from smp_lite.nn.layout import ParameterLayout, layout_of, set_layout, whole_of
from smp_lite.nn.one_d import ColumnParallelLinear, RowParallelLinear
from smp_lite.session import current

WIDTH, CLASSES, BATCH = 8, 5, 8


class Block(nn.Module):
    """A residual block with something replicated in it, and something split."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, num_blocks: int = 4, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(WIDTH, dropout) for _ in range(num_blocks)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.head(x))


def split(net: nn.Module, axis: Any) -> None:
    """Every block's pair of layers, over the axis."""
    for module in net.modules():
        if isinstance(module, Block):
            module.up = ColumnParallelLinear.from_dense(module.up, axis)
            module.down = RowParallelLinear.from_dense(module.down, axis)


def batches(num_steps: int, replica: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + replica)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def train(
    parameters: dict[str, Any],
    *,
    num_steps: int = 3,
    is_split: bool = True,
    tied: bool = False,
    dropout: float = 0.0,
    optimizer: str = "AdamW",
    clip: float | None = None,
) -> dict[str, Any]:
    """Losses, and at the end all parameters, whole, with the last step's gradients and the norm."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Net(tied=tied, dropout=dropout)
    if is_split:
        split(net, current().axis("tp"))
    model = smp.DistributedModel(net)
    optim = smp.DistributedOptimizer(getattr(torch.optim, optimizer)(model.parameters(), lr=0.05))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    shared = parameters.get("prescaled_batch", False)
    replica = smp.rdp_rank() if shared else smp.dp_rank()
    losses, norms = [], []
    for x, y in batches(num_steps, replica):
        optim.zero_grad()
        losses.append(step(x, y).reduce_mean().item())
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optim.step()
    found = {}
    gradients = {}
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        found[name] = whole_of(parameter, layout) if layout is not None else parameter.detach()
        if parameter.grad is not None:
            grad = parameter.grad
            gradients[name] = whole_of(grad, layout) if layout is not None else grad
    return {
        "losses": losses,
        "parameters": found,
        "gradients": gradients,
        "norms": norms,
        "state": model.state_dict(),
        "optimizer": optim.state_dict(),
        "replica": replica,
        "coordinate": (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()),
    }


def _model(parameters: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    smp.init(parameters)
    torch.manual_seed(0)
    net = Net(**options)
    split(net, current().axis("tp"))
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    return model, step


def fails_in_one_rank(
    parameters: dict[str, Any], pp_rank: int, tp_rank: int, has_joined: bool
) -> tuple[str, float, float]:
    """One rank of a stage fails in the midst of a block: the error, seconds until it, the next step's loss.

    Args:
        has_joined: it fails when the others count on it for a collective already; else before.
    """
    _, step = _model(parameters)
    x, y = batches(1)[0]
    step(x, y)
    axis = current().axis("tp")

    def fail(kind: str, *args: Any) -> None:
        if kind == "all_reduce":
            raise ArithmeticError("the cause")

    def fail_before(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if type(tensor) is torch.Tensor:  # and is not being recorded
            raise ArithmeticError("the cause")
        return Axis.all_reduce(axis, tensor, op)

    start = time.monotonic()
    if (smp.pp_rank(), smp.tp_rank()) == (pp_rank, tp_rank):
        if has_joined:
            axis.observer = fail
        else:
            axis.all_reduce = fail_before
    text = ""
    try:
        step(x, y)
    except ArithmeticError as error:
        text = str(error)
    took = time.monotonic() - start
    axis.observer = None
    vars(axis).pop("all_reduce", None)
    return text, took, step(x, y).reduce_mean().item()


def other_batch(parameters: dict[str, Any]) -> str:
    """Tensor-parallel ranks that bring different batches though they share one."""
    _, step = _model(parameters)
    x, y = batches(1)[0]
    try:
        step(x + smp.tp_rank(), y)
    except smp.SMPError as error:
        return str(error)
    return ""


def used_wrongly(parameters: dict[str, Any]) -> str:
    """A split layer whose output each rank uses as if it were whole."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * CLASSES))
    net[2] = ColumnParallelLinear.from_dense(net[2], current().axis("tp"))
    net[2].forward = lambda x: F.linear(x, net[2].weight, net[2].bias)  # and without its backward's sum
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    try:
        step(*batches(1)[0])
    except smp.SMPError as error:
        return str(error)
    return ""


def loads(parameters: dict[str, Any], state: dict[str, Any], optimizer_state: dict[str, Any]) -> list[float]:
    """Goes on from a dense model's state, and from what is saved here in turn."""
    model, step = _model(parameters)
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    model.load_state_dict(state)
    optim.load_state_dict(optimizer_state)
    losses = []
    for number, (x, y) in enumerate(batches(5)[3:]):
        optim.zero_grad()
        losses.append(step(x, y).reduce_mean().item())
        optim.step()
        if number == 0:  # through whole ones, and through this rank's own
            whole, whole_optim = model.state_dict(), optim.state_dict()
            own, own_optim = model.local_state_dict(), optim.local_state_dict()
            for parameter in model.local_parameters():
                nn.init.zeros_(parameter)
            model.load_state_dict(own)
            optim.load_state_dict(own_optim)
            model.load_state_dict(whole)
            optim.load_state_dict(whole_optim)
    return losses


def refused(parameters: dict[str, Any]) -> dict[str, str]:
    """What each misuse is told."""
    model, _ = _model(parameters)
    found = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except (smp.SMPError, ValueError) as error:
            found[name] = str(error)

    for kind in ("Adafactor", "Muon"):
        if not hasattr(torch.optim, kind):
            continue  # torch 2.8 has no Muon
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer = getattr(torch.optim, kind)(matrices)
        attempt(kind, lambda optimizer=optimizer: smp.DistributedOptimizer(optimizer))
    attempt("FusedLAMB", lambda: smp.DistributedOptimizer(smp.optimizers.FusedLAMB(model.parameters())))
    attempt("gathered", lambda: smp.gathered(model).__enter__())
    return found


def traced(parameters: dict[str, Any], directory: str) -> None:
    """Two steps under SMP_LITE_TRACE."""
    os.environ["SMP_LITE_TRACE"] = directory
    try:
        model, step = _model(parameters)
        for x, y in batches(2):
            step(x, y)
        model._timeline.close()
    finally:
        del os.environ["SMP_LITE_TRACE"]


class _Part(torch.autograd.Function):
    """``x * w``, of whose weight's gradient each rank computes the part from its own rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, ctx.axis.part(g * x, 0).sum(0), None


class Scale(nn.Module):
    def __init__(self, axis: Axis | None) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        if axis is not None:
            set_layout(self.weight, ParameterLayout((WIDTH,), ((),), (axis,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if self.axis is None else _Part.apply(x, self.weight, self.axis)


def scaled(axis: Axis | None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale(axis), nn.Linear(WIDTH, CLASSES))


def accumulates(parameters: dict[str, Any], passes: int, as_views: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients after each of four steps without zero_grad, and one evaluation between."""
    smp.init(parameters)
    model = smp.DistributedModel(
        scaled(current().axis("tp")), backward_passes_per_step=passes, gradient_as_bucket_view=as_views
    )

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    found = []
    for number, (x, y) in enumerate(batches(4, smp.rdp_rank())):
        if number == 2 and passes == 2:
            try:
                step(x, y)
            except smp.SMPError as error:
                assert "call optimizer.zero_grad() after every reduction" in str(error)  # noqa: PT017
                break
        step(x, y)
        with torch.no_grad():
            step(x, y)
        found.append({n: p.grad.clone() for n, p in model.local_named_parameters()})
    return found


def partial_checkpoint(parameters: dict[str, Any], path: str, resumes: bool) -> list[float]:
    """Four steps; a checkpoint of each rank's own part after two, or from there on."""
    model, step = _model(parameters)
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    if resumes:
        smp.resume_from_checkpoint(path, "two", partial=True)
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        if resumes and number < 2:
            continue
        if number == 2 and not resumes:
            smp.save_checkpoint(path, "two", partial=True, model=model, optimizer=optim)
        optim.zero_grad()
        losses.append(step(x, y).reduce_mean().item())
        optim.step()
    return losses


def other_numbers(parameters: dict[str, Any], kind: str) -> str:
    """What is told where a part would be taken for the whole."""
    smp.init(parameters)
    torch.manual_seed(0)
    net = Net()
    block = net.blocks[0]

    def normalise(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output / output.norm(dim=-1, keepdim=True)

    if kind == "hook":
        block.up.register_forward_hook(normalise)
    elif kind == "spectral norm":
        nn.utils.parametrizations.spectral_norm(block.up)
    try:
        if kind in ("from_dense", "own batches"):
            if kind == "from_dense":
                block.up.register_forward_hook(normalise)
            split(net, current().axis("tp"))
        else:
            smp.parallelize(net, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
        model = smp.DistributedModel(net)

        @smp.step
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) + sum(p.pow(2).sum() for p in model.parameters())
            model.backward(loss)
            return loss

        step(*batches(1)[0])
    except (smp.SMPError, ValueError) as error:
        return str(error)
    return ""
