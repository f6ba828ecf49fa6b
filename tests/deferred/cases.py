"""What the tests of delayed initialization run in the ranks, and in one process."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smp_lite as smp
from smp_lite.deferred import is_deferred

WIDTH, CLASSES = 8, 5
OF_NUMBERS = ("net", "recurrent")  # kinds of models that take numbers, not tokens
_M_MMAP_THRESHOLD = -3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        nn.init.trunc_normal_(self.down.weight, std=0.02)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, num_blocks: int = 4, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.bn = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, CLASSES)
        self.shift = torch.rand(width)  # no parameter and no buffer
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.head(self.bn(x + self.shift)))


class Scaled(nn.Module):
    """A parameter that is made of a number, and so is there while others wait."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.scale)


class Recurrent(nn.Module):
    """Its layers keep a second list of their parameters, and weak references to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2), nn.GRU(WIDTH, WIDTH), nn.RNN(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        for layer in self.layers:
            x = layer(x)[0]
        return x


def build(delay: bool, kind: str = "net", **options: Any) -> nn.Module:
    context = smp.delay_param_initialization() if delay else contextlib.nullcontext()
    with context:
        if kind == "net":
            return Net(**options)
        return Recurrent() if kind == "recurrent" else _transformer(kind)


def _transformer(kind: str) -> nn.Module:
    import transformers as hf

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 60}
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=60, n_positions=16)
        )
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=32))
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**sizes, intermediate_size=32))
    assert kind == "t5"
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=60, decoder_start_token_id=0
        )
    )


def train(
    parameters: dict[str, Any], *, delay: bool, kind: str = "net", seed: int = 0, steps: int = 2
) -> dict[str, Any]:
    """State at the end of training, the generator before the first step, what waited until then."""
    smp.init(parameters)
    torch.manual_seed(seed + (smp.dp_rank() if delay is None else 0))
    tensor = parameters.get("tensor_parallel_degree", 1) > 1
    with smp.model_creation(tensor_parallelism=tensor):
        net = build(delay, kind)
    after = torch.get_rng_state()
    model = smp.DistributedModel(net)
    waited = sum(is_deferred(p) for p in net.parameters())
    members = list(model.parameters())
    optim = smp.DistributedOptimizer(torch.optim.AdamW(members, lr=0.01))

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        if kind in OF_NUMBERS:
            loss = model(x).square().mean()
        elif kind == "t5":
            loss = model(input_ids=x, labels=x).loss
        else:
            loss = model(input_ids=x, labels=x).loss
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(5)
    losses = []
    model.eval()  # no dropout: its numbers depend on the stage
    for _ in range(steps):
        x = (
            torch.randn(8, WIDTH, generator=generator)
            if kind in OF_NUMBERS
            else torch.randint(60, (8, 6), generator=generator)
        )
        optim.zero_grad()
        losses.append(step(x).reduce_mean().item())
        optim.step()
    here = dict(model.local_named_parameters())
    return {
        "losses": losses,
        "after": after,
        "waited": waited,
        "state": model.state_dict(),
        "types": {type(p).__name__ for p in here.values()},
        "same objects": {id(p) for p in here.values()} <= {id(p) for p in members},
        "left": sum(is_deferred(t) for t in [*net.parameters(), *net.buffers()]),
    }


def limited(delay: bool, width: int, num_blocks: int, mib: int) -> dict[str, Any]:
    """One step of a model whose whole parameters do not fit into the memory that the rank may take."""
    import torch._dynamo  # by optimizers, later

    smp.init({"partitions": smp_size(), "microbatches": 2, "ddp": False})
    # Freed tensors go back at once, so that the limit counts what is used and not holes of glibc's heap.
    # MPI sets this limit too, as it starts.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 18)
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + mib * 2**20, before[1]))
    try:
        torch.manual_seed(0)
        try:
            net = build(delay, width=width, num_blocks=num_blocks, tied=False)
        except (MemoryError, RuntimeError) as error:
            return {"failed": str(error)[:80]}
        model = smp.DistributedModel(net)
        optim = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        loss = step(torch.ones(4, width)).reduce_mean().item()
        optim.step()
        own = sum(p.numel() * 4 for p in model.local_parameters())
        whole = sum(p.numel() * 4 for p in net.parameters())
        return {"loss": loss, "own": own, "whole": whole}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def smp_size() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_size())


def load(parameters: dict[str, Any], folder: str, tag: str, *, kind: str = "gpt2") -> dict[str, Any]:
    """What a delayed model holds after its first step, when a whole checkpoint was loaded before."""
    smp.init(parameters)
    torch.manual_seed(9)
    net = build(True, kind)
    model = smp.DistributedModel(net)
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    smp.resume_from_checkpoint(folder, tag=tag, partial=False, load_optimizer=False)
    waited = sum(is_deferred(p) for p in net.parameters())

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=x, labels=x).loss
        model.backward(loss)
        return loss

    step(torch.arange(8).reshape(4, 2))
    return {"state": model.state_dict(), "waited": waited}


def meta(parameters: dict[str, Any], *, bare: bool = False) -> dict[str, Any]:
    """State and generator of a model that was built on the meta device, at the first step."""
    smp.init(parameters)
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        )
        if bare:
            net[0].extra = nn.Parameter(torch.empty(3))
    torch.manual_seed(4)
    model = smp.DistributedModel(net)
    after = torch.get_rng_state()

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    model.eval()
    try:
        step(torch.ones(4, 4))
    except smp.SMPError as error:
        return {"error": str(error)}
    return {"state": model.state_dict(), "after": after}


def seeded(parameters: dict[str, Any], *, by_rank: bool) -> str:
    """What the first step tells, where each rank has seeded for itself."""
    smp.init(parameters)
    torch.manual_seed(smp.rank() if by_rank else 3)
    with smp.delay_param_initialization():
        model = smp.DistributedModel(Net())

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    try:
        step(torch.ones(4, WIDTH))
    except smp.SMPError as error:
        return f"{type(error).__name__}: {error}"
    return "ran"
