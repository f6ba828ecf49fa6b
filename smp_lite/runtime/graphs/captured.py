"""One segment as two graphs: its forward, and its backward; of one microbatch at a time.

Graphs read and write memory that stays where it is. So what comes in is copied there, and what goes out is
copied from there: nobody outside holds memory of a graph, and the next replay may write over it. To autograd
the segment is one function, from its inputs and parameters to its outputs; gradients of parameters are added
up outside, where they always are.

The backward's graph is made when the first gradients arrive, since kernels are chosen by how they lie. If
they lie otherwise later, the segment's own Python is run once more on the inputs that are still there, and
autograd goes through that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...device_graphs import CaptureSpoilt, DeviceGraph, new_pool
from ...devices import home
from ...errors import SMPError

__all__ = ["CannotCapture", "CapturedSegment", "StandIns", "first_line", "form_of", "length_of"]

_ALIGNMENT = 256
"""Bytes; the most that kernels are chosen by (torch tells cublasLt of no more)."""

Run = Callable[[dict[int, Tensor], Sequence[Tensor]], dict[int, Tensor]]
"""The segment's own Python: from its imports by value, and the ordinary tensors that it is given, to what it
exports."""


StandIns = Callable[[Sequence[Tensor]], AbstractContextManager[list[Tensor]]]
"""Within: modules have others in the place of these parameters, of the same memory, and new to autograd."""


class CannotCapture(Exception):
    """Says why."""


class CapturedSegment:
    """Made with what the segment is given for the first time; forward is captured at once.

    Args:
        run: the Python, this time.
        imports: leaves, by value.
        given: ordinary tensors among the arguments.
        parameters: all that the segment may use and that want gradients.
        state: tensors of modules, whose memory is not the graph's.
        stand_ins: puts others in the place of parameters. Autograd's node of a parameter belongs to the
            stream that was current when it was made: that of the capture may not be waited for by another,
            and the other's not by the capture.
        has_backward: whether one will come.

    Raises:
        CannotCapture: it cannot.
        CaptureSpoilt: it could not, as the device has found.
    """

    def __init__(
        self,
        run: Run,
        imports: dict[int, Tensor],
        given: Sequence[Tensor],
        parameters: Sequence[Tensor],
        state: Sequence[Tensor],
        stand_ins: StandIns,
        *,
        has_backward: bool,
    ) -> None:
        self.in_flight = False
        self.turn = 0  # how many forwards there have been
        self.must_run = ""  # why the Python has to run from now on
        self._run: Run | None = None  # while it is in flight
        self._forms = [form_of(tensor) for tensor in (*imports.values(), *given)]
        self._imports = {value: _static(tensor) for value, tensor in imports.items()}
        self._given = [_static(tensor) for tensor in given]
        self._parameters = list(parameters)
        self._pool = new_pool()
        self._forward = DeviceGraph(self._pool)
        self._fill(imports, given)
        with (
            stand_ins(self._parameters) as others,
            torch.set_grad_enabled(has_backward),
            self._forward.capturing(),
        ):
            outputs = run(dict(self._imports), self._given)
        self._wanted = [leaf for leaf in self._imports.values() if leaf.requires_grad] + others
        self._values = list(outputs)
        self._outputs = list(outputs.values())
        self._differentiable = [output.requires_grad for output in self._outputs]
        self._check_outputs(state)
        if has_backward:
            self._check_nodes()
        self._backward: DeviceGraph | None = None
        self._starts: list[tuple[int, Tensor]] = []  # number of the output, and its gradient's memory
        self._gradients: list[Tensor | None] = []

    def fits(self, imports: dict[int, Tensor], given: Sequence[Tensor]) -> bool:
        """Whether what is given lies as it did when the graph was made."""
        return not self.in_flight and self._forms == [form_of(t) for t in (*imports.values(), *given)]

    def lacks_backward(self) -> bool:
        """Whether one was to come and has not."""
        return any(self._differentiable) and self._backward is None

    def land(self) -> None:
        """No backward comes any more."""
        self.in_flight, self._run = False, None

    def forward(self, imports: dict[int, Tensor], given: Sequence[Tensor], run: Run) -> dict[int, Tensor]:
        """The outputs by value, in memory of their own; ``run``: the Python, this time."""
        self._fill(imports, given)
        if not any(self._differentiable):
            return dict(zip(self._values, self.replay_forward(), strict=True))
        leaves = [imports[value] for value, leaf in self._imports.items() if leaf.requires_grad]
        self.in_flight, self._run = True, run
        self.turn += 1
        with torch.enable_grad():
            found = _Replayed.apply(self, *leaves, *self._parameters)
        return dict(zip(self._values, found, strict=True))

    def prepare(self, starts: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """The backward comes, from these edges with these gradients: captures it, the first time."""
        if self._backward is not None or self.must_run:
            return
        given = [
            (start.output_nr, gradient) for start, gradient in zip(starts, gradients) if gradient is not None
        ]
        outputs = [self._outputs[number] for number, _ in given]
        try:
            self._starts = [(number, _static(gradient)) for number, gradient in given]
            graph = DeviceGraph(self._pool)
            with graph.capturing():
                found = torch.autograd.grad(
                    outputs,
                    self._wanted,
                    [gradient for _, gradient in self._starts],
                    allow_unused=True,
                )
        except CaptureSpoilt:
            raise
        except Exception as error:  # what is an error without a graph too comes up again there
            self.must_run = f"its backward cannot be captured ({first_line(error)})"
            return
        self._gradients, self._backward = list(found), graph
        self._outputs = [output.detach() for output in self._outputs]  # the graph of autograd may go

    def _fill(self, imports: dict[int, Tensor], given: Sequence[Tensor]) -> None:
        # Not in the eyes of autograd: what it has saved of a capture is not what changes.
        with torch.no_grad():
            for value, leaf in self._imports.items():
                leaf.data.copy_(imports[value])
            for memory, tensor in zip(self._given, given, strict=True):
                memory.data.copy_(tensor)

    def replay_forward(self) -> list[Tensor]:
        self._forward.replay()
        return [copy_of(output) for output in self._outputs]

    def replay_backward(self, turn: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the leaves and the parameters; ``turn``: of which forward."""
        if not self.in_flight or turn != self.turn:
            raise SMPError(
                "static_mode: a backward goes through a step that was replayed, a second time or after the "
                "step; set SMP_LITE_CUDA_GRAPHS=0"
            )
        run = self._run
        self.land()
        arrived = [(number, gradient) for number, gradient in enumerate(gradients) if gradient is not None]
        known = dict(self._starts)
        fits = len(arrived) == len(known) and all(
            number in known and _layout(gradient) == _layout(known[number]) for number, gradient in arrived
        )
        if self._backward is None or not fits:
            self.must_run = self.must_run or "gradients come in several layouts"
            assert run is not None
            return self._run_again(run, arrived)
        for number, gradient in arrived:
            known[number].copy_(gradient)
        self._backward.replay()
        return [None if gradient is None else copy_of(gradient) for gradient in self._gradients]

    def _run_again(self, run: Run, arrived: Sequence[tuple[int, Tensor]]) -> list[Tensor | None]:
        imports = {
            value: leaf.detach().clone().requires_grad_(leaf.requires_grad)
            for value, leaf in self._imports.items()
        }
        with torch.enable_grad():
            outputs = list(run(imports, self._given).values())
        wanted = [leaf for leaf in imports.values() if leaf.requires_grad] + self._parameters
        found = torch.autograd.grad(
            [outputs[number] for number, _ in arrived],
            wanted,
            [gradient for _, gradient in arrived],
            allow_unused=True,
        )
        return list(found)

    def without_gradient(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of them."""
        return [t for t, wants in zip(outputs, self._differentiable, strict=True) if not wants]

    def _check_outputs(self, state: Sequence[Tensor]) -> None:
        others = {_memory(t) for t in (*self._imports.values(), *self._given, *self._parameters, *state)}
        for output in self._outputs:
            if type(output) is not Tensor or output.layout is not torch.strided or output.is_conj():
                raise CannotCapture("it returns what is no ordinary tensor")
            if output.device != home() or output.is_neg():
                raise CannotCapture("it returns what is no ordinary tensor of the device")
            if _memory(output) in others:
                raise CannotCapture("what it returns lies in memory of its inputs, or of another result")
            others.add(_memory(output))

    def _check_nodes(self) -> None:
        """Gradients end at what is known, and no Python runs on their way."""
        known = {id(tensor) for tensor in self._wanted}
        for node in _nodes(self._outputs):
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                raise CannotCapture("an autograd function runs Python in its backward")
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                raise CannotCapture("it uses a tensor that wants a gradient and is no parameter of its own")


class _Replayed(torch.autograd.Function):
    """The segment, to autograd."""

    @staticmethod
    def forward(ctx: Any, captured: CapturedSegment, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.captured, ctx.turn = captured, captured.turn
        ctx.set_materialize_grads(False)
        found = captured.replay_forward()
        ctx.mark_non_differentiable(*captured.without_gradient(found))
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.captured.replay_backward(ctx.turn, gradients)


def first_line(error: Exception) -> str:
    """What CUDA adds is long."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def copy_of(tensor: Tensor) -> Tensor:
    """In memory of its own, and laid out alike, with gaps and repetitions."""
    tensor = tensor.detach()
    found = _room_for(tensor)
    if tensor.numel():
        length = length_of(tensor)
        found.as_strided((length,), (1,)).copy_(tensor.as_strided((length,), (1,)))
    return found


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """All but the numbers, as far as kernels are chosen by it."""
    return (*_layout(tensor), tensor.requires_grad, type(tensor), tensor.is_conj(), tensor.is_neg())


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, _lead(tensor)


def _lead(tensor: Tensor) -> int:
    """By how many elements it begins after a place where the device's memory may begin; 0 for whole numbers,
    with which all kernels compute alike."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return 0
    size = tensor.element_size()
    return tensor.storage_offset() * size % _ALIGNMENT // size


def length_of(tensor: Tensor) -> int:
    """Elements of memory from its first to its last, if it has any."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _room_for(tensor: Tensor) -> Tensor:
    """New memory that is laid out alike."""
    lead = _lead(tensor)
    row = torch.empty(lead + (length_of(tensor) if tensor.numel() else 0), dtype=tensor.dtype, device=home())
    return row.as_strided(tensor.shape, tensor.stride(), lead)


def _static(tensor: Tensor) -> Tensor:
    """Memory that such tensors can be copied into."""
    reach = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if step <= reach:
                raise CannotCapture("something that it is given repeats its numbers, as expand() does")
            reach += (n - 1) * step
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise CannotCapture("something that it is given is no ordinary tensor")
    return _room_for(tensor.detach()).requires_grad_(tensor.requires_grad)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nodes(outputs: Sequence[Tensor]) -> Iterator[Any]:
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions if following is not None]
