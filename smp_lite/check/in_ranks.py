"""The ranks' side of a check over several processes: each leaves in a folder what its steps were given and
gave.

Parameters and gradients that are split are put together first, by all ranks that have a part; so what is
compared is whole. Of what several ranks hold alike, one leaves the numbers and the others their norm.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..devices import CPU
from ..errors import PeerFailed
from ..nn.layout import layout_of, whole_of
from ..record.commands.recording import Command
from ..record.state.random_state import taken_states
from ..record.values.microbatch import StepOutput
from ..record.values.structure import flatten
from ..session import Session
from ..tensor_parallel.split_record import split_of
from .module_calls import ModuleCalls
from .observe import Key, print_of
from .stepping import Observer

__all__ = ["RankChecker", "file_of_failure", "file_of_setting", "file_of_step", "result_of"]


def file_of_step(folder: Path, rank: int, step: int) -> Path:
    """What one rank leaves of one step, for ``torch.load``."""
    return folder / f"rank{rank}.step{step}.pt"


def file_of_setting(folder: Path) -> Path:
    """What rank 0 leaves of the job, for ``torch.load``."""
    return folder / "setting.pt"


def file_of_failure(folder: Path, rank: int) -> Path:
    """JSON: the error by which a rank's step ended."""
    return folder / f"rank{rank}.failure.json"


class RankChecker:
    """Runs the steps of one rank.

    Args:
        session: of the job.
        folder: where to leave it.
        num_steps: how many steps to run.
    """

    def __init__(self, session: Session, folder: Path, num_steps: int) -> None:
        self.folder, self.num_steps = folder, num_steps
        self.steps = 0
        topology = session.topology
        at = topology.coordinate(session.rank)
        self.replica = tuple(at[axis] for axis in session.batch_axes if axis in at)
        own = [axis for axis in at if axis not in session.batch_axes]
        self.brings_batch = all(at[axis] == 0 for axis in own)
        self.speaks_for_stage = all(index == 0 for axis, index in at.items() if axis != "pp")
        if session.rank == 0:
            setting_now = {
                "plan": session.plan,
                "parameters": session.cfg.model_dump() if session.plan is None else None,
                "microbatches": session.cfg.microbatches,
                "axes": topology.axes,
            }
            torch.save(setting_now, file_of_setting(self.folder))

    def run(
        self,
        session: Session,
        function: Callable[..., Any],
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
        run_recorded: Callable[[], Any],
    ) -> Any:
        """Runs the step and leaves what it was given and gave; returns its result.

        Raises:
            SystemExit: this was the last one.
        """
        model = session.model
        if model is None:
            return run_recorded()
        notes: dict[str, Any] = {"replica": self.replica}
        notes["weights"] = self._gathered(model.local_named_parameters(), lambda p: p.detach(), session)
        if self.brings_batch:
            notes["inputs"] = [tensors_in(each) for each in inputs]
            notes["random"] = taken_states()
        calls = ModuleCalls(model.module)
        seeds = _Seeds()
        try:
            with calls.listening():
                result = seeds.run(session, run_recorded)
        except BaseException as error:
            self._leave_failure(error, calls, session, notes)
            raise
        notes["seeded"] = frozenset(seeds.seeded)
        notes["labels"] = frozenset({label for _, label, _ in seeds.noted()} | seeds.labels)
        if self.brings_batch:
            notes["result"] = result_of(result)
        notes["gradients"] = self._gathered(model.local_named_parameters(), lambda p: p.grad, session)
        if self.speaks_for_stage:
            notes["buffers"] = {name: b.detach().clone() for name, b in model.local_named_buffers()}
            notes["calls"] = calls.outlines
        if session.rank == 0:
            notes["split"] = split_of(model.module)
            notes["reduces_sums"] = not model.runtime.options.average_grads_across_microbatches
        torch.save(notes, file_of_step(self.folder, session.rank, self.steps))
        self.steps += 1
        if self.steps == self.num_steps:
            raise SystemExit(0)
        return result

    def _gathered(
        self,
        parameters: Iterator[tuple[str, nn.Parameter]],
        tensor_of: Callable[[nn.Parameter], torch.Tensor | None],
        session: Session,
    ) -> dict[str, Any]:
        """Whole tensors by name, on the rank that speaks for its stage; elsewhere their norms.

        Collective over the ranks of a stage.
        """
        found: dict[str, Any] = {}
        for name, parameter in parameters:
            tensor, layout = tensor_of(parameter), layout_of(parameter)
            if layout is not None and any(axis.size > 1 for axis in layout.axes):
                there = torch.tensor([float(tensor is not None)], device=CPU)
                for axis in layout.axes:
                    there = axis.all_reduce(there, "max")
                if not there:
                    tensor = None
                else:
                    part = torch.zeros_like(parameter) if tensor is None else tensor
                    tensor = whole_of(part, layout)
            if tensor is not None and tensor.layout is not torch.strided:
                tensor = tensor.to_dense()
            if self.speaks_for_stage:
                found[name] = None if tensor is None else tensor.detach().clone()
            else:
                found[name] = None if tensor is None else print_of(tensor).norm
        return found

    def _leave_failure(
        self, error: BaseException, calls: ModuleCalls, session: Session, notes: dict[str, Any]
    ) -> None:
        failure = {
            "step": self.steps,
            "text": f"{type(error).__name__}: {error}",
            "module": calls.module_of(error),
            "is_of_another": isinstance(error, PeerFailed),
            "trace": "".join(traceback.format_exception(error)),
        }
        torch.save(notes, file_of_step(self.folder, session.rank, self.steps))
        file_of_failure(self.folder, session.rank).write_text(json.dumps(failure))


class _Seeds(Observer):
    """Notes which calls are seeded, and nothing of what they are given."""

    def noted(self) -> list[Key]:
        """Of all calls of modules."""
        return list(self._keys.values())

    @staticmethod
    def before(command: Command, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, str]]:
        return (), {}

    def ran(
        self, microbatch_index: int, command: Command, given: Any, state: dict[str, str], result: Any
    ) -> None:
        """Nothing: the modules' own calls are noted."""


def tensors_in(value: Any) -> list[torch.Tensor | None]:
    """The leaves of a nest that are tensors of a batch; None stands for the others."""
    leaves: list[Any] = []
    flatten(value, leaves)
    return [
        leaf.detach() if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter) else None
        for leaf in leaves
    ]


def result_of(result: Any) -> list[Any]:
    """Leaves of what a step function returned: for each its tensors over microbatches, or a text."""
    leaves: list[Any] = []
    flatten(result, leaves)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, StepOutput):
            found.append([value.detach() for value in leaf.outputs])
        else:
            found.append([leaf.detach()] if isinstance(leaf, torch.Tensor) else str(leaf))
    return found
