"""Checkpoints in transformers' format: whole files, written by rank 0, that any number of ranks resumes from.

The weights are those that ``save_pretrained`` of the plain model writes, and ``from_pretrained`` reads; the
optimizer's state is a plain one's, and there is one random state, since all ranks have the same. So the plain
Trainer resumes from such a folder, and this one from the plain Trainer's, on any partition.
"""

from __future__ import annotations

import os
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel
from transformers import Trainer as PlainTrainer
from transformers.trainer import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, SCHEDULER_NAME, WEIGHTS_NAME

from ...checkpoints.portable.together import together
from ...errors import SMPError
from ...session import Session
from ...wrapper.distributed_model import DistributedModel
from ...wrapper.state.gathering import gathered
from .agreement import exchange, of_rank_0

__all__ = ["Saving"]


class Saving(PlainTrainer):
    """What the Trainer writes and reads."""

    _session: Session

    @property
    def _wrapper(self) -> DistributedModel | None:
        """The distributed model, once there is one."""
        return self.model_wrapped if isinstance(self.model_wrapped, DistributedModel) else None

    # Writing ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model, as ``save_pretrained`` does; rank 0 writes. Collective over all ranks."""
        state = self._whole_state()
        together(
            self._session,
            "Trainer.save_model",
            lambda: PlainTrainer._save(self, output_dir, state_dict=state),
        )
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _whole_state(self) -> dict[str, Any] | None:
        """The plain model's state dict; None: it is whole here as it is."""
        if self._wrapper is None or not self._wrapper.partitioned:
            return None
        state = self._wrapper.state_dict()
        for to_huggingface, _ in self._session.module_manager.translate_functions:
            state = to_huggingface(state)
        # What is tied is one tensor, as save_pretrained expects it.
        first: dict[int, str] = {}
        for name, tensor in self._wrapper.module.state_dict(keep_vars=True).items():
            if name in state:
                state[name] = state[first.setdefault(id(tensor), name)]
        return state

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.state.best_model_checkpoint = of_rank_0(
            self._session, self.state.best_model_checkpoint, "Trainer: saving a checkpoint"
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.optimizer.state_dict()

        def write() -> None:
            if self.args.should_save:
                torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

        together(self._session, "Trainer: saving the optimizer", write)

    def _save_rng_state(self, output_dir: str) -> None:
        def write() -> None:
            if self.args.should_save:
                PlainTrainer._save_rng_state(self, output_dir)

        together(self._session, "Trainer: saving random states", write)

    # Reading ------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights of a checkpoint. Collective over all ranks."""
        self._same_folder(resume_from_checkpoint)
        wrapper = self._wrapper
        if wrapper is None or not wrapper.partitioned:
            super()._load_from_checkpoint(resume_from_checkpoint, self.model)
        elif isinstance(self.model, PreTrainedModel):
            wrapper.load_state_dict(self._whole_weights(resume_from_checkpoint))
        else:
            with gathered(wrapper) as module:
                super()._load_from_checkpoint(resume_from_checkpoint, module)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        self._same_folder(best)
        if self._wrapper is not None and isinstance(self.model, PreTrainedModel):
            self._wrapper.load_state_dict(self._whole_weights(best))
        elif self._wrapper is not None and self._wrapper.partitioned:
            with gathered(self._wrapper):
                super()._load_best_model()
        else:
            super()._load_best_model()

    def _whole_weights(self, folder: str) -> dict[str, Any]:
        """Of a saved model, with the names of the model here, tied ones included."""
        index = os.path.join(folder, f"{SAFE_WEIGHTS_NAME}.index.json")
        safe, pickled = os.path.join(folder, SAFE_WEIGHTS_NAME), os.path.join(folder, WEIGHTS_NAME)
        state: dict[str, Any] = {}
        if os.path.isfile(safe):
            state = safetensors.torch.load_file(safe)
        elif os.path.isfile(index):
            for name in sorted(os.listdir(folder)):
                if name.endswith(".safetensors"):
                    state.update(safetensors.torch.load_file(os.path.join(folder, name)))
        elif os.path.isfile(pickled):
            state = torch.load(pickled, map_location="cpu", weights_only=True)
        else:
            raise SMPError(f"{folder!r} holds no weights of a model ({SAFE_WEIGHTS_NAME})")
        names: dict[int, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        for tied in names.values():
            present = [name for name in tied if name in state]
            if present:
                state.update(dict.fromkeys(tied, state[present[0]]))
        return state

    def _same_folder(self, folder: str) -> None:
        """All ranks read it."""
        found = exchange(self._session, os.path.isdir(folder), "WORLD", "Trainer: a checkpoint")
        missing = [rank for rank, is_there in enumerate(found) if not is_there]
        if missing:
            raise SMPError(
                f"the checkpoint {folder!r} is not there for rank(s) {', '.join(map(str, missing))}: all "
                "ranks read "
                "it, so it must lie where all hosts see it"
            )
