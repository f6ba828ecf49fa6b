"""Backwards outside a step: a plain loop over a model in one partition, with replicas.

``loss = model(x).mean(); loss.backward(); optimizer.step()`` means here what it means under torch's
DistributedDataParallel (Li et al. 2020, "PyTorch Distributed"): when ``backward()`` returns, gradients are
means over the replicas' batches, and sums over ranks of what their layers leave them a summand of. Each
backward reduces what has added up so far, so several of them, with one forward or with several, come to the
sum of their means.

A *pass* begins when the first parameter's gradient is about to be added, and ends with autograd's own end of
the backward. There the ranks meet: one that does not come is named, and one whose backward failed says so at
its next call of anything here, before its parameters can be stepped. Then gradients are dropped on all ranks,
and the others raise. The hooks are on autograd's accumulation nodes, where ``torch.autograd.grad`` does not
come by; so backwards through the module itself (``model.get_module()(x)``) are reduced as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..comm.groups.stage_peers import StagePeers
from ..errors import SMPError, SMPMismatch
from .model_runtime import ModelRuntime
from .reduction.replicated_gradients import check_replicated_gradients
from .replica_checks import Digests, ReplicaChecks, first_difference
from .stage.failure import error_like, failure_kind

__all__ = ["PlainBackward", "is_checked"]

Shape = tuple[tuple[int, ...], torch.dtype]

_FIRST_CHECKED = 3
_CHECK_EVERY = 100


def is_checked(number: int) -> bool:
    """Whether what need not be looked at every time is looked at now; ``number`` counts from 1."""
    return number <= _FIRST_CHECKED or number % _CHECK_EVERY == 0


class _Said(NamedTuple):
    """What a rank says at the end of a backward."""

    changed: bool  # the parameters, since the last backward
    reduces: bool
    failure: str | None
    kind: bytes  # of the failure, pickled
    buffers: dict[str, Shape]  # those that have changed, by name
    had: int  # which parameters had a gradient before; 0 where that may differ
    digests: Digests  # of parameters


class PlainBackward:
    """Listens to the backwards of one model in one partition.

    Args:
        runtime: the model's.
        meet: gives every rank's object to all of them, in the order of ranks.
        is_in_step: whether a step runs, whose backwards are its own business.
        shared: the ranks of the stage, if some get the same batch: their gradients are compared now and then.
        replicas: what looks whether replicas stay alike; None where there are none.

    Raises:
        SMPError: by whatever is called: the module has parameters that it had not when it was wrapped.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        meet: Callable[[_Said], list[_Said]],
        is_in_step: Callable[[], bool],
        shared: StagePeers | None,
        replicas: ReplicaChecks | None = None,
    ) -> None:
        self._runtime, self._meet, self._is_in_step, self._shared = runtime, meet, is_in_step, shared
        self._replicas = replicas
        self._parameters = runtime.local_parameters()
        self._wrapped = {id(parameter) for parameter in self._parameters}
        self._known = {id(parameter) for parameter in self._parameters if parameter.requires_grad}
        self._nodes: dict[int, Any] = {}  # alive, or autograd would make new ones without hooks
        self._is_open = False
        self._reduces = False
        self._number = 0
        self._seen: set[int] = set()
        self._versions: int | None = None
        self._problem: Exception | None = None
        self._versions_at_start = 0
        self._had = 0
        self._synchronised = {name: buffer.detach().clone() for name, buffer in self._buffers().items()}
        self.listen()

    def listen(self) -> None:
        """Hears of all parameters that train now; again, where torch has made another node for one.

        Raises:
            SMPError: some are not those that were wrapped.
        """
        self._refuse_new()
        for parameter in self._parameters:
            if not parameter.requires_grad:
                continue
            with torch.enable_grad():
                node = torch.autograd.graph.get_gradient_edge(parameter).node
            if self._nodes.get(id(parameter)) is not node:
                self._nodes[id(parameter)] = node
                node.register_prehook(self._before)
                node.register_hook(lambda *_, parameter=parameter: self._after(parameter))

    def _refuse_new(self) -> None:
        for name, parameter in self._runtime.placement.root.named_parameters():
            if id(parameter) not in self._wrapped and parameter.requires_grad:
                raise SMPError(
                    f"the parameter {name!r} was put into the model after it was wrapped, so its gradient "
                    "would not be reduced over the ranks: change modules and their parameters before "
                    "smp.DistributedModel, and write new values into a parameter in place (under "
                    "torch.no_grad())"
                )

    def settle(self) -> None:
        """Ends a backward that has failed here in the midst, so that the other ranks hear of it.

        Its gradients are dropped.
        """
        if self._is_open:
            self._is_open = False
            error = self._problem or SMPError("its backward did not come to its end")
            self._finish(error)

    # One pass -----------------------------------------------------------------------------------------------

    def _before(self, gradients: Any) -> None:
        """A gradient is about to be added."""
        if self._is_in_step() or self._is_open:
            return
        self._is_open = True
        self._problem = None
        self._seen.clear()
        self._number += 1
        self._versions_at_start = self._sum_of_versions()
        reducer, runtime = self._runtime.reducer, self._runtime
        self._had = 0
        if self._replicas is not None and runtime.begins_passes:
            self._had = self._replicas.set_gradients()
        self._reduces = reducer is not None and runtime.reduces_next_pass
        if reducer is not None:
            reducer.begin_step()
            if runtime.begins_passes:
                reducer.set_aside()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _after(self, parameter: nn.Parameter) -> None:
        """The gradient has been added."""
        if self._is_in_step():
            return
        reducer = self._runtime.reducer
        if reducer is None:
            return
        try:
            self._check(parameter)
        except SMPError as error:
            self._problem = error
            raise
        self._seen.add(id(parameter))
        if self._reduces:
            reducer.on_final(parameter)

    def _check(self, parameter: nn.Parameter) -> None:
        name = self._runtime.placement.alias(parameter)
        if id(parameter) not in self._known:
            raise SMPError(
                f"the parameter {name!r} was frozen when the model was wrapped, so its gradient would not be "
                "reduced over the ranks: set requires_grad before smp.DistributedModel, and freeze it after"
            )
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise SMPError(
                f"backward(create_graph=True) with replicas: the gradient of {name!r} would lose its graph "
                "when it is reduced. Take torch.autograd.grad(..., create_graph=True) for what is "
                "differentiated again"
            )
        if id(parameter) in self._seen and self._runtime.options.overlapping_allreduce:
            raise SMPError(
                f"the gradient of {name!r} came in two parts in one backward, and the first may be on its "
                "way to the other ranks (a reentrant checkpoint around a shared parameter does that): use "
                "use_reentrant=False, or smp.DistributedModel(..., overlapping_allreduce=False)"
            )

    def _end(self) -> None:
        """Autograd has come to the end."""
        if not self._is_open:
            return
        error: SMPError | None = None
        try:
            self._refuse_new()
        except SMPError as refusal:
            error = refusal
        if self._runtime.reducer is not None and self._versions_at_start != self._sum_of_versions():
            error = SMPError(
                "a hook changed a parameter during a backward outside smp.step, before its gradient was "
                "reduced over the replicas: change parameters when backward() has returned"
            )
        self._is_open = False
        self._finish(error)
        if error is not None:
            raise error

    def refuse_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            SMPError: it steps the model's parameters, whose gradients are still on their way.
            SMPMismatch: it steps with gradients that were not reduced, and that differ between replicas.
        """
        if self._is_in_step():
            return
        if not self._is_open:
            if self._replicas is not None:
                self._replicas.before_step(optimizer)
            return
        if torch._C._current_graph_task_id() == -1:
            self.settle()
            return
        own = {id(parameter) for parameter in self._parameters}
        if self._runtime.reducer is not None and any(
            id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]
        ):
            raise SMPError(
                f"{type(optimizer).__name__}.step() was called inside a backward outside smp.step, before "
                "gradients are reduced over the replicas: call it when backward() has returned"
            )
        if self._replicas is not None:
            self._replicas.before_step(optimizer)

    def look_back(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, maybe by a closure.

        Raises:
            SMPMismatch: its closure made gradients that were not reduced, and that differ between replicas.
        """
        if self._replicas is not None and not self._is_open and not self._is_in_step():
            self._replicas.before_step(optimizer, is_over=True)

    def _finish(self, error: Exception | None) -> None:
        """Reduces what is in ``grad``; collective over all ranks.

        Raises:
            SMPError: the backward has failed on another rank.
            SMPMismatch: the ranks do not make the same passes.
        """
        reducer, runtime = self._runtime.reducer, self._runtime
        try:
            heard = self._meet(self._said(error))
        except Exception:
            self._drop()
            raise
        problem = _problem(heard, self._replicas)
        failed = problem is not None
        if reducer is not None:
            if not failed and not self._reduces:
                try:
                    reducer.refuse_more_passes()
                except SMPError as refusal:  # all ranks have set aside alike
                    failed, problem = True, refusal
            if self._reduces:
                reducer.finish(failed=failed)
            reducer.put_back(failed=failed)
        self._versions = self._sum_of_versions()
        if failed:
            self._drop()
            if error is None:
                assert problem is not None
                raise problem
            return
        runtime.count_pass()
        if self._replicas is not None:
            self._replicas.note()
        self._synchronise(heard)
        if self._shared is not None and is_checked(self._number):
            named = {runtime.placement.alias(p) or "": p for p in self._parameters}
            check_replicated_gradients(named, self._shared)

    def _drop(self) -> None:
        """Nothing of a backward that has failed stays."""
        if self._runtime.reducer is not None:
            self._runtime.reducer.put_back(failed=True)
        for parameter in self._parameters:
            parameter.grad = None

    def _said(self, error: Exception | None) -> _Said:
        changed = self._versions is not None and self._versions != self._sum_of_versions()
        text = None if error is None else f"{type(error).__name__}: {error}"
        kind = b"" if error is None else failure_kind(error)
        buffers: dict[str, Shape] = {}
        if self._runtime.reducer is not None and self._runtime.options.broadcast_buffers:
            for name, buffer in self._buffers().items():
                kept = self._synchronised.get(name)
                if kept is None or buffer.shape != kept.shape or not torch.equal(buffer, kept):
                    buffers[name] = (tuple(buffer.shape), buffer.dtype)
        digests: Digests = {}
        if self._replicas is not None and error is None:
            digests = self._replicas.parameters(every=is_checked(self._number))
        return _Said(changed, self._reduces, text, kind, buffers, self._had, digests)

    def _sum_of_versions(self) -> int:
        """Changes whenever a parameter is changed in place, as optimizers do."""
        return sum(parameter._version for parameter in self._parameters)

    # Buffers ------------------------------------------------------------------------------------------------

    def _buffers(self) -> dict[str, torch.Tensor]:
        runtime = self._runtime
        return dict(runtime.placement.local_buffers(runtime.peers.stages))

    def _synchronise(self, heard: list[_Said]) -> None:
        """The first replica gives the buffers that have changed on any rank to the others.

        Now and not in the next forward, so that a forward on one rank alone (to evaluate) waits for nobody.
        """
        names = sorted({name for said in heard for name in said.buffers})
        if not names:
            return
        buffers = self._buffers()
        for name in names:
            shapes = {said.buffers[name] for said in heard if name in said.buffers}
            if len(shapes) > 1:
                raise SMPMismatch(
                    f"the buffer {name!r} is {' and '.join(sorted(map(str, shapes)))} on different ranks: "
                    "make it alike on all, or give smp.DistributedModel broadcast_buffers=False"
                )
        # Statistics of batch norm may be in graphs that come back, but no gradient is made of them. Of other
        # buffers torch itself refuses a second backward through a graph that has kept what they were.
        statistics = {
            id(buffer)
            for module in self._runtime.placement.root.modules()
            if isinstance(module, _NormBase)
            for buffer in module._buffers.values()
        }
        found = [buffers[name] for name in names]
        assert self._runtime.reducer is not None
        self._runtime.reducer.broadcast_buffers([b.data if id(b) in statistics else b for b in found])
        for name in names:
            self._synchronised[name] = buffers[name].detach().clone()


def _problem(heard: list[_Said], replicas: ReplicaChecks | None) -> SMPError | None:
    """What all ranks raise."""
    for rank, said in enumerate(heard):
        if said.failure is not None:
            return error_like(
                said.kind,
                f"a backward outside smp.step failed on rank {rank}, so nothing was reduced and gradients "
                f"are None: {said.failure}",
            )
    for what, values in (
        ("has changed its parameters since its last backward", [said.changed for said in heard]),
        ("reduces gradients in this backward", [said.reduces for said in heard]),
    ):
        if len(set(values)) > 1:
            return SMPMismatch(
                f"backwards outside smp.step: rank {values.index(True)} {what} and rank "
                f"{values.index(False)} has not. All ranks must make equally many backwards between two "
                "steps of the optimizer; nothing was reduced, and gradients are None"
            )
    if replicas is None:
        return None
    for rank, said in enumerate(heard):
        if differs := said.had ^ heard[0].had:
            name = replicas.name_of_first(differs)
            one, other = (0, rank) if differs & -differs & heard[0].had else (rank, 0)
            return SMPMismatch(
                f"backwards outside smp.step: before this one {name!r} had a gradient on rank {one} and none "
                f"on rank {other}: call optimizer.zero_grad() on all ranks alike; nothing was reduced, "
                "and gradients are None"
            )
    if (found := first_difference([said.digests for said in heard], everything=False)) is not None:
        name, first, rank = found
        return SMPMismatch(
            f"backwards outside smp.step: the parameter {name!r} is not the same on rank {rank} as on rank "
            f"{first}, and must be: it was changed by what only one rank knows (a learning rate from "
            "its own loss, as of ReduceLROnPlateau, a step that one rank left out, its own random numbers, "
            "gradients that it changed itself). Average such numbers over replicas or decide on one "
            "rank for all; nothing was reduced, and gradients are None"
        )
    return None
