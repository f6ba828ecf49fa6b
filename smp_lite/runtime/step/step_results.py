"""What a step leaves: its outputs, values that the script still holds, gradients of what it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...comm.groups.peers import Peers
from ...errors import SMPError
from ...record.values.placed import PlacedTensor, TensorMeta
from ..stage.executor import StageExecutor
from .batches import Progress

__all__ = ["StepResults"]

EAGER_BYTES = 1 << 20
"""Values that the script still holds when a step ends come to every rank if they are no larger."""


class StepResults:
    """Makes the results of steps known to all ranks of the mp group.

    Args:
        peers: the mp group.
        executors: for each stage played here; they hold the values.
        num_stages: in all.

    Attributes:
        finder_of_reduced: gives what knows the names of parameters whose gradients are reduced over replicas
            (None: it is none of them); None: there are none.
    """

    def __init__(self, peers: Peers, executors: Mapping[int, StageExecutor], num_stages: int) -> None:
        self._peers = peers
        self._executors = executors
        self._num_stages = num_stages
        self._late: dict[tuple[int, int], torch.Tensor] = {}
        self.finder_of_reduced: Callable[[], Callable[[torch.Tensor], str | None]] | None = None

    def forget(self) -> None:
        """Another step begins."""
        self._late.clear()

    def share(
        self,
        outputs: Sequence[tuple[int, int]],
        survivors: Sequence[tuple[int, PlacedTensor]],
        all_progress: Mapping[int, Progress],
        *,
        keep_graph: bool,
    ) -> list[torch.Tensor]:
        """The data of (microbatch, value) outputs, on every rank, when everything has run.

        Args:
            outputs: what the step function returns.
            survivors: (microbatch, value that somebody still holds); they get their data, as far as they are
                small; the others stay on their stage.
            all_progress: by microbatch.
            keep_graph: outputs come with their autograd graph. With several stages there is none that a
                backward outside of the step could go through; they come with a node that says so.
        """
        eager = [each for each in survivors if self._is_eager(each, all_progress)]
        items = [self._item(all_progress[m], value) for m, value in outputs]
        more = [self._item(all_progress[m], placed.smp_value) for m, placed in eager]
        found = self._peers.share([*items, *more])
        own = {(m, placed.smp_value): data for (m, placed), data in zip(eager, found[len(items) :])}
        for m, placed in survivors:
            data = own.get((m, placed.smp_value))
            placed.smp_data = None if data is None else _without_graph(data, placed.smp_meta)
        self._pass_gradients_to_inputs(all_progress)
        results = found[: len(items)]
        if not keep_graph:
            return results
        if self._num_stages > 1:
            return [_without_graph(data, meta) for (_, meta, _), data in zip(items, results)]
        return [made if made is not None else data for (_, _, made), data in zip(items, results)]

    def share_late(self, placed: PlacedTensor) -> torch.Tensor:
        """The data of a value that stayed on its stage, on every rank."""
        key = (placed.smp_microbatch, placed.smp_value)
        here = placed.smp_stage in self._executors
        if here and key not in self._late:
            raise SMPError(
                f"a tensor of {placed.smp_meta.num_bytes} bytes that was made in an earlier smp.step is "
                "gone: read it before the next step, or return it from the step function"
            )
        what = "reading a tensor that was made in the last smp.step"
        self._peers.share_object(None, placed.smp_stage, what)
        item = (placed.smp_stage, placed.smp_meta, self._late[key] if here else None)
        (data,) = self._peers.share([item])
        placed.smp_data = _without_graph(data, placed.smp_meta)
        return placed.smp_data

    def _item(self, progress: Progress, value: int) -> tuple[int, TensorMeta, torch.Tensor | None]:
        """(stage, metadata, data if it is here) of a value."""
        home = progress.recording.values[value]
        executor = self._executors.get(home.stage_index)
        data = executor.states[progress.recording.microbatch_index].data[value] if executor else None
        return home.stage_index, home.meta, data

    def _is_eager(self, survivor: tuple[int, PlacedTensor], all_progress: Mapping[int, Progress]) -> bool:
        """Whether it comes to every rank; one that does not is kept here if it was made here."""
        m, placed = survivor
        if placed.smp_meta.num_bytes <= EAGER_BYTES:
            return True
        placed.smp_is_late = True
        data = self._item(all_progress[m], placed.smp_value)[2]
        if data is not None:
            self._late[placed.smp_microbatch, placed.smp_value] = data.detach()
        return False

    def _pass_gradients_to_inputs(self, all_progress: Mapping[int, Progress]) -> None:
        """Ordinary tensors that the commands have read get their gradients, on every rank."""
        wanted = [
            (m, value, tensor)
            for m, progress in all_progress.items()
            for value, tensor in progress.recording.inputs
        ]
        items: list[tuple[int, TensorMeta, torch.Tensor | None]] = []
        for m, value, tensor in wanted:
            stage = all_progress[m].recording.values[value].stage_index
            executor = self._executors.get(stage)
            leaf = executor.states[m].inputs.get(value) if executor else None
            gradient = leaf.grad if leaf is not None else None
            has_gradient = self._peers.share_object(
                gradient is not None, stage, "the gradient of an input of a step"
            )
            if has_gradient:
                items.append((stage, TensorMeta.of(tensor)._replace(requires_grad=False), gradient))
            else:
                items.append((stage, TensorMeta.of(tensor), None))
        shared = iter(self._peers.share([item for item in items if not item[1].requires_grad]))
        for (_, _, tensor), (_, meta, _) in zip(wanted, items, strict=True):
            if not meta.requires_grad:
                self._refuse_reduced(tensor)
                torch.autograd.backward(tensor, next(shared), retain_graph=True)

    def _refuse_reduced(self, tensor: torch.Tensor) -> None:
        """Raises SMPError where its graph goes back to a parameter whose gradient is reduced by now."""
        if self.finder_of_reduced is None:
            return
        find = self.finder_of_reduced()
        waiting, seen = [tensor.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and (name := find(variable)) is not None:
                raise SMPError(
                    f"a tensor of shape {list(tensor.shape)} that the step function uses was made from the "
                    f"parameter {name!r} outside of the model (a penalty on weights?): before the step, or "
                    "in the first step before the model was called, which is what cuts it. Its gradient "
                    "would come after replicas have averaged theirs: compute it in the step function, after "
                    "the call of the model"
                )
            waiting += [following for following, _ in node.next_functions]


def _without_graph(data: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """With requires_grad as it was; a backward outside of the step would reach a part of the graph."""
    if not meta.requires_grad:
        return data
    return _OfTheStep.apply(torch.empty(0, requires_grad=True, device=data.device), data.detach())


class _OfTheStep(torch.autograd.Function):
    """Stands where the graph of a step begins."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return data.clone()  # what is changed in place must be no view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise SMPError(
            "backward() outside of the smp.step whose function made the tensor: its graph ends with it, "
            "and lies on several ranks. Call model.backward(loss) inside the function, or detach() the tensor"
        )
