"""Trains a GPT: the calls of AWS's GPT training script for SMP v1, in its order, on a tiny model."""

import argparse
import json
import math
import os
import time

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
from data_pipeline import create_dataloader
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from torch import optim
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, GPTNeoXConfig, set_seed


class Annealing:
    """A schedule of the script's own: it sets the rate in the groups, and knows no scheduler of torch."""

    def __init__(self, optimizer, start_lr, total):
        self.optimizer, self.start_lr, self.total, self.count = optimizer, start_lr, total, 0
        self.step(0)

    def step(self, count=None):
        self.count = self.count + 1 if count is None else count
        for group in self.optimizer.param_groups:
            group["lr"] = self.start_lr * max(0.0, 1 - self.count / self.total)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.step(state["count"])


def groups_by_weight_decay(module):
    decay, no_decay, seen = {"params": []}, {"params": [], "weight_decay": 0.0}, set()
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                plain = isinstance(part, FusedLayerNorm) or name == "bias"
                (no_decay if plain else decay)["params"].append(p)
    return [decay, no_decay]


@smp.step
def train_step(model, input_ids, attention_mask, args):
    if args.logits_output:
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
        loss = output["loss"]
    else:
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return output if args.logits_output else loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def eval_model(model, dataloader):
    model = model.eval()
    count, loss = 0, 0.0
    with torch.no_grad():
        for input_ids, attention_mask in dataloader:
            loss += test_step(model, input_ids, attention_mask).reduce_mean()
            count += 1
    torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
    loss = (loss / smp.dp_size() / count).item()
    return loss, math.exp(loss)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--n_gpus", type=str, default=os.environ["SM_NUM_GPUS"])
    parser.add_argument("--output-data-dir", type=str, default=os.environ["SM_OUTPUT_DATA_DIR"])
    parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--training-dir", type=str, default=os.environ["SM_CHANNEL_TRAIN"])
    parser.add_argument("--test-dir", type=str, default=os.environ["SM_CHANNEL_TEST"])
    parser.add_argument("--checkpoint-dir", type=str, default="checkpoints")
    parser.add_argument("--model_type", type=str, default="gpt2")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--grad_clip", type=float, default=0.5)
    parser.add_argument("--init_scale", type=float, default=2.0**32)
    parser.add_argument("--sdp_threshold", type=int, default=1_000_000)
    parser.add_argument("--logits_output", type=str, default="")
    for name, default in {
        "fp16": 0,
        "bf16": 0,
        "use_distributed_transformer": 0,
        "sharded_data_parallel_degree": 0,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "microbatches": 1,
        "shard_optimizer_state": 0,
        "prescaled_batch": 1,
        "offload_activations": 0,
        "delayed_param": 0,
        "activation_checkpointing": 1,
        "activation_loading_horizon": 4,
        "skip_tracing": 0,
        "manual_partition": 0,
        "static_mode": 0,
        "fast_mode": 0,
        "gradient_accumulation": 1,
        "validation_freq": 0,
        "checkpoint_freq": 10000,
        "num_kept_checkpoints": 5,
        "load_partial": 0,
        "load_full": 0,
        "fine_tune": 0,
        "save_final_full_model": 0,
        "fused_softmax": 1,
        "fused_bias_gelu": 1,
        "flash_attention": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_known_args()[0]


def config_of(args):
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if args.model_type == "gpt2":
        return GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=4, n_head=2, **off)
    if args.model_type == "bloom":
        return BloomConfig(vocab_size=61, hidden_size=16, n_layer=4, n_head=2, hidden_dropout=0.0)
    return GPTNeoXConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )


def show_shards(module, optimizer):
    """What helpers of sharded data parallelism look up before the first step."""
    held = 0
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat):
        assert flat.dtype == torch.float32
        for p in group:
            assert p.ds_numel == math.prod(p.ds_shape)
            held += p.ds_tensor.ds_numel
        assert flat.numel() == sum(p.ds_tensor.ds_numel for p in group)
    assert held < sum(p.ds_numel for p in module.parameters())
    assert torch.distributed.get_world_size(optimizer.ds_param_shard_group) > 1


def main():
    args = parse_args()
    if args.fp16 and args.bf16:
        raise ValueError("fp16 and bf16 are two ways to train: choose one")
    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "microbatches": args.microbatches,
            "shard_optimizer_state": args.shard_optimizer_state > 0,
            "prescaled_batch": args.prescaled_batch > 0,
            "fp16": args.fp16 > 0,
            "bf16": args.bf16 > 0,
            "offload_activations": args.offload_activations > 0,
            "delayed_parameter_initialization": args.delayed_param > 0,
            "optimize": "speed",
            "placement_strategy": "cluster",
            "activation_loading_horizon": args.activation_loading_horizon,
            "skip_tracing": args.skip_tracing > 0,
            "auto_partition": not args.manual_partition,
            "default_partition": 0,
            "static_mode": args.static_mode > 0,
            "fast_mode": args.fast_mode > 0,
            "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
            "ddp_dist_backend": "auto",
            "sdp_hierarchical_allgather": False,
            "sdp_gradient_clipping": args.grad_clip,
            "sdp_param_persistence_threshold": args.sdp_threshold,
        }
    )
    if smp.rank() == 0:
        print("smdistributed.modelparallel", smdistributed.modelparallel.__version__)
    set_seed(args.seed)
    smp.barrier()
    config = config_of(args)
    dtype = torch.get_default_dtype()
    if args.fp16 or args.bf16:
        dtype = torch.float16 if args.fp16 else torch.bfloat16
    if args.fine_tune and smp.rank() == 0:
        # Somebody's trained model, as its hub would have it.
        pretrained = AutoModelForCausalLM.from_config(config)
        torch.save(pretrained.state_dict(), os.path.join(args.model_dir, "fullmodel.pt"))
        del pretrained
    smp.barrier()
    set_seed(args.seed)
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        zero_init=args.use_distributed_transformer == 0,
        dtype=dtype,
        distribute_embedding=False,
        fused_softmax=args.fused_softmax > 0,
        fused_bias_gelu=args.fused_bias_gelu > 0,
        flash_attention=args.flash_attention > 0,
    ):
        model = AutoModelForCausalLM.from_config(config)
    torch.cuda.set_device(smp.local_rank())
    set_seed(args.seed + smp.tp_rank())
    model = smp.DistributedModel(
        model, trace_device="gpu", backward_passes_per_step=args.gradient_accumulation
    )
    m = model.get_module()
    num_params = sum(math.prod(getattr(p, "ds_shape", p.shape)) for p in m.parameters())
    layers = m.gpt_neox.layers if args.model_type == "gpt_neox" else m.transformer.h
    if args.manual_partition:
        for i, layer in enumerate(layers.children()):
            smp.set_partition(layer, i * smp.pp_size() // len(layers))
    optimizer = optim.Adam(groups_by_weight_decay(m), betas=(0.9, 0.95), lr=args.lr, weight_decay=0.01)
    if args.activation_checkpointing:
        for layer in layers.children():
            smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={
            "init_scale": args.init_scale,
            "scale_window": 1000,
            "min_scale": 1,
            "delayed_shift": 2,
        },
    )
    if args.sharded_data_parallel_degree > 1:
        show_shards(m, optimizer)
    scheduler = Annealing(optimizer, args.lr, 20)
    total_steps = start_batch = 0
    if args.load_partial:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, tag=None, partial=True)
        total_steps, start_batch = content["total_steps"], content["start_batch_index"]
        assert type(content["model_config"]) is type(config)
        scheduler.load_state_dict(content["lr_scheduler"])
    elif args.load_full:
        content = smp.resume_from_checkpoint(args.model_dir, tag="fullmodel.pt", partial=False)
        assert content.get("total_steps", 0) > 0
    elif args.fine_tune:
        smp.resume_from_checkpoint(args.model_dir, tag="fullmodel.pt", partial=False)
    torch.cuda.empty_cache()

    rank, size = (smp.rdp_rank(), smp.rdp_size()) if args.prescaled_batch else (smp.dp_rank(), smp.dp_size())
    paths = sorted(os.path.join(args.training_dir, name) for name in os.listdir(args.training_dir))
    loader = create_dataloader(paths, args.train_batch_size, rank, size)
    val_loader = (
        create_dataloader(paths[:1], args.train_batch_size, rank, size) if args.validation_freq else None
    )
    model.train()
    record = {"loss": [], "val_loss": [], "num_params": num_params, "norms": [], "overflows": 0}
    set_seed(args.seed)
    for batch_index, (input_ids, attention_mask) in enumerate(loader):
        if batch_index < start_batch:
            continue
        if total_steps >= args.max_steps:
            break
        torch.cuda.synchronize()
        started = time.time()
        if batch_index % args.gradient_accumulation == 0:
            optimizer.zero_grad(set_to_none=True)
        if args.logits_output:
            output = train_step(model, input_ids, attention_mask, args)
            loss = output["loss"].reduce_mean()
            logits = torch.cat(tuple(output["logits"].outputs), dim=0)
        else:
            loss = train_step(model, input_ids, attention_mask, args).reduce_mean()
        if batch_index % args.gradient_accumulation == args.gradient_accumulation - 1:
            if args.sharded_data_parallel_degree < 1:
                record["norms"].append(optimizer.clip_master_grads(args.grad_clip))
            optimizer.step()
            record["overflows"] += int(args.fp16 and optimizer.overflow)
            if args.sharded_data_parallel_degree > 1:
                record["norms"].append(float(optimizer._global_grad_norm))
            if not (args.fp16 and optimizer.overflow):
                scheduler.step()
        torch.cuda.synchronize()
        total_steps += 1
        assert time.time() >= started and torch.cuda.max_memory_allocated() == 0
        reduced = loss.detach()
        torch.distributed.all_reduce(reduced, group=smp.get_dp_process_group())
        record["loss"].append(reduced.item() / smp.dp_size())
        if args.validation_freq and not total_steps % args.validation_freq:
            torch.cuda.empty_cache()
            record["val_loss"].append(eval_model(model, val_loader)[0])
            model = model.train()
        if not total_steps % args.checkpoint_freq:
            content = {
                "cli_args": args.__dict__,
                "num_params": num_params,
                "total_steps": total_steps,
                "model_config": config,
                "start_batch_index": batch_index + 1,
                "lr_scheduler": scheduler.state_dict(),
            }
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{total_steps}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content=content,
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )
    if smp.rank() == 0:
        if args.logits_output:
            record["logits"] = float(logits.detach().cpu().double().sum())
        with open(os.path.join(args.output_data_dir, "record.json"), "w") as file:
            json.dump(record, file)
    if args.save_final_full_model:
        content = {"cli_args": args.__dict__, "total_steps": total_steps, "model_config": config}
        smp.save_checkpoint(
            args.model_dir, tag="fullmodel.pt", partial=False, model=model, user_content=content
        )
    smp.barrier()
    if smp.rank() == 0:
        print("training finished successfully")


if __name__ == "__main__":
    main()
