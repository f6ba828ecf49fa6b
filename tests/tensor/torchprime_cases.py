"""What the tests of torchprime's files run in the ranks: unmodified models of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import smp_lite as smp
from smp_lite.nn.guarding import plain as plain_of
from smp_lite.session import current

TOKENS, BATCH = 6, 4


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
            use_cache=False,
            **more,
        )
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            attn_implementation="eager",
            use_cache=False,
        )
    )


MODELS = {"llama": llama, "mixtral": mixtral, "tied": lambda: llama(tie_word_embeddings=True)}


def batches(num_steps: int, replica: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + replica)
    return [torch.randint(32, (BATCH, TOKENS), generator=generator) for _ in range(num_steps)]


def dense(model: str, num_replicas: int, num_steps: int = 3) -> dict[str, Any]:
    """One process: the mean of the replicas' gradients."""
    net = MODELS[model]()
    optim = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses: list[list[float]] = [[] for _ in range(num_replicas)]
    for step in range(num_steps):
        optim.zero_grad()
        for replica in range(num_replicas):
            ids = batches(num_steps, replica)[step]
            loss = net(input_ids=ids, labels=ids).loss
            (loss / num_replicas).backward()
            losses[replica].append(loss.item())
        optim.step()
    return {"losses": losses, "state": net.state_dict()}


def train(file: str, overrides: tuple[str, ...], model: str = "llama", num_steps: int = 3) -> dict[str, Any]:
    """Losses of this replica, the whole state at the end, and how many elements lay here."""
    smp.init(file, overrides=overrides)
    net = MODELS[model]()
    wrapped = smp.DistributedModel(net)
    optim = smp.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=0.01))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = wrapped(input_ids=ids, labels=ids).loss
        wrapped.backward(loss)
        return loss

    losses = []
    for ids in batches(num_steps, smp.rdp_rank()):
        optim.zero_grad()
        losses.append(step(ids).reduce_mean().item())
        optim.step()
    sharded = wrapped.runtime.sharded
    return {
        "losses": losses,
        "replica": smp.rdp_rank(),
        "state": wrapped.state_dict(),
        "elements": sum(plain_of(parameter).numel() for parameter in wrapped.local_parameters()),
        "units": len(sharded.groups) if sharded is not None else 0,
    }


def both_roads(file: str, overrides: tuple[str, ...], store: str) -> dict[str, Any]:
    """Loss and gradients of the pieces, and of DTensors made by the same rules."""
    smp.init(file, overrides=overrides)
    ids = batches(1, smp.rdp_rank())[0]
    net = llama()
    model = smp.DistributedModel(net)

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    loss = step(ids).reduce_mean().item()
    from smp_lite.nn.layout import layout_of, whole_of

    gradients = {}
    for name, parameter in model.local_named_parameters():
        layout = layout_of(parameter)
        grad = parameter.grad
        gradients[name] = grad if layout is None else whole_of(grad, layout)
    rules = current().plan.parameter_rules
    smp.reset()
    try:
        found, by_dtensor = _by_dtensor(rules, ids, store)
    except RuntimeError as error:  # torch 2.8, of this model's reshapes
        if "only the leftmost dim of a Flatten can be sharded" not in str(error):
            raise
        return {"refused": f"torch {torch.__version__} has no sharding for a DTensor: {error}"}
    return {"losses": (loss, found), "gradients": gradients, "by_dtensor": by_dtensor}


def _by_dtensor(rules: Any, ids: torch.Tensor, store: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The same rules as placements over one axis, on which all ranks have the same batch's rows."""
    from mpi4py import MPI

    from smp_lite.systems.plan.sharding_rules import match_tensors

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
        net = llama()
        shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
        for name, rule in match_tensors(rules, shapes).items():
            owner, _, own = name.rpartition(".")
            dims = [dim for dim, axes in enumerate(rule.dims) if "fsdp" in axes]
            placement = Shard(dims[0]) if dims else Replicate()
            module = net.get_submodule(owner)
            whole = module._parameters[own]
            assert whole is not None
            module._parameters[own] = nn.Parameter(distribute_tensor(whole.detach(), mesh, [placement]))
        with implicit_replication():
            rows = DTensor.from_local(ids, mesh, [Shard(0)])
            logits = net(input_ids=rows).logits.redistribute(mesh, [Replicate()]).to_local()
            labels = rows.full_tensor()
            loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 32), labels[:, 1:].reshape(-1))
            loss.backward()
        gradients = {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in net.named_parameters()
        }
        own = nn.functional.cross_entropy(
            logits[rank * BATCH : (rank + 1) * BATCH, :-1].reshape(-1, 32), ids[:, 1:].reshape(-1)
        )
        return own.item(), gradients
    finally:
        dist.destroy_process_group()
