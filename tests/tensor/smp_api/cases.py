"""What the tests of SMP v1's tensor-parallelism API run in the ranks, and the same in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import smp_lite as smp
from smp_lite.nn.layout import layout_of, whole_of
from smp_lite.session import current
from tests.tensor.smp_api import hf_models, reference

BATCH, STEPS = 4, 3


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Linears(nn.Module):
    """A replicated norm beside split layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        return x + self.down(torch.relu(self.up(x)))


Made = tuple[nn.Module, Callable[[nn.Module], None]]


class Vectors(Linears):
    """Some inputs of its layers have no batch."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        condition = self.down(torch.relu(self.up(self.norm.weight.cumsum(0))))
        return super().forward(ids) + condition


class OwnNorm(nn.LayerNorm):
    """To be replaced, as torch's is not."""

    def __init__(self, size: int) -> None:
        super().__init__(size)


class Normed(Linears):
    """A distributed norm outside of distributed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnNorm(12)


def linears() -> Made:
    return Linears(), lambda net: smp.set_tensor_parallelism(net)


def _normed() -> Made:
    smp.tp_register_with_module(OwnNorm, smp.nn.DistributedLayerNorm)
    return Normed(), lambda net: smp.set_tensor_parallelism(net)


def _marks_inner(net: nn.Module) -> None:
    smp.set_tensor_parallelism(net.inner)


def _register() -> None:
    sizes = {
        "num_attention_heads": reference.HEADS,
        "attention_head_size": reference.HEAD,
        "hidden_size": reference.HIDDEN,
        "attention_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
    }
    wide = {**sizes, "intermediate_size": reference.INTERMEDIATE}
    nn_ = smp.nn

    def of_attention(options: dict[str, Any], *, cross: bool = False) -> Any:
        known = ("pre_layernorm", "post_layernorm", "causal_mask_size", "use_alibi", "flash_attention")
        return (), {**sizes, **{name: options[name] for name in known if name in options}}

    def of_output(options: dict[str, Any]) -> Any:
        norms = {name: options[name] for name in ("pre_layernorm", "post_layernorm")}
        names = ("hidden_size", "intermediate_size", "hidden_dropout_prob")
        return (), {**{name: wide[name] for name in names}, **norms}

    smp.tp_register_with_module(
        reference.Attention,
        nn_.DistributedAttentionLayer,
        of_attention,
        lambda x, _, mask: (((x, mask),), {}),
    )
    smp.tp_register_with_module(reference.Output, nn_.DistributedTransformerOutputLayer, of_output)
    smp.tp_register_with_module(
        reference.Layer, nn_.DistributedTransformerLayer, lambda options: ((), {**wide, **options})
    )
    smp.tp_register_with_module(
        reference.Transformer,
        nn_.DistributedTransformer,
        lambda num_layers, options: ((), {"num_layers": num_layers, **wide, **options}),
    )


def options_of(norms: str, **others: Any) -> dict[str, Any]:
    """Norms: ``pre``, ``post`` or ``both``."""
    return {
        "pre_layernorm": norms != "post",
        "post_layernorm": norms != "pre",
        "causal_mask_size": None,
        "add_cross_attention": False,
        **others,
    }


CAUSAL = {"causal_mask_size": reference.LENGTH}
INNER: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: reference.Attention(options_of("pre", **CAUSAL)),
    "attention post": lambda: reference.Attention(options_of("post", use_alibi=True)),
    "attention flash": lambda: reference.Attention(options_of("post", flash_attention=True, **CAUSAL)),
    "output": lambda: reference.Output(options_of("both")),
    "layer": lambda: reference.Layer(options_of("pre", **CAUSAL)),
    "layer cross": lambda: reference.Layer(options_of("post", add_cross_attention=True)),
    "transformer": lambda: reference.Transformer(3, options_of("pre", **CAUSAL)),
    "transformer post": lambda: reference.Transformer(2, options_of("post")),
    "transformer both": lambda: reference.Transformer(2, options_of("both", add_cross_attention=True)),
}


def _net(name: str) -> Made:
    _register()  # the constructors' arguments are noted from here on
    kind = name.split()[0]
    cross = name in ("layer cross", "transformer both")
    part = kind if kind in ("attention", "output") else ""
    return reference.Net(INNER[name](), cross=cross, part=part), _marks_inner


def _hf(make: Callable[[], nn.Module]) -> Made:
    net = make()
    return net, lambda net: smp.set_tensor_parallelism(net.model)


def _vocabulary(make: Callable[[], nn.Module]) -> Made:
    net = hf_models.Wrapped(make())
    return net, lambda net: smp.set_tensor_parallelism(net.model, distribute_embedding=True)


def _learned(heads: int, inner: str) -> Made:
    _register()
    part = inner if inner == "attention" else ""
    return reference.Net(INNER[inner](), part=part, learned=heads), _marks_inner


MODELS: dict[str, Callable[[], Made]] = {
    "linears": linears,
    "vectors": lambda: (Vectors(), lambda net: smp.set_tensor_parallelism(net)),
    "normed": _normed,
    "learned bias": functools.partial(_learned, 1, "transformer"),
    "learned bias of heads": functools.partial(_learned, reference.HEADS, "attention"),
    **{name: functools.partial(_net, name) for name in INNER},
    **{name: functools.partial(_hf, make) for name, make in hf_models.NAMES.items()},
    **{
        f"vocabulary {name}": functools.partial(_vocabulary, make)
        for name, make in hf_models.OF_ODD_VOCABULARY.items()
    },
}


class SomeBias(nn.Module):
    """Attention to which ranks give a learned bias, the same numbers as constants, or none."""

    def __init__(self, ways: list[str]) -> None:
        super().__init__()
        self.ways = ways
        self.embed = nn.Embedding(11, reference.HIDDEN)
        self.bias = nn.Parameter(torch.zeros(1, 1, 6, 6))
        sizes = (reference.HEADS, reference.HEAD, reference.HIDDEN)
        self.attention = smp.nn.DistributedAttentionLayer(*sizes, 0.0, 0.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        way = self.ways[smp.tp_rank()]
        bias = {"learned": self.bias, "constant": self.bias.detach(), "none": None}[way]
        return self.attention((self.embed(ids), bias))


def some_bias(ways: list[str]) -> torch.Tensor:
    """The gradient of a bias that is zero, whoever gives it."""
    smp.init({"microbatches": 1, "ddp": True, "partitions": 1, "tensor_parallel_degree": len(ways)})
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        net = SomeBias(ways)
        model = smp.DistributedModel(net)

    @smp.step
    def step(ids: torch.Tensor) -> None:
        model.backward(loss_of(model(ids), ids))

    step(batches(1, smp.dp_rank())[0])
    found = dict(model.module.named_parameters())["bias"].grad
    return torch.zeros(1, 1, 6, 6, dtype=torch.float64) if found is None else found


def batches(num_steps: int, replica: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + replica)
    return [torch.randint(11, (BATCH, 6), generator=generator) for _ in range(num_steps)]


def loss_of(found: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of anything a model returns: each number counts, with a weight of its own."""
    x, extra = (found, 0.0) if isinstance(found, torch.Tensor) else found
    weight = torch.linspace(-1.0, 1.0, x[0].numel(), dtype=x.dtype).reshape(x[0].shape)
    return ((x * weight).sum(tuple(range(1, x.dim()))).tanh() * (1 + ids.float().mean(-1))).mean() + extra


def train(model_name: str, parameters: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Losses, and the whole parameters and last gradients, after a few steps."""
    smp.init(parameters)
    torch.manual_seed(0)
    with default_dtype(dtype):
        net, marks = MODELS[model_name]()
        marks(net)
        model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    @smp.step
    def step(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = model(ids)
        loss = loss_of(found, ids)
        model.backward(loss)
        return loss, found if isinstance(found, torch.Tensor) else found[0]

    replica = smp.rdp_rank() if parameters.get("prescaled_batch") else smp.dp_rank()
    losses, outputs = [], []
    for ids in batches(STEPS, replica):
        optimizer.zero_grad()
        loss, output = step(ids)
        losses.append(loss.reduce_mean().item())
        outputs.append(output.concat())
        optimizer.step()
    gradients = {}
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        if parameter.grad is not None:
            gradients[name] = parameter.grad if layout is None else whole_of(parameter.grad, layout)
    state = model.state_dict()
    for to_hf, _ in smp.state.module_manager.translate_functions:
        state = to_hf(state)
        gradients = to_hf(gradients) if len(gradients) == len(list(model.parameters())) else {}
    return {
        "losses": losses,
        "outputs": outputs,
        "state": state,
        "gradients": gradients,
        "replica": replica,
        "kinds": sorted({type(m).__name__ for m in model.distributed_modules()}),
    }


def dense(model_name: str, num_replicas: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The same in one process, without smp."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        net, _ = MODELS[model_name]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses: list[list[float]] = [[] for _ in range(num_replicas)]
    outputs: list[list[torch.Tensor]] = [[] for _ in range(num_replicas)]
    data = [batches(STEPS, replica) for replica in range(num_replicas)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(num_replicas):
            parts = data[replica][step].chunk(2)  # microbatches
            found = [net(ids) for ids in parts]
            loss = sum(loss_of(each, ids) / 2 for each, ids in zip(found, parts, strict=True))
            (loss / num_replicas).backward()
            losses[replica].append(loss.item())
            tensors = [each if isinstance(each, torch.Tensor) else each[0] for each in found]
            outputs[replica].append(torch.cat(tensors).detach())
        optimizer.step()
    return {
        "losses": losses,
        "outputs": outputs,
        "state": net.state_dict(),
        "gradients": {name: p.grad for name, p in net.named_parameters()},
    }


def vocabulary() -> dict[str, Any]:
    """Of a GPT-2 whose vocabulary is split: parts, what a loss costs, and what it cannot do."""
    smp.init({**_OWN, "prescaled_batch": True, "optimize": "speed"})
    torch.manual_seed(0)
    net = hf_models.OF_ODD_VOCABULARY["gpt2"]()
    smp.set_tensor_parallelism(net, distribute_embedding=True, return_logits=False)
    model = smp.DistributedModel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    lm = model.get_module()
    ids = torch.randint(hf_models.ODD, (2, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model(input_ids=ids, labels=ids).logits.sum().backward()  # the loss, alone
        optimizer.step()
        optimizer.zero_grad()
    axis = current().axis("tp")
    before = axis.elements["all_gather"]
    loss = model(input_ids=ids, labels=ids)
    gathered = axis.elements["all_gather"] - before
    weight = lm.word_embedding.weight
    none = torch.full_like(ids, -100)
    try:
        model(input_ids=torch.full_like(ids, hf_models.ODD))
        said = ""
    except IndexError as error:
        said = f"IndexError: {error}"
    return {
        "shapes": {
            "word": list(weight.shape),
            "head": list(lm.lm_head.weight.shape),
            "whole": list(model.state_dict()["word_embedding.weight"].shape),
        },
        "tied": lm.lm_head.weight is weight,
        "padding": max(map(abs, weight[-1].tolist())) if smp.tp_rank() else 0.0,
        "gathered": gathered,
        "is_nan": bool(model(input_ids=ids, labels=none).logits.isnan()) and loss is not None,
        "said": said,
    }


def _hf_batch() -> torch.Tensor:
    return torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(3))


def hf_loss(model_name: str, state: dict[str, Any]) -> float:
    """Of a plain model with a state; the mean over microbatches."""
    net, _ = MODELS[model_name]()
    net.load_state_dict(state)
    with torch.no_grad():
        return sum(float(net.eval()(ids)[1]) / 2 for ids in _hf_batch().chunk(2))


def checkpoints(model_name: str, parameters: dict[str, Any], folder: str) -> dict[str, Any]:
    """Resumes from a plain model's full checkpoint, trains, and saves with its names and with ours."""
    smp.init(parameters)
    torch.manual_seed(0)
    net, marks = MODELS[model_name]()
    marks(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    smp.resume_from_checkpoint(folder, tag="plain.pt", partial=False, load_optimizer=False)
    ids = _hf_batch()

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)[1]
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids)[1]

    def loss() -> float:
        model.eval()
        found = evaluate(ids).reduce_mean().item()
        model.train()
        return found

    losses = [loss()]
    step(ids)
    optimizer.step()
    losses.append(loss())
    smp.save_checkpoint(folder, "names of old.pt", partial=False, model=model, optimizer=optimizer)
    smp.save_checkpoint(
        folder, "own names.pt", partial=False, model=model, optimizer=optimizer, translate_if_full=False
    )
    own = model.state_dict()
    after = []
    for tag in ("names of old.pt", "own names.pt"):
        smp.resume_from_checkpoint(folder, tag="plain.pt", partial=False, load_optimizer=False)
        after.append(loss())
        smp.resume_from_checkpoint(folder, tag=tag, partial=False)
        after.append(loss())
    (pair,) = smp.state.module_manager.translate_functions
    said = ""
    try:
        model.load_state_dict({**pair[0](own), "_smp_is_partial": False})
    except smp.SMPError as error:
        said = str(error)
    model.load_state_dict({**own, "_smp_is_partial": False})
    return {"losses": losses, "after": after, "names": sorted(own), "said": said}


def views() -> dict[str, Any]:
    """What a model of two ranks with batches of their own says of its parameters."""
    smp.init({**_OWN, "prescaled_batch": False, "optimize": "speed"})
    net, marks = MODELS["transformer"]()
    marks(net)
    model = smp.DistributedModel(net)
    named = dict(model.local_named_parameters())
    return {
        "axes": {name: smp.utils.get_distribution_axis(p) for name, p in named.items()},
        "shapes": {name: list(p.shape) for name, p in named.items()},
        "distributed": [name for name, p in named.items() if model.is_distributed_parameter(p)],
        "scaled": [name for name, _ in model.scaled_batch_reducer_named_parameters()],
        "default": [name for name, _ in model.default_reducer_named_parameters()],
        "whole": model.state_dict()["inner.seq_layers.0.attention.dense.weight"],
        "part": named["inner.seq_layers.0.attention.dense.weight"].detach(),
    }


_OWN = {"partitions": 1, "ddp": True, "tensor_parallel_degree": 2}


def dropped(optimize: str) -> list[torch.Tensor]:
    """What dropout leaves of ones: of attention weights by heads, and of a layer's output, on this rank."""
    smp.init({**_OWN, "prescaled_batch": True, "optimize": optimize})
    torch.manual_seed(0)
    layer = smp.nn.DistributedTransformerOutputLayer(8, 8, hidden_dropout_prob=0.5, add_residual=False)
    attention = smp.nn.DistributedAttentionLayer(4, 4, 8, attention_dropout_prob=0.5)
    seen: list[torch.Tensor] = []
    for part in (layer.dense2, layer.layernorm, attention.dense):
        part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    layer.leaves = attention.leaves = False
    with torch.no_grad():
        layer(torch.ones(3, 8))
        attention((torch.ones(2, 5, 8), None))
    torch.manual_seed(5)
    with torch.no_grad():
        attention((torch.ones(2, 5, 8), None))
    return [*seen, torch.rand(4)]


def checkpointed(parameters: dict[str, Any]) -> list[tuple[list[float], int]]:
    """Losses with dropout, and how many collectives the ranks made; without and with checkpointed layers."""
    found = []
    for marks_layers in (False, True):
        smp.reset()
        smp.init(parameters)
        torch.manual_seed(0)
        net, _ = MODELS["transformer"]()
        smp.set_tensor_parallelism(net.inner, attention_dropout_prob=0.5, hidden_dropout_prob=0.5)
        model = smp.DistributedModel(net)
        if marks_layers:
            layers = model.get_module().inner.seq_layers
            smp.set_activation_checkpointing(layers, pack_args_as_tuple=True, strategy="each")
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

        @smp.step
        def step(ids: torch.Tensor, model: Any) -> torch.Tensor:
            loss = loss_of(model(ids), ids)
            model.backward(loss)
            return loss

        losses = []
        for ids in batches(STEPS, 0):
            optimizer.zero_grad()
            losses.append(step(ids, model).reduce_mean().item())
            optimizer.step()
        found.append((losses, sum(current().axis("tp").calls.values())))
    return found
