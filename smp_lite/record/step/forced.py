"""What Python needs to know now: values are fetched from their stages while recording goes on.

``loss.item()``, ``if x.mean() > 0``, a size that is an element of a tensor: everything that the number
depends on is executed on all ranks, and all of them get it. A call that merely needs a *number* takes the
number and stays a recorded call, so its result keeps its place in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...errors import SMPError
from ..code.source_line import warn_once_at_user_line
from ..commands.recording import Command, Recording
from ..commands.replay import refuse
from ..values.calls import Arguments, ResultMeta
from ..values.placed import PlacedTensor
from ..values.torch_functions import function_name

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["Forced", "Host"]


_WITHOUT_GRADIENT = ("numpy", "__array__", "__dlpack__")


class Host(Protocol):
    """Who executes for the recorder while it is still recording."""

    def run_for_real(self, recording: Recording, command: Command) -> ResultMeta | str:
        """Executes all that is recorded, the command last.

        Returns:
            A description of its result, on every rank; or why its module has to be opened, in which case
            nothing of the run has stayed.
        """

    def fetch(self, recording: Recording, values: list[int]) -> list[torch.Tensor]:
        """Executes all that is recorded; returns the values' data, detached, on every rank."""

    def settle(self) -> None:
        """What runs already runs to its end: something is about to change that it reads."""

    def share(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """The tensor itself on its stage's rank, a copy of it on the others."""

    def share_late(self, placed: PlacedTensor) -> torch.Tensor:
        """The data of a value of the last step, on every rank."""


class Forced:
    """Fetches for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that needs data: fetches its placed arguments and calls it everywhere."""
        if function_name(func) in _WITHOUT_GRADIENT and args[0].requires_grad and not kwargs.get("force"):
            func(torch.empty(0, requires_grad=True))  # raises what it does in one process
        arguments = self.recorder.arguments(args, kwargs, detached=True)
        placed = [tensor for tensor in arguments.tensors if type(tensor) is PlacedTensor]
        fetched = iter(self.fetch(placed, f"{function_name(func)}()"))
        real = [next(fetched) if type(t) is PlacedTensor else t for t in arguments.tensors]
        args, kwargs = arguments.build(real)
        return func(*args, **kwargs)

    def numbers(self, arguments: Arguments) -> Arguments | None:
        """The arguments with Python numbers for integer tensors of one element; None if there are none."""
        chosen = [i for i, tensor in enumerate(arguments.tensors) if _is_number(tensor)]
        if not chosen:
            return None
        if self.recorder.tape is not None:
            raise refuse("takes a number out of a tensor")
        placed = [tensor for i in chosen if type(tensor := arguments.tensors[i]) is PlacedTensor]
        fetched = iter(self.fetch(placed, "a number") if placed else ())
        leaves = list(arguments.leaves)
        for i in chosen:
            tensor = arguments.tensors[i]
            leaves[arguments.positions[i]] = (
                next(fetched) if type(tensor) is PlacedTensor else tensor
            ).item()
        return Arguments(leaves, arguments.spec)

    def fetch(self, placed: list[PlacedTensor], what: str) -> list[torch.Tensor]:
        """The data of placed values, and a warning that it costs overlap."""
        if self.recorder.tape is not None:
            raise refuse(f"looks at the data of a tensor ({what})")
        self.warn(what)
        return self.fetch_quietly(placed)

    def fetch_quietly(self, placed: list[PlacedTensor]) -> list[torch.Tensor]:
        recording = self.recorder.recording
        assert recording is not None
        values = self.recorder.host.fetch(
            recording, [self.recorder.writer.value_of(tensor) for tensor in placed]
        )
        recording.epoch += 1
        return values

    @staticmethod
    def warn(what: str) -> None:
        warn_once_at_user_line(
            f"{what} needs the data of a tensor inside an smp.step: all ranks wait for it here. That is "
            "correct, but the pipeline cannot overlap across it"
        )

    def fetch_from(self, recording: Recording, tensor: PlacedTensor) -> torch.Tensor:
        """The data of a value of another microbatch of this step."""
        (value,) = self.recorder.host.fetch(recording, [tensor.smp_value])
        assert self.recorder.recording is not None
        self.recorder.recording.epoch += 1  # what it has recorded so far ran too
        return value

    # After the step -----------------------------------------------------------------------------------------

    def after_the_step(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function on values that were made inside a step and are still held."""
        arguments = Arguments.of(args, kwargs)
        real = [
            self.data_of(tensor, function_name(func)) if type(tensor) is PlacedTensor else tensor
            for tensor in arguments.tensors
        ]
        args, kwargs = arguments.build(real)
        return func(*args, **kwargs)

    def data_of(self, placed: PlacedTensor, what: str = "it") -> torch.Tensor:
        """The data of a value of an earlier step.

        Raises:
            SMPError: there is none any more.
        """
        if placed.smp_data is not None:
            return placed.smp_data
        if placed.smp_is_late:
            return self.recorder.host.share_late(placed)
        raise SMPError(
            f"{what}() was called on a value that was made inside an smp.step and has no data here: return "
            "it from the step function, then it is valid on every rank, or keep it on every rank"
        )


def _is_number(tensor: torch.Tensor) -> bool:
    meta = tensor.smp_meta if type(tensor) is PlacedTensor else tensor
    return (
        len(meta.shape) == 0
        and not meta.dtype.is_floating_point
        and not meta.dtype.is_complex
        and meta.dtype is not torch.bool
    )
