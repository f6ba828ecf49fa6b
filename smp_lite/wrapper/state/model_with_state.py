"""A distributed model's state, as a whole and this rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import SMPError
from ...optim.state.own_parameters import PARTIAL_KEY
from ...runtime.model_runtime import ModelRuntime
from ...session import Session
from .gathering import Brought, bring, put_back
from .local_parts import LocalParts
from .model_state import ModelState
from .state_versions import with_versions_of
from .waiting_state import Waiting, set_extra_state, with_present_extra_state

__all__ = ["ModelWithState"]


class ModelWithState(LocalParts):
    """What ``DistributedModel`` says of its state: reading it, loading it, bringing all of it here."""

    module: nn.Module
    _session: Session
    _runtime: ModelRuntime | None

    def __init__(self) -> None:
        super().__init__()
        self._brought: Brought = []  # by cpu()
        self._loaded_keys: set[str] = set()
        self._pending_state: list[tuple[Mapping[str, Any], bool]] = []
        self._waiting: Waiting | None = None
        self._refusal: RemovableHandle | None = None

    def _state(self) -> ModelState:
        return ModelState(self._session, self.module, self._runtime)

    def _state_in_place(self) -> ModelState:
        if self._pending_state:
            raise SMPError(
                "this rank's part of the model was loaded and waits for the first step, which puts it in "
                "place: run a step before asking for the state"
            )
        return self._state()

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state dict, marked ``_smp_is_partial: True``."""
        return self._state_in_place().local()

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """The whole state dict on CPU, with the wrapped module's own keys. Collective over the mp group.

        Args:
            gather_to_rank0: only mp rank 0 gets it; the others get ``{}``.
        """
        if args or kwargs:
            raise TypeError(f"DistributedModel.state_dict() takes gather_to_rank0 only, got {args} {kwargs}")
        return self._state_in_place().whole(gather_to_rank0=gather_to_rank0)

    @property
    def _fqn_modifiers(self) -> Any:
        """What ``torch.distributed.checkpoint.state_dict`` asks each module for, the model before any other.

        It finds entries of the state by walking over modules, and cannot follow names that leave ``module``
        out; nor does it know an optimizer's parameters of other stages.
        """
        raise SMPError(
            "torch.distributed.checkpoint.state_dict cannot read or set the state of a DistributedModel: use "
            "model.state_dict(), optimizer.state_dict() and their load_state_dict(), which mean the whole, "
            "or smp.save_checkpoint(..., portable=True), which torch.distributed.checkpoint reads"
        )

    def load_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> Any:
        """Loads a whole or a partial state dict, before or after partition.

        What is loaded before partition wins over what post-partition hooks do, as in SMP. A rank's own part
        can be checked and put in place only once the partition is known, so it is kept until then.

        Args:
            state_dict: of the wrapped module, or from :meth:`local_state_dict` (marked partial). A whole one
                may have the names of the modules that tensor parallelism has replaced (a Hugging Face
                model's); with ``_smp_is_partial: False`` in it, it is taken to have ours.
            strict: keys must match.
            same_partition_load: a partial dict is this rank's own; else partial dicts are merged first,
                which is collective over the mp group.
        """
        state = self._state().merged(self._with_own_names(state_dict), same_partition_load)
        # Of several that wait, what is loaded later wins.
        if self._runtime is None and (state[PARTIAL_KEY] or self._pending_state):
            self.keep_until_partition(state, strict=strict)
            set_extra_state(self.module, state)
            return None
        found = self._state().load(state, strict=strict)
        if self._runtime is None:  # by the names that entries have here
            self._loaded_keys |= {*self.module.state_dict(keep_vars=True)} - {*found.missing_keys}
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None
            self._pending_state.clear()
        return found

    def keep_until_partition(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """A state waits for the first step, and parameters and buffers with it."""
        self._pending_state.append((state, strict))
        if self._waiting is None:
            self._waiting = Waiting(self.module)
        self._waiting.begin()

    def end_waiting(self) -> None:
        """The first step cuts the model now; what is kept is put in place when it has done so."""
        if self._waiting is not None:
            self._waiting.end()
            self._waiting = None

    def put_pending_in_place(self) -> None:
        """After partition."""
        for state, strict in self._pending_state:
            self._state().load(with_present_extra_state(self.module, state), strict=strict)
        self._pending_state.clear()

    def refuse_until_loaded(self, error: Exception) -> None:
        """What is kept could not be put in place: the model is cut by now, and the next step would train what
        was not loaded."""
        self._loading_failed = f"{type(error).__name__}: {error}"
        if self._refusal is None:
            self._refusal = self.register_forward_pre_hook(self._refuse)

    def _refuse(self, *_: Any) -> None:
        raise SMPError(
            f"what was loaded could not be read by the first step ({self._loading_failed}), so the model is "
            "not loaded: resume again, from a whole checkpoint of this model, before the next step"
        )

    def _with_own_names(self, state: dict[str, Any]) -> dict[str, Any]:
        """A whole state dict in whose names there are others than the module's: translated."""
        if PARTIAL_KEY in state or state.keys() <= self.module.state_dict(keep_vars=True).keys():
            return state
        translated = state
        for _, to_own in self._session.module_manager.translate_functions:
            translated = to_own(translated)
        return with_versions_of(state, translated)

    def cpu(self) -> Self:
        """Gathers all parameters and buffers to the CPU of every mp rank; collective over the mp group.

        They stay until the next step, which would make copies old that no stage trains.
        """
        self._state_in_place()
        self.put_away()
        self._brought = bring(self._session, self.module, None)
        return self

    def put_away(self) -> None:
        """Ends what :meth:`cpu` began."""
        put_back(self._brought)
        self._brought = []
