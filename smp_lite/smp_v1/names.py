"""Every name of SMP v1 that a public script, the documentation or transformers uses, and what becomes of it.

A name *runs*, is a *hint* (taken, and without effect, because it cannot change a result), or is *refused*
when it is used: with :class:`~smp_lite.SMPError`, which says what is missing. Names are as below ``import
smdistributed.modelparallel.torch as smp``; methods stand under their class.

The names were gathered from public scripts and documents: AWS's examples and container tests, the SageMaker
developer guide and SDK documentation, transformers 4.28 to 5.23. Nothing rests on the original's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["NAMES", "Name", "Status", "find", "under"]

Status = Literal["runs", "hint", "refused"]


@dataclass(frozen=True)
class Name:
    """One name.

    Attributes:
        path: below ``smp``, for example ``nn.FusedLayerNorm``.
        status: see the module.
        says: of a hint why it may be one, of a refused name what is missing and what to do.
        refused_with: (argument, values) that are refused where the name itself runs.
        kind: what a refused name is to Python.
    """

    path: str
    status: Status
    says: str = ""
    refused_with: tuple[str, tuple[object, ...]] | None = None
    kind: Literal["function", "class", "attribute"] = "function"


def _runs(paths: str, says: str = "") -> Iterator[Name]:
    for path in paths.split():
        yield Name(path, "runs", says)


def _refused(
    paths: str, says: str, kind: Literal["function", "class", "attribute"] = "function"
) -> Iterator[Name]:
    for path in paths.split():
        yield Name(path, "refused", says, kind=kind)


_SHARDED = (
    "SMP's own buffers of sharded optimizer state, not supported yet: a parameter's piece is "
    "optimizer.stand_in_of(parameter)"
)


def _translators() -> Iterator[str]:
    for model, other_names in (
        (
            "gpt2",
            "translate_hf_state_dict_to_smdistributed translate_hf_block_state_dict_to_smdistributed "
            "translate_layer_state_dict_to_hf_gpt2_block get_hf_gpt2_transformer_layer_hooks",
        ),
        (
            "gptj",
            "translate_hf_gptj_state_dict_to_smdistributed "
            "translate_hf_gptj_state_dict_to_smdistributed_gptj",
        ),
        ("gptneo", "translate_hf_gptneo_state_dict_to_smdistributed"),
        ("bert", ""),
        ("roberta", "translate_state_dict_to_smdistributed"),
    ):
        own = f"translate_state_dict_to_hf_{model} translate_hf_state_dict_to_smdistributed_{model}"
        for name in f"{own} {other_names}".split():
            yield f"nn.huggingface.{model}.{name}"


def _all() -> Iterable[Name]:
    yield Name("init", "runs", "a second call does nothing, unless it asks for other parameters")
    yield from _runs("is_initialized is_tracing")
    yield from _runs("rank size local_rank local_size")
    kinds = ("mp", "dp", "pp", "tp", "rdp")
    for kind in kinds:
        yield from _runs(f"{kind}_rank {kind}_size get_{kind}_group")
    for kind in ("world", *kinds):
        yield Name(f"get_{kind}_process_group", "runs", "needs ddp: True")
    yield from _runs("barrier mp_barrier dp_barrier pp_barrier tp_barrier rdp_barrier")
    yield from _runs("broadcast send recv_from allgather")
    yield from _runs("CommGroup RankType WORLD MP_GROUP DP_GROUP PP_GROUP TP_GROUP RDP_GROUP")
    yield from _refused(
        "hvd_average_grads",
        "Horovod's own averaging: write ddp or horovod in the parameters, and the step averages gradients",
    )

    yield Name("step", "runs", "a batch that other ranks have as dummies is taken from pp rank 0")
    yield Name(
        "DistributedModel",
        "runs",
        "in one partition also in a plain loop, without smp.step; trace_device is a hint: tracing runs on "
        "tensors without data",
    )
    yield from _runs(
        "DistributedModel.backward DistributedModel.get_module DistributedModel.module "
        "DistributedModel.partitioned DistributedModel.register_post_partition_hook "
        "DistributedModel.register_post_step_hook DistributedModel.register_comm_hook "
        "DistributedModel.state_dict DistributedModel.local_state_dict DistributedModel.load_state_dict "
        "DistributedModel.local_parameters DistributedModel.local_named_parameters "
        "DistributedModel.local_buffers DistributedModel.local_named_buffers DistributedModel.local_modules "
        "DistributedModel.local_named_modules DistributedModel.cpu DistributedModel.distributed_modules "
        "DistributedModel.is_distributed_parameter DistributedModel.is_distributed_buffer "
        "DistributedModel.is_scaled_batch_parameter DistributedModel.is_scaled_batch_buffer "
        "DistributedModel.default_reducer_named_parameters "
        "DistributedModel.scaled_batch_reducer_named_parameters"
    )
    yield from _refused(
        "DistributedModel.join",
        "uneven numbers of steps, not supported yet: give every dp rank the same, with drop_last=True",
    )
    yield Name(
        "DistributedModel.virtual_named_parameters",
        "runs",
        "with the masters and pieces that the optimizer steps in the place of parameters",
    )
    yield Name("DistributedOptimizer", "runs", "loss-scale arguments mean nothing without fp16")
    yield from _runs(
        "DistributedOptimizer.step DistributedOptimizer.zero_grad DistributedOptimizer.param_groups "
        "DistributedOptimizer.state DistributedOptimizer.optimizer DistributedOptimizer.state_dict "
        "DistributedOptimizer.local_state_dict DistributedOptimizer.load_state_dict "
        "DistributedOptimizer.orig_state_dict DistributedOptimizer.save_optimizer_backcompat "
        "DistributedOptimizer.load_optimizer_backcompat"
    )
    yield Name(
        "DistributedOptimizer.add_param_group",
        "runs",
        "before the first step, over several partitions; give the optimizer what is frozen till later, too",
    )
    yield Name(
        "DistributedOptimizer.clip_master_grads",
        "runs",
        "clips gradients by the whole model's norm; -1: one of fp16 overflowed",
    )
    yield Name("DistributedOptimizer.overflow", "runs", "False without fp16: nothing overflows")
    yield Name(
        "DistributedOptimizer.reload_model_params",
        "runs",
        "masters become the parameters; those of parameters that were changed do so by themselves",
    )
    yield from _runs("DistributedOptimizer.loss_scaler DistributedOptimizer.loss_scale", "with fp16: True")
    yield from _runs("DistributedOptimizer._param_id_to_index")
    yield from _refused("DistributedOptimizer.redefined_params", _SHARDED, kind="attribute")
    yield from _runs(
        "DistributedOptimizer._global_grad_norm DistributedOptimizer.fp16_groups "
        "DistributedOptimizer.fp32_partitioned_groups_flat DistributedOptimizer.ds_param_shard_group",
        "with `sharded_data_parallel_degree` above 1; so have parameters `ds_shape`, `ds_numel` and "
        "`ds_tensor`",
    )
    yield from _runs(
        "StepOutput StepOutput.outputs StepOutput.reduce_mean StepOutput.reduce_sum StepOutput.concat "
        "StepOutput.stack StepOutput.detach"
    )
    yield from _runs("partition set_partition", "decides with auto_partition: False only")
    yield from _runs("state state.cfg state.module_manager state.module_manager.translate_functions")

    yield from _runs("save load save_checkpoint resume_from_checkpoint")
    yield Name("amp.GradScaler", "runs")
    yield Name(
        "set_activation_checkpointing",
        "runs",
        "a module that is cut over stages by the library runs without it",
    )
    yield from _runs("patches.checkpoint.checkpoint patches.checkpoint.checkpoint_sequential")

    keeps = "new modules keep the weights of those that they replace, where names and shapes allow it"
    yield Name("model_creation", "runs", f"dtype holds inside; {keeps}")
    yield from _runs("tensor_parallelism set_tensor_parallelism", keeps)
    yield Name(
        "delay_param_initialization",
        "runs",
        "parameters are those of plain construction, to the bit; random numbers are drawn twice: once to go "
        "on from, once by who keeps them",
    )
    yield from _runs("tp_register tp_register_with_module")

    yield Name("nn.FusedLayerNorm", "runs", "torch's LayerNorm")
    for kind in ("Module", "Linear", "Embedding", "Transformer", "TransformerLayer"):
        yield Name(f"nn.Distributed{kind}", "runs")
    yield from _runs("nn.DistributedAttentionLayer nn.DistributedTransformerOutputLayer")
    yield Name(
        "nn.DistributedTransformerLMHead",
        "runs",
        "embeddings are whole on every rank, unless distribute_embedding splits the vocabulary; the batch is "
        "dimension 0 of its logits",
    )
    yield Name("nn.FlashAttentionLayer", "runs", "torch's kernels")
    for path in _translators():
        yield Name(path, "runs", "whole state dicts")
    yield Name("optimizers.FusedLAMB", "runs", "plain torch; over several partitions with max_grad_norm=0")
    yield Name("optimizers.FusedLamb", "runs", "another spelling of FusedLAMB")
    yield Name("optimizers.FusedNovoGrad", "runs", "plain torch")
    yield from _runs("utils.rmsg utils.get_distribution_axis")

    yield from _runs("model.DistributedModel state_mod.state exceptions.SMPError")
    yield from _refused(
        "state_mod.state.param_index_to_name_tp_group state_mod.state.param_name_to_index_tp_group",
        _SHARDED,
        kind="attribute",
    )
    yield from (
        Name(f"test.torch.utils.{name}", "hint", "of AWS's own tests, beside torch; they do nothing")
        for name in ("dump_model", "verify")
    )


NAMES: Mapping[str, Name] = {name.path: name for name in _all()}
"""By path."""


def find(path: str) -> Name | None:
    """The name, or the one that the path goes on from: ``state.cfg`` for ``state.cfg.fp16``."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if (found := NAMES.get(".".join(parts[:length]))) is not None:
            return found
    return None


def under(prefix: str) -> dict[str, Name]:
    """Names directly below a module or class, by their last part."""
    start = f"{prefix}." if prefix else ""
    found = {path[len(start) :]: name for path, name in NAMES.items() if path.startswith(start)}
    return {last: name for last, name in found.items() if "." not in last}
