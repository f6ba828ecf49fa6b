"""What :mod:`.test_replacement_law` runs, on ranks and in one process: models that differ from what their
configuration makes, or that reach their layers in other ways than by submodules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import smp_lite as smp
from tests.tensor.smp_api.hf_models import MODELS, VOCABULARY


class Net(nn.Module):
    """Two layers, and whatever else refers to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.refer()

    def refer(self) -> None:
        """For those that do."""

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.first(x)))


class InList(Net):
    def refer(self) -> None:
        self.layers = [self.up, self.down]

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class InDict(Net):
    def refer(self) -> None:
        self.layers = {"up": self.up}

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["up"](x)


class Hidden(Net):
    def refer(self) -> None:
        object.__setattr__(self, "same", self.up)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(x)


class Closure(Net):
    def refer(self) -> None:
        up = self.up
        self.function = lambda x: up(x)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class BoundForward(Net):
    def refer(self) -> None:
        self.function = self.up.forward

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class ParameterInList(Net):
    def refer(self) -> None:
        self.weights = [self.up.weight]

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[0])


REFERRING: dict[str, tuple[type[Net], str]] = {
    "a list": (InList, "'up' was replaced by its split layer"),
    "a dict": (InDict, "'up' was replaced by its split layer"),
    "an attribute beside the submodules": (Hidden, "'up' was replaced by its split layer"),
    "a closure": (Closure, "'up' was replaced by its split layer"),
    "its forward": (BoundForward, "linear of 'up.weight' at "),
    "a parameter in a list": (ParameterInList, "linear of 'up.weight' at "),
}


def _step_of(model: smp.DistributedModel) -> Callable[..., Any]:
    @smp.step
    def step(*batch: torch.Tensor) -> torch.Tensor:
        found = model(*batch)
        loss = found.loss if hasattr(found, "loss") else found.square().mean()
        model.backward(loss)
        return loss

    return step


def made(kind: type[nn.Module], parameters: dict[str, Any], *, delayed: bool = False) -> nn.Module:
    """Marked, in a new session."""
    smp.reset()
    smp.init(parameters)
    torch.manual_seed(0)
    if delayed:
        with smp.delay_param_initialization():
            net = kind()
    else:
        net = kind()
    smp.set_tensor_parallelism(net)
    return net


def referring(parameters: dict[str, Any]) -> dict[str, str]:
    """The error for each way to reach a layer, also where the model has no memory yet."""
    told = {}
    for name, (kind, _) in REFERRING.items():
        for delayed in (False, True):
            model = smp.DistributedModel(made(kind, parameters, delayed=delayed))
            try:
                _step_of(model)(torch.ones(4, 8))
                told[f"{name}, delayed={delayed}"] = "ran"
            except smp.SMPError as error:
                told[f"{name}, delayed={delayed}"] = str(error)
    return told


def early_optimizer(parameters: dict[str, Any], *, delayed: bool) -> list[str]:
    """What is said of an optimizer that was made before the model was wrapped, wrapped and as it is."""
    net = made(Net, parameters, delayed=delayed)
    early = torch.optim.SGD(net.parameters(), lr=1.0)
    model = smp.DistributedModel(net)
    told = []
    late = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    _step_of(model)(torch.ones(4, 8))
    for use in (lambda: smp.DistributedOptimizer(early), early.zero_grad, early.step, late.step):
        try:
            use()
            told.append("ran")
        except smp.SMPError as error:
            told.append(str(error))
    return told


def early_optimizer_of_a_plan(parameters: dict[str, Any]) -> str:
    smp.reset()
    smp.init(parameters)
    net = Net()
    early = torch.optim.SGD(net.parameters(), lr=1.0)
    smp.parallelize(net, {"up": "colwise", "down": "rowwise"})
    smp.DistributedModel(net)
    try:
        smp.DistributedOptimizer(early)
    except smp.SMPError as error:
        return str(error)
    return "ran"


# Hugging Face models ----------------------------------------------------------------------------------------


def gpt2(**options: Any) -> Any:
    """With dropout everywhere, if nothing else is said."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": 16}
    config = transformers.GPT2Config(
        **{**sizes, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "use_cache": False, **options}
    )
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def plain_gpt2(**options: Any) -> Any:
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options)


def no_dropout() -> nn.Module:
    return without_dropout(gpt2())


def identities() -> nn.Module:
    model = gpt2(attn_pdrop=0.0)
    model.transformer.drop = nn.Identity()
    for block in model.transformer.h:
        block.attn.resid_dropout = block.mlp.dropout = nn.Identity()
    return model


def other_epsilon() -> nn.Module:
    model = plain_gpt2()
    for place, module in enumerate(m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        module.eps = 0.1 * (1 + place // 2)  # another one in each block
    return model


def other_activation() -> nn.Module:
    model = plain_gpt2()
    model.transformer.h[1].mlp.act = nn.ReLU()
    return model


def other_scaling() -> nn.Module:
    model = plain_gpt2()
    attention = model.transformer.h[1].attn
    attention.scale_attn_weights, attention.scaling = False, 1.0
    return model


def exchanged(model: nn.Module) -> nn.Module:
    layers = model.transformer.h  # type: ignore[union-attr]
    model.transformer.h = nn.ModuleList([layers[1], layers[0]])  # type: ignore[union-attr,index]
    return model


def tied_by_hand() -> nn.Module:
    model = plain_gpt2(tie_word_embeddings=False)
    model.lm_head.weight = model.transformer.wte.weight
    return model


def untied_by_hand() -> nn.Module:
    model = plain_gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    return model


def bert_no_dropout() -> nn.Module:
    model = MODELS["bert"]()
    config = copy.deepcopy(model.config)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.5
    return without_dropout(transformers.BertForMaskedLM(config))


FOLLOWED: dict[str, Callable[[], nn.Module]] = {
    "no dropout": no_dropout,
    "identities for dropout": identities,
    "epsilons of layers": other_epsilon,
    "an activation": other_activation,
    "scaling of a layer": other_scaling,
    "layers in another order": lambda: exchanged(plain_gpt2(scale_attn_by_inverse_layer_idx=True)),
    "kinds of attention in another order": lambda: exchanged(MODELS["gptneo"]()),
    "tied by hand": tied_by_hand,
    "untied by hand": untied_by_hand,
    "bert without dropout": bert_no_dropout,
}


def _ids() -> torch.Tensor:
    return torch.arange(24).reshape(4, 6) * 7 % VOCABULARY


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def dense_losses(name: str) -> list[float]:
    """Of three steps in one process."""
    torch.manual_seed(0)
    model, ids, losses = FOLLOWED[name]().train(), _ids(), []
    optimizer = _optimizer(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses(name: str, parameters: dict[str, Any], mark: str = "") -> tuple[list[float], list[str]]:
    """The same on ranks; and of what classes the model's modules are.

    Args:
        mark: the module that is distributed.
    """
    smp.reset()
    smp.init(parameters)
    torch.manual_seed(0)
    net = FOLLOWED[name]().train()
    smp.set_tensor_parallelism(net.get_submodule(mark))
    model, ids, found = smp.DistributedModel(net), _ids(), []
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        found.append(step(ids).reduce_mean().item())
        optimizer.step()
    return found, sorted({type(module).__name__ for module in model.distributed_modules()})


# State of optimizers ----------------------------------------------------------------------------------------


def moved_optimizer(name: str, folder: str, parameters: dict[str, Any]) -> list[float]:
    """Two steps of a plain model, whose weights and optimizer's state a split one takes for a third."""
    torch.manual_seed(0)
    model, ids = MODELS[name]().train(), _ids()
    optimizer = _by_decay(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    smp.reset()
    smp.init(parameters)
    if smp.rank() == 0:
        torch.save(model.state_dict(), f"{folder}/plain")
        torch.save(optimizer.state_dict(), f"{folder}/optimizer_plain")
    smp.barrier()
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    after = model(input_ids=ids, labels=ids).loss.item()
    net = MODELS[name]().train()
    smp.set_tensor_parallelism(net)
    split = smp.DistributedModel(net)
    moved = smp.DistributedOptimizer(_by_decay(split))
    smp.resume_from_checkpoint(folder, "plain", partial=False)

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = split(input_ids=ids, labels=ids).loss
        split.backward(loss)
        return loss

    moved.zero_grad()
    step(ids)
    moved.step()
    return [after, step(ids).reduce_mean().item()]


def _by_decay(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices alone in a group, where those of one layer have one shape."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if (p.dim() > 1) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def moved_off(folder: str, parameters: dict[str, Any]) -> dict[str, str]:
    """What is said when a split GPT-2's checkpoints go on without tensor parallelism, and the reverse."""
    plain = {key: value for key, value in parameters.items() if key != "tensor_parallel_degree"}
    told = {}
    for way, (there, here) in {"off": (parameters, plain), "on": (plain, parameters)}.items():
        for portable in (True, False):
            kind = {"portable": True} if portable else {"partial": False}
            path = f"{folder}/{way} {portable}"
            model, optimizer = _wrapped_gpt2(there)
            _labelled_step(model)
            optimizer.step()
            smp.save_checkpoint(path, "a", model=model, optimizer=optimizer, **kind)
            _wrapped_gpt2(here)
            try:
                smp.resume_from_checkpoint(path, "a", **({} if portable else kind))
                told[f"{way}, portable={portable}"] = "ran"
            except (smp.SMPError, ValueError) as error:
                told[f"{way}, portable={portable}"] = str(error)
    return told


def _labelled_step(model: smp.DistributedModel) -> None:
    @smp.step
    def step(ids: torch.Tensor) -> None:
        model.backward(model(input_ids=ids, labels=ids).loss)

    step(_ids())


def _wrapped_gpt2(parameters: dict[str, Any]) -> tuple[smp.DistributedModel, smp.DistributedOptimizer]:
    smp.reset()
    smp.init(parameters)
    torch.manual_seed(0)
    net = plain_gpt2()
    if "tensor_parallel_degree" in parameters:
        smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    return model, smp.DistributedOptimizer(_optimizer(model.parameters()))
