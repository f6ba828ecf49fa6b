"""SageMaker's model-parallel API for any eager PyTorch model.

``import smp_lite as smp``. Public names load when first used (PEP 562), so that ``smp_lite.config`` and
``smp_lite.plan`` can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "api": """CommGroup RankType WORLD MP_GROUP DP_GROUP PP_GROUP TP_GROUP RDP_GROUP rank size local_rank
        local_size mp_rank mp_size get_mp_group dp_rank dp_size get_dp_group pp_rank pp_size get_pp_group
        tp_rank tp_size get_tp_group rdp_rank rdp_size get_rdp_group get_world_process_group
        get_mp_process_group get_dp_process_group get_pp_process_group get_tp_process_group
        get_rdp_process_group is_tracing broadcast send recv_from allgather barrier mp_barrier dp_barrier
        pp_barrier tp_barrier rdp_barrier partition set_partition""",
    "session": "is_initialized",
    "lifecycle.starting": "init init_in_memory reset",
    "steps.loader_batches": "batches",
    "steps.step_function": "step",
    "lifecycle.stopping": "should_stop",
    "wrapper.state.gathering": "gathered",
    "wrapper.distributed_model": "DistributedModel",
    "wrapper.creation": """model_creation tensor_parallelism set_tensor_parallelism
        delay_param_initialization""",
    "tensor_parallel.splitting": "parallelize",
    "tensor_parallel.registry": "tp_register tp_register_with_module",
    "wrapper.activation_checkpointing": "set_activation_checkpointing",
    "optim.optimizer": "DistributedOptimizer",
    "optim.norms.whole_model": "clip_grad_norm_",
    "record.values.microbatch": "StepOutput",
    "checkpoints.saving": "save load",
    "checkpoints.checkpoint": "save_checkpoint",
    "checkpoints.resuming": "resume_from_checkpoint",
    "comm.waiting": "set_watchdog",
    "errors": "SMPError SMPMismatch SMPTimeout",
    "progress": "progress",
}
_MODULES = {
    "amp": "amp",
    "nn": "nn",
    # Below, modules of SMP v1 whose contents have other homes here; scripts know them by these names.
    "exceptions": "errors",
    "model": "wrapper.distributed_model",
    "optimizers": "optim.fused",
    "patches": "patches",
    "state_mod": "lifecycle.session_state",
    "utils": "utils",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

# Not the other modules: after `from smp_lite import *` a script's `nn` is still torch's.
__all__ = sorted([*_HOME_OF, "amp", "state"])


def __getattr__(name: str) -> Any:
    if name == "state":
        return importlib.import_module(".lifecycle.session_state", __name__).state
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    home = _HOME_OF.get(name)
    if home is None:
        return importlib.import_module(".smp_v1.missing", __name__).missing_in("", __name__)(name)
    found = getattr(importlib.import_module(f".{home}", __name__), name)
    # Importing smp_lite.progress has put that module under the function's name.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
