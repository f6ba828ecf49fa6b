"""The one process's side of a check over several ranks: the same script with the whole model, as plain torch.

Each step begins with the weights that the ranks had and runs on the batches that they had, all of them; its
results and gradients are compared with theirs. What the optimizer made of the last gradients is compared
where gradients are not near zero: elsewhere an optimizer that divides by their size makes large steps of
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..plan.topology import Topology
from ..record.interception import listening
from ..record.state.random_state import put_back_states, taken_states
from ..record.values.microbatch import merge_outputs
from ..record.values.structure import flatten, map_leaves, rebuild
from ..runtime.stage.random_streams import RandomStreams
from ..session import Session
from ..systems.plan.parallel_plan import DataParallel, ParallelPlan, Placement, Schedule, TensorMode
from ..systems.plan.stage_assignment import StageRule
from .in_ranks import result_of
from .module_calls import ModuleCalls, outlines_differ
from .plain_run import PlainStep
from .rank_notes import RankNotes, Replica, StepOfRanks
from .stepping import CheckEnded
from .whole_values import Comparison, allowed

__all__ = ["DenseChecker", "DenseReport", "plan_of_one_process"]

_NEAR_ZERO = 1e-3
_CALL_TOLERANCE = 1e-3
_STEP_TOLERANCE = 100
"""Of an optimizer's step, in units of what rounding may do to a gradient."""


@dataclass
class DenseReport:
    """The comparison of one step.

    Attributes:
        texts: what differs, the first thing first; empty if nothing does.
        fails: the error of the one process.
        num_replicas: batches of the step.
        num_gradients: that were compared.
        largest: difference that was taken for rounding.
        parts: buffers of split modules, of which each rank has a part, and which are not compared.
    """

    index: int
    texts: list[str] = field(default_factory=list)
    fails: str = ""
    num_replicas: int = 0
    num_gradients: int = 0
    largest: float = 0.0
    parts: list[str] = field(default_factory=list)


def plan_of_one_process(plan: ParallelPlan) -> ParallelPlan:
    """A plan with the same microbatches, and one rank that has the whole model."""
    axes = tuple((name, 1) for name, _ in plan.topology.axes)
    # Layers that a script makes for a mode of Colossal-AI's ask for it, and on one rank they are dense.
    depth = None if plan.tensor.depth is None else 1
    tensor = replace(plan.tensor, depth=depth) if plan.dialect == "colossal" else TensorMode()
    return replace(
        plan,
        topology=Topology(axes, plan.topology.kinds),
        placement=Placement(),
        stages=StageRule("uniform", (0,)),
        schedule=Schedule(),
        tensor=tensor,
        rules=(),
        data_parallel=DataParallel("none"),
    )


class DenseChecker:
    """Runs the steps of the one process.

    Args:
        notes: of the ranks.

    Attributes:
        reports: one for each step.
    """

    def __init__(self, notes: RankNotes) -> None:
        self._notes = notes
        self.reports: list[DenseReport] = []
        self._began_with: dict[str, torch.Tensor] = {}
        self._large: dict[str, torch.Tensor] = {}

    def begin(self, session: Session) -> None:
        """Nothing: any session of one process will do."""

    def run(
        self,
        session: Session,
        function: Callable[..., Any],
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
        run_recorded: Callable[[], Any],
    ) -> Any:
        """Runs the step on what the ranks had; returns the first replica's result.

        Raises:
            CheckEnded: the ranks did no more steps, or this one differs.
        """
        model = session.model
        if model is None:
            return run_recorded()
        index, notes = len(self.reports), self._notes
        failed = notes.failure is not None and notes.failure.step == index
        if index == notes.num_steps and not failed:
            raise CheckEnded
        given = notes.step(index)
        report = DenseReport(index, num_replicas=len(given.replicas))
        self.reports.append(report)
        compared = Comparison()
        self._take_weights(model.module, given, compared, is_first=index == 0)
        around = session.step
        try:
            outputs, calls = self._run_replicas(session, function, inputs, given, compared)
        except Exception as error:
            report.fails = f"{type(error).__name__}: {error}"
            raise CheckEnded from error
        finally:
            session.step = around
        if failed:
            raise CheckEnded
        self._compare(model.module, given, calls, compared, report)
        report.texts, report.largest = compared.texts, compared.largest
        if report.texts or (index + 1 == notes.num_steps and notes.failure is None):
            raise CheckEnded
        return merge_outputs(outputs)

    def _take_weights(
        self, module: nn.Module, given: StepOfRanks, compared: Comparison, *, is_first: bool
    ) -> None:
        own = dict(module.named_parameters())
        others: list[str] = []
        for name in given.weights.keys() - own.keys():
            compared.texts.append(f"the parameter {name} is not in one process's model")
        for name, parameter in own.items():
            theirs = given.weights.get(name)
            if theirs is None or theirs.shape != parameter.shape:
                shape = (
                    "is on no rank" if theirs is None else f"has the shape {list(theirs.shape)} on the ranks"
                )
                compared.texts.append(
                    f"the parameter {name} {shape}, and {list(parameter.shape)} in one process"
                )
                continue
            mine = parameter.detach()
            if is_first and not torch.equal(mine, theirs):
                others.append(name)
            elif not is_first and name in self._large:
                self._compare_step(name, mine, theirs, compared)
            with torch.no_grad():
                parameter.copy_(theirs)
            self._began_with[name] = theirs
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            compared.texts.append(
                f"{', '.join(others[:3])}{more} begin with other numbers than in one process: they are drawn "
                "or loaded by rank, or made anew by a distributed module"
            )

    def _compare_step(
        self, name: str, mine: torch.Tensor, theirs: torch.Tensor, compared: Comparison
    ) -> None:
        before, large = self._began_with[name], self._large[name]
        step, other = ((each - before)[large].double() for each in (mine, theirs))
        if not step.numel():
            return
        scale = float(step.abs().max())
        if float((step - other).abs().max()) > _STEP_TOLERANCE * allowed(mine) * scale:
            compared.texts.append(
                f"the optimizer changes {name} otherwise: by up to {float(other.abs().max()):.4g} instead of "
                f"{scale:.4g}"
            )

    def _run_replicas(
        self,
        session: Session,
        function: Callable[..., Any],
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
        given: StepOfRanks,
        compared: Comparison,
    ) -> tuple[list[Any], ModuleCalls]:
        module: nn.Module = session.model.module
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        first: list[Any] | None = None
        after: tuple[Any, ...] | None = None
        calls, ended_with = ModuleCalls(module), buffers
        for number, replica in enumerate(given.replicas):
            _set_buffers(module, buffers)
            theirs = _with_tensors(inputs, replica)
            put_back_states(replica.random)
            scale = len(given.replicas) * (1 if given.sums else len(inputs))
            if first is None:
                with calls.listening():
                    outputs = _run(session, function, theirs, given, scale)
            else:
                outputs = _run(session, function, theirs, given, scale)
            self._compare_result(outputs, replica, number, compared)
            if first is None:
                first, after = outputs, taken_states()
                ended_with = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        _set_buffers(module, ended_with)
        if after is not None:
            put_back_states(after)
        return first or [], calls

    def _compare_result(
        self, outputs: list[Any], replica: Replica, number: int, compared: Comparison
    ) -> None:
        if replica.result is None:
            return
        expected = result_of(merge_outputs(outputs))
        of = f" on batch {number}" if number else ""
        if len(expected) != len(replica.result):
            compared.texts.append(f"the step function{of} returns other things than in one process")
        for i, (one, other) in enumerate(zip(expected, replica.result, strict=False)):
            what = f"result {i}{of}" if len(expected) > 1 else f"the result{of}"
            if isinstance(one, str) or isinstance(other, str):
                if one != other:
                    compared.texts.append(f"{what} is {other} instead of {one}")
                continue
            for m, (tensor, found) in enumerate(zip(one, other, strict=True)):
                compared.tensors(f"{what} of microbatch {m}", tensor, found)

    def _compare(
        self,
        module: nn.Module,
        given: StepOfRanks,
        calls: ModuleCalls,
        compared: Comparison,
        report: DenseReport,
    ) -> None:
        gradients = {name: _dense(p.grad) for name, p in module.named_parameters()}
        wrong = compared.all_of("the gradient", gradients, given.gradients)
        report.num_gradients = len(gradients)
        own = dict(module.named_buffers())
        report.parts = [n for n, b in own.items() if n in given.buffers and given.buffers[n].shape != b.shape]
        whole = {name: own[name] for name in own.keys() & given.buffers.keys() if name not in report.parts}
        for name, buffer in whole.items():
            compared.tensors(f"the buffer {name}", buffer, given.buffers[name])
        for rank, norms in given.others.items():
            compared.texts += _other_copies(rank, norms, given.gradients)
        if compared.texts:
            compared.texts[:0] = _where(calls, given, wrong)
        largest = max(
            (float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()), default=0
        )
        self._large = {
            name: gradient.abs() > _NEAR_ZERO * largest
            for name, gradient in gradients.items()
            if gradient is not None
        }


def _run(
    session: Session,
    function: Callable[..., Any],
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
    given: StepOfRanks,
    scale: int,
) -> list[Any]:
    """One batch, microbatch by microbatch; gradients add up."""
    module: nn.Module = session.model.module
    names = {id(part): name or "model" for name, part in module.named_modules()}
    step = PlainStep(names, given.labels, given.seeded, scale)
    session.step = step
    outputs = []
    with listening(step):  # type: ignore[arg-type]
        for number, (args, kwargs) in enumerate(inputs):
            step.microbatch_index = number
            outputs.append(map_leaves(function(*args, **kwargs), _detached))
    if step.drew:
        RandomStreams.move_on()
    return outputs


def _with_tensors(
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]], replica: Replica
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of this process with a replica's tensors."""
    found = []
    for m, (own, theirs) in enumerate(zip(inputs, replica.inputs, strict=True)):
        leaves: list[Any] = []
        spec = flatten(own, leaves)
        if len(leaves) != len(theirs):
            raise ValueError(
                f"the step function gets {len(leaves)} things in microbatch {m} in one process, and "
                f"{len(theirs)} on the ranks: the script calls it otherwise"
            )
        mixed = [mine if tensor is None else tensor for mine, tensor in zip(leaves, theirs, strict=True)]
        found.append(rebuild(spec, iter(mixed)))
    return found


def _where(calls: ModuleCalls, given: StepOfRanks, wrong: list[str]) -> list[str]:
    """The first module that gives something else, or where gradients begin to differ."""
    parts: list[str] = []
    for name, expected in calls.outlines.items():
        found = given.calls.get(name)
        if found is None or len(found) != len(expected):
            continue
        shapes = [[[each.shape for each in call] for call in of] for of in (expected, found)]
        if shapes[0] != shapes[1]:
            parts.append(name)  # its ranks have parts of it
            continue
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            if outlines_differ(one, other, _CALL_TOLERANCE):
                after = f", after {', '.join(parts)}, of which each rank has a part" if parts else ""
                return [f"{name} is the first module that gives something else (its call {number}){after}"]
        parts = []
    if wrong:
        return [
            f"all modules give the same forward; going backward, {wrong[-1]} is the first parameter whose "
            "gradient differs"
        ]
    return []


def _other_copies(
    rank: int, norms: Mapping[str, float | None], gradients: Mapping[str, torch.Tensor | None]
) -> list[str]:
    """What a rank holds that should be the same as another's."""
    texts = []
    for name, norm in norms.items():
        gradient = gradients.get(name)
        spoken = None if gradient is None else float(gradient.double().norm())
        same = norm is spoken or (
            norm is not None and spoken is not None and abs(norm - spoken) <= 1e-4 * max(norm, spoken)
        )
        if not same:
            texts.append(f"the gradient of {name} has the norm {norm} on rank {rank} and {spoken} on another")
    return texts


def _set_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(values[name])


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
