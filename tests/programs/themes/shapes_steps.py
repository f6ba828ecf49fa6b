"""Step functions in unusual shapes: how they are made, what they get, call, look at, and give back."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def data(seed: int, batch: int = 8, width: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    g = numbers(seed)
    return torch.randn(batch, width, generator=g), torch.randint(0, classes, (batch,), generator=g)


class Heads(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(6, 16, 16)
        self.classifier, self.regressor = mlp(16, 12, 3), mlp(16, 12, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.classifier(h), self.regressor(h)


# How step functions are made --------------------------------------------------------------------------------


class Trainer:
    def __init__(self, smp: Any, out: Any) -> None:
        self.model = smp.DistributedModel(mlp(6, 16, 16, 3))
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.smoothing = 0.0
        self.history: dict[str, list[float]] = defaultdict(list)
        self.out = out
        self.run = smp.step(self._forward_backward)

    def criterion(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, label_smoothing=self.smoothing)

    def _forward_backward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.model(x)
        loss = self.criterion(logits, y)
        self.model.backward(loss)
        self.history["micro"].append(loss.item())
        self.history["accuracy"].append((logits.argmax(1) == y).float().mean().item())
        return loss

    def fit(self, steps: int) -> None:
        for i in range(steps):
            self.smoothing = 0.1 * i
            self.optimizer.zero_grad()
            loss = self.run(*data(i))
            self.optimizer.step()
            self.history["loss"].append(loss.reduce_mean().item())
        self.out.value("history", dict(self.history))


@program(stages=(2, 3), ranks=(2,))
def bound_method(smp: Any, out: Any) -> None:
    """A trainer class wraps its own bound method; the loss function's strength is an attribute that
    changes.
    """
    trainer = Trainer(smp, out)
    trainer.fit(4)
    out.model(trainer.model)


@program(stages=(2,), ranks=(2,))
def decorated_in_class(smp: Any, out: Any) -> None:
    """The Hugging Face way: @smp.step in a class body on a function that has no self."""
    model = smp.DistributedModel(Heads())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    class Steps:
        @smp.step()
        def train_step(model: Any, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
            loss = scale * F.cross_entropy(model(x)[0], y)
            model.backward(loss)
            return loss

    steps = Steps()
    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", Steps.train_step(model, *data(i), scale=0.5).reduce_mean())
        optimizer.step()
        out.value("again", steps.train_step(model, *data(i)).reduce_mean())
    out.model(model)


@program(stages=(2,), pipelines=("interleaved", "simple"))
def lambdas_and_partials(smp: Any, out: Any) -> None:
    """A lambda, a functools.partial and a closure from a factory as step functions of one model."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def full(criterion: Any, model: Any, x: Tensor, y: Tensor, *, weight: float) -> Tensor:
        loss = weight * criterion(model(x), y)
        model.backward(loss)
        return loss

    def factory(power: int) -> Any:
        seen = []

        def inner(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
            seen.append(len(x))
            logits = model(x)
            loss = (1 - logits.softmax(-1).gather(1, y[:, None])).pow(power).mean()
            model.backward(loss)
            return loss, len(seen)

        return smp.step(inner)

    train = smp.step(functools.partial(full, nn.CrossEntropyLoss(), model, weight=0.7))
    predict = smp.step(lambda x: model(x).softmax(-1))
    focal = factory(3)
    for i in range(3):
        x, y = data(i)
        optimizer.zero_grad()
        out.value("loss", train(x, y).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()
        loss, count = focal(x, y)
        optimizer.step()
        out.value("focal", [loss.reduce_mean(), count])
        with torch.no_grad():
            out.value("p", predict(x).concat())
    out.model(model)


@program(stages=(2, 3), static=True)
def default_arguments(smp: Any, out: Any) -> None:
    """A default mutable argument collects losses; keyword-only, None and string arguments choose the loss."""
    model = smp.DistributedModel(Heads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(
        x: Tensor,
        y: Tensor | None = None,
        *,
        target: Tensor | None = None,
        mode: str = "class",
        seen: Any = [],  # noqa: B006
    ) -> Any:
        logits, values = model(x)
        if mode == "class" and y is not None:
            loss = F.cross_entropy(logits, y)
        elif target is not None:
            loss = F.mse_loss(values, target)
        else:
            loss = (logits**2).mean() + values.abs().mean()
        model.backward(loss)
        seen.append(mode)
        return loss, None, mode, len(seen)

    for i in range(2):
        x, y = data(i)
        for kwargs in ({"y": y}, {"target": x[:, :2], "mode": "value"}, {"mode": "none"}):
            optimizer.zero_grad()
            loss, nothing, mode, _ = train_step(x, **kwargs)
            optimizer.step()
            out.value("result", [loss.reduce_mean(), nothing, mode])
    out.model(model)


# What they give back ----------------------------------------------------------------------------------------


class Output(NamedTuple):
    loss: Tensor
    extra: dict[str, Any]


Point = namedtuple("Point", "x y")


@dataclass
class Result:
    loss: Tensor
    scores: list[Tensor] = field(default_factory=list)
    note: str = ""


@program(stages=(2, 3), ranks=(2,), static=True)
def nested_results(smp: Any, out: Any) -> None:
    """Named tuples, dicts in lists, Nones, tensors that are views of each other, the input itself."""
    model = smp.DistributedModel(Heads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Output:
        logits, values = model(x)
        loss = F.cross_entropy(logits, y) + values.pow(2).mean()
        model.backward(loss)
        extra = OrderedDict(
            logits=logits,
            first=logits[:, :1],
            point=Point(values[:, 0], values[:, 1]),
            inputs=[x, y, None],
            flags=(True, "text", 3),
            constant=torch.ones(2),
            empty=[],
        )
        return Output(loss, extra)

    for i in range(3):
        optimizer.zero_grad()
        result = train_step(*data(i))
        optimizer.step()
        out.value("type", [type(result).__name__, type(result.extra).__name__, list(result.extra)])
        out.value("loss", result.loss.reduce_mean())
        out.value("mean", result.extra["logits"].reduce_mean())
        out.value("sum", result.extra["first"].reduce_sum())
        out.value("stack", result.loss.stack())
        out.value("concat", result.extra["point"].x.concat())
        out.value("inputs", result.extra["inputs"][0].concat())
        out.value("all", result.extra)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def dataclass_results(smp: Any, out: Any) -> None:
    """A dataclass comes back; one step function returns nothing, one returns a generator's list."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Result:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return Result(loss=loss, scores=[row.max() for row in logits], note=f"{len(x)} rows")

    @smp.step
    def silent_step(x: Tensor, y: Tensor) -> None:
        model.backward(F.cross_entropy(model(x), y))

    for i in range(3):
        x, y = data(i)
        optimizer.zero_grad()
        result = train_step(x, y)
        out.value("nothing", silent_step(x, y))
        optimizer.step()
        results = result if isinstance(result, list | tuple) else [result]
        for one in results:
            out.value("loss", one.loss)
            out.value("scores", one.scores)
            out.value("note", one.note)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def graph_kept(smp: Any, out: Any) -> None:
    """detach_outputs=False; what comes back is asked for requires_grad, and used as a plain number."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step(detach_outputs=False)
    def train_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss, logits.detach()

    for i in range(3):
        optimizer.zero_grad()
        loss, logits = train_step(*data(i))
        optimizer.step()
        out.value("loss", float(loss.reduce_mean()))
        out.value("logits", logits.concat())
    out.model(model)


# What they look at ------------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,), pipelines=("interleaved", "simple"))
def looks_at_everything(smp: Any, out: Any) -> None:
    """repr, format, float, int, bool, len, iteration, numpy, tolist, comparison, in-step metrics with
    sklearn's style.
    """
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    log: list[Any] = []

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        array = logits.detach().cpu().numpy()
        log.append(repr(logits.detach()))
        log.append(f"{loss:.4f} {loss.item():8.3g} {float(loss):e} {loss.detach()!s}")
        log.append(
            [len(logits), logits.shape[0], logits.size(), logits.dim(), logits.numel(), str(logits.device)]
        )
        log.append(array.argmax(axis=1).tolist())
        log.append(float(np.mean(array[np.arange(len(array)), y.numpy()])))
        log.append(
            [bool(loss > 1), int(logits.argmax()), round(loss.item(), 3), loss.detach().numpy().item()]
        )
        log.append([row.detach().sum().item() for row in logits])
        log.append(max(logits.detach().flatten(), key=lambda v: v.item()).item())
        log.append(sorted(range(len(x)), key=lambda i: float(logits[i, 0])))
        log.append(np.asarray(logits.detach()).std().item())
        log.append(
            [
                logits.requires_grad,
                logits.is_leaf,
                logits.grad_fn is not None,
                loss.ndim,
                logits.is_contiguous(),
            ]
        )
        log.append([isinstance(logits, Tensor), torch.is_tensor(logits), logits.stride()])
        log.append({"nan": torch.isnan(loss).any().item(), "ok": torch.isfinite(logits).all().item()})
        log.append(torch.allclose(logits.softmax(-1).sum(-1), torch.ones(len(x))))
        log.append(torch.equal(logits, logits.clone()))
        return loss

    for i in range(2):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.value("log", log)
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def data_dependent_ops(smp: Any, out: Any) -> None:
    """unique, bincount, one_hot without num_classes, nonzero, masks, topk, histc, quantile, confusion by
    index_put_.
    """
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    confusion = torch.zeros(3, 3, dtype=torch.long)

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> dict[str, Any]:
        logits = model(x)
        guess = logits.argmax(1)
        hard = F.cross_entropy(logits, y, reduction="none")
        kept = hard[hard > hard.median()]
        top = hard.topk(2).values
        loss = kept.mean() + top.sum() if len(kept) else hard.mean()
        model.backward(loss)
        confusion.index_put_((y, guess), torch.ones_like(y), accumulate=True)
        wrong = (guess != y).nonzero(as_tuple=True)[0]
        values, counts = guess.unique(return_counts=True)
        return {
            "loss": loss,
            "kept": kept.numel(),
            "wrong": wrong.tolist(),
            "counts": dict(zip(values.tolist(), counts.tolist())),
            "bins": torch.bincount(guess, minlength=3),
            "one_hot": tuple(F.one_hot(guess).shape),
            "quantile": torch.quantile(logits.detach(), 0.9),
            "histogram": logits.detach().histc(4, -2, 2),
            "order": logits[:, 0].argsort(),
        }

    for i in range(3):
        optimizer.zero_grad()
        result = train_step(*data(i))
        optimizer.step()
        out.value("result", result)
    out.value("confusion", confusion)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def skips_bad_losses(smp: Any, out: Any) -> None:
    """`if not torch.isfinite(loss): return` before the backward; one batch in which one microbatch is
    infinite.
    """
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    skipped: list[str] = []

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            skipped.append(f"WARNING: non-finite loss, ending training {loss}")
            return loss
        model.backward(loss)
        return loss

    for i in range(3):
        x, y = data(i)
        if i == 1:
            x[-1] = float("nan")
        optimizer.zero_grad()
        loss = train_step(x, y)
        optimizer.step()
        out.value("loss", [o.item() for o in loss.outputs])
    out.value("skipped", skipped)
    out.model(model)


@program(stages=(2, 3))
def hooks_on_activations(smp: Any, out: Any) -> None:
    """register_hook on an activation in the step, to log and to double its gradient."""
    model = smp.DistributedModel(Heads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    norms: list[float] = []

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        logits, values = model(x)
        logits.register_hook(lambda grad: norms.append(grad.norm().item()))
        values.register_hook(lambda grad: 2 * grad)
        loss = F.cross_entropy(logits, y) + values.pow(2).mean()
        model.backward(loss)
        return loss

    for i in range(2):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).reduce_mean())
        optimizer.step()
    out.value("norms", sorted(norms))
    out.model(model)


@program(stages=(2, 3), ranks=(2,), refused="retain_grad")
def retained_gradients(smp: Any, out: Any) -> None:
    """Saliency: retain_grad on the logits, requires_grad_ on the input outside; both gradients read after
    the step.
    """
    model = smp.DistributedModel(Heads())
    kept: list[Tensor] = []

    @smp.step
    def attribute(x: Tensor) -> Tensor:
        logits, _ = model(x)
        logits.retain_grad()
        kept.append(logits)
        score = logits.max(1).values.sum()
        model.backward(score)
        return score

    x, _ = data(0)
    x.requires_grad_(True)
    out.value("score", attribute(x).reduce_sum())
    out.value("saliency", x.grad)
    out.value("logits' gradients", [k.grad for k in kept])
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def adversarial(smp: Any, out: Any) -> None:
    """FGSM: one step gives the gradient of the input, read outside; the next trains on the disturbed
    batch.
    """
    model = smp.DistributedModel(mlp(6, 16, 16, 3))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for i in range(3):
        x, y = data(i)
        x.requires_grad = True
        optimizer.zero_grad()
        train_step(x, y)
        x_adv = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        out.value("adversarial loss", train_step(x_adv, y).reduce_mean())
        out.value("gradient of x", x.grad)
        optimizer.step()
    out.model(model)


# What they call ---------------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2), tolerance=1e-4)
def several_backwards(smp: Any, out: Any) -> None:
    """Two calls of the model and three backward calls in one step, one with grad_tensors, one loss scaled.

    The tolerance: two of them go through the same calls, which add before they go on.
    """
    model = smp.DistributedModel(Heads())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    @smp.step
    def train_step(clean: Tensor, noisy: Tensor, y: Tensor) -> list[Tensor]:
        logits, values = model(clean)
        first = F.cross_entropy(logits, y)
        model.backward(first)
        other, more = model(noisy)
        consistency = F.kl_div(other.log_softmax(-1), logits.detach().softmax(-1), reduction="batchmean")
        model.backward(0.3 * consistency)
        model.backward([values, more], [torch.ones_like(values), 0.5 * torch.ones_like(more)])
        return [first, consistency]

    for i in range(3):
        x, y = data(10 * i + smp.dp_rank())
        optimizer.zero_grad()
        losses = train_step(x, x + 0.1, y)
        optimizer.step()
        out.value("losses", [loss.reduce_mean() for loss in losses])
    out.model(model)


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Heads()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> dict[str, Any]:
        logits, values = self.net(x)
        losses = torch.stack([F.cross_entropy(logits, y), F.mse_loss(values, target)])
        total = (torch.exp(-self.log_vars) * losses + self.log_vars).sum()
        return {"loss": total, "losses": losses, "precision": self.log_vars.exp()}


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def loss_in_model(smp: Any, out: Any) -> None:
    """The model computes its own loss, with the uncertainty weights of Kendall as the container's
    parameter.
    """
    model = smp.DistributedModel(MultiTask())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))

    @smp.step
    def train_step(**batch: Tensor) -> dict[str, Any]:
        result = model(**batch)
        model.backward(result["loss"])
        return result

    for i in range(3):
        x, y = data(10 * i + smp.dp_rank())
        optimizer.zero_grad()
        result = train_step(x=x, y=y, target=x[:, :2])
        optimizer.step()
        out.value("losses", {k: v.reduce_mean() for k, v in result.items()})
    out.model(model)


class CenterLoss(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, width))

    def forward(self, features: Tensor, y: Tensor) -> Tensor:
        return (features - self.centers[y]).pow(2).sum(-1).mean() / 2


@program(stages=(2,), ranks=(2,))
def loss_with_own_parameters(smp: Any, out: Any) -> None:
    """A loss module with parameters outside the model, trained by an optimizer of its own in the same
    loop.
    """
    model = smp.DistributedModel(mlp(6, 16, 16, 4))
    center_loss = CenterLoss(3, 4)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer_centers = torch.optim.SGD(center_loss.parameters(), lr=0.5)

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = center_loss(model(x), y)
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        optimizer_centers.zero_grad()
        loss = train_step(*data(i))
        optimizer.step()
        out.value("gradient of centers", center_loss.centers.grad)
        optimizer_centers.step()
        out.value("loss", loss.reduce_mean())
    out.value("centers", center_loss.centers)
    out.model(model)


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6, 16, 16, 3), mlp(3, 16, 16, 6)
        self.mean = nn.Parameter(torch.zeros(3))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) + self.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encode(x))


@program(stages=(2, 3), ranks=(2,))
def part_of_the_model(smp: Any, out: Any) -> None:
    """Steps that call only model.module.encode(x), or the decoder on made codes."""
    model = smp.DistributedModel(AutoEncoder())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x)
        model.backward(loss)
        return loss

    @smp.step
    def embed(x: Tensor) -> Tensor:
        return model.module.encode(x)

    @smp.step
    def decode(z: Tensor) -> Tensor:
        return model.module.decoder(z)

    for i in range(2):
        x, _ = data(i)
        optimizer.zero_grad()
        out.value("loss", train_step(x).reduce_mean())
        optimizer.step()
        with torch.no_grad():
            codes = embed(x).concat()
            out.value("codes", codes)
            out.value("decoded", decode(codes.mean(0, keepdim=True).repeat(4, 1)).concat())
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def alternating_parts(smp: Any, out: Any) -> None:
    """requires_grad_ of two parts toggles between steps: encoder alone, decoder alone, both."""
    net = AutoEncoder()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x)
        model.backward(loss)
        return loss

    for i, (first, second) in enumerate([(True, False), (False, True), (True, True), (True, False)]):
        net.encoder.requires_grad_(first)
        net.decoder.requires_grad_(second)
        optimizer.zero_grad(set_to_none=True)
        out.value("loss", train_step(data(i)[0]).reduce_mean())
        optimizer.step()
    out.model(model)


@program(stages=(2,), ranks=(2,))
def rl_actor_critic(smp: Any, out: Any) -> None:
    """A2C: actions sampled in one step by torch.distributions, played outside, probabilities ratioed in
    the next.
    """
    model = smp.DistributedModel(Heads())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        policy = torch.distributions.Categorical(logits=model(state)[0])
        action = policy.sample()
        return action, policy.log_prob(action)

    @smp.step
    def learn(state: Tensor, action: Tensor, old: Tensor, reward: Tensor) -> dict[str, Any]:
        logits, values = model(state)
        policy = torch.distributions.Categorical(logits=logits)
        advantage = reward - values[:, 0].detach()
        ratio = (policy.log_prob(action) - old).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -clipped.mean() + 0.5 * F.mse_loss(values[:, 0], reward) - 0.01 * policy.entropy().mean()
        model.backward(loss)
        return {"loss": loss, "kl": (old - policy.log_prob(action)).mean().item()}

    for i in range(2):
        state, y = data(i)
        with torch.no_grad():
            action, old = act(state)
        action, old = action.concat(), old.concat()
        out.value("action", action)
        for _ in range(2):
            optimizer.zero_grad()
            result = learn(state, action, old, (action == y).float())
            optimizer.step()
            out.value("result", [result["loss"].reduce_mean(), result["kl"]])
    out.model(model)


# How they are run -------------------------------------------------------------------------------------------


class ZigZag(nn.Module):
    def __init__(self, smp: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(6):
            with smp.partition(i % 2):
                self.layers.append(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x) if i % 3 else layer(x)
        return self.head(x)


@program(
    stages=(2, 3),
    ranks=(2,),
    microbatches=4,
    pipelines=("interleaved", "simple"),
    static=True,
    parameters={"auto_partition": False, "default_partition": 1, "active_microbatches": 1},
)
def zigzag(smp: Any, out: Any) -> None:
    """Manual stages 0-1-0-1-0-1 in a loop; with three stages the last has nothing."""
    model = smp.DistributedModel(ZigZag(smp))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        out.value("loss", train_step(*data(i)).stack())
        optimizer.step()
    out.model(model)


@program(stages=(2, 4), ranks=(2,), parameters={"auto_partition": False, "default_partition": 1})
def empty_stage(smp: Any, out: Any) -> None:
    """Everything on stage 1: the others have no parameters, yet the same optimizer and clipping run there."""
    model = smp.DistributedModel(Heads())
    optimizer = smp.DistributedOptimizer(torch.optim.Adadelta(model.parameters()))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x)[0], y)
        model.backward(loss)
        return loss

    for i in range(3):
        optimizer.zero_grad()
        loss = train_step(*data(i))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
    out.model(model)


@program(
    stages=(2, 3),
    microbatches=8,
    static=True,
    parameters={
        "contiguous": False,
        "memory_weight": 1.0,
        "placement_strategy": "spread",
        "optimize": "speed",
    },
)
def sizes_change(smp: Any, out: Any) -> None:
    """Batch sizes and sequence lengths change with every step, one sample a microbatch; train and eval in
    turn.
    """
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 9))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(ids: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        model.backward(loss)
        return loss

    @smp.step
    def eval_step(ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="sum"), logits.argmax(-1)

    g = numbers(5)
    for batch, length in ((8, 5), (16, 3), (8, 5), (24, 8)):
        ids = torch.randint(0, 9, (batch, length), generator=g)
        model.train()
        optimizer.zero_grad()
        out.value("loss", train_step(ids).reduce_mean())
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            total, guess = eval_step(ids)
        out.value("test", [total.reduce_sum(), guess.concat()])
    out.model(model)


@program(stages=(2, 3), ranks=(2,), microbatches=1, parameters={"memory_weight": 0.0})
def accumulation(smp: Any, out: Any) -> None:
    """One microbatch; gradients accumulate over two steps, loss divided by two; clipped; EMA by deepcopy
    of weights.
    """
    model = smp.DistributedModel(Heads())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    average: dict[str, Tensor] = {}

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        logits, values = model(x)
        loss = (F.cross_entropy(logits, y) + values.abs().mean()) / 2
        model.backward(loss)
        return loss

    for i in range(4):
        out.value("loss", train_step(*data(i)).reduce_mean())
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
            for name, p in model.local_named_parameters():
                average.setdefault(name, copy.deepcopy(p.detach())).mul_(0.9).add_(p.detach(), alpha=0.1)
    for name in average:
        out.value(f"gradient of {name}", average[name])
    out.model(model)


@program(stages=(2,), parameters={"static_mode": True}, refused="static_mode")
def static_item(smp: Any, out: Any) -> None:
    """static_mode with .item() in the step: a replay cannot do it, so it is refused."""
    model = smp.DistributedModel(mlp(6, 16, 16, 3))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss.item()

    for i in range(2):
        out.value("loss", train_step(*data(i)))
