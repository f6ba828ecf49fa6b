"""torch.utils.checkpoint and saved-tensor hooks around calls of several stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.programs import program
from tests.programs.small import TanhBlock as Block
from tests.programs.small import trained

REFUSED = "inside a checkpoint around calls of several stages"


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Checkpointed(nn.Module):
    def __init__(self, kind: type[Block] = Block, use_reentrant: bool = False) -> None:
        super().__init__()
        self.stem = Block()
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@program(stages=(2, 4), ranks=(2,))
def each_block_is_checkpointed(smp: Any, out: Any) -> None:
    trained(smp, out, Checkpointed())


@program(stages=(2,), ranks=(2,), refused=REFUSED)
def running_statistics(smp: Any, out: Any) -> None:
    """In one process each forward runs twice, and so the statistics change twice."""
    trained(smp, out, Checkpointed(Normed))


@program(stages=(2,), refused=REFUSED, microbatches=1)
def running_statistics_reentrant(smp: Any, out: Any) -> None:
    trained(smp, out, Checkpointed(Normed, use_reentrant=True))


@program(stages=(2,), refused=REFUSED)
def running_statistics_sequential(smp: Any, out: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Normed() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)

    trained(smp, out, Net())


@program(stages=(2,), ranks=(2,))
def running_statistics_of_an_evaluation(smp: Any, out: Any) -> None:
    """In eval mode nothing changes."""
    trained(smp, out, Checkpointed(Normed).eval())


@program(stages=(2,), refused=REFUSED)
def a_count_of_calls(smp: Any, out: Any) -> None:
    class Kind(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) / self.calls

    trained(smp, out, Checkpointed(Kind))


@program(stages=(2,), refused=REFUSED)
def a_list_of_calls(smp: Any, out: Any) -> None:
    calls: list[int] = []

    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x) / len(calls)

    trained(smp, out, Checkpointed(Kind))


def coarse(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


class Packed(nn.Module):
    def __init__(self, hooks: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.hooks = hooks

    def forward(self, x: Tensor) -> Tensor:
        with self.hooks():
            for block in self.blocks:
                x = block(x)
        return x


@program(stages=(2,), ranks=(2,), refused="has no effect on them")
def what_is_saved_is_rounded(smp: Any, out: Any) -> None:
    trained(smp, out, Packed(lambda: saved_tensors_hooks(coarse, Tensor.float)))


@program(stages=(2,), ranks=(2,))
def what_is_saved_goes_elsewhere(smp: Any, out: Any) -> None:
    """Nothing but memory, which the warning says is not saved here."""
    trained(smp, out, Packed(save_on_cpu))


@program(stages=(2,), ranks=(2,))
def what_blocks_save_is_rounded(smp: Any, out: Any) -> None:
    class Kind(Block):
        def forward(self, x: Tensor) -> Tensor:
            with saved_tensors_hooks(coarse, Tensor.float):
                return super().forward(x)

    trained(smp, out, nn.Sequential(*(Kind() for _ in range(4))))


@program(stages=(2,), ranks=(2,))
def what_a_whole_step_saves_is_rounded(smp: Any, out: Any) -> None:
    """The hooks are around the call of the step function, where the work is done."""
    net = nn.Sequential(*(Block() for _ in range(4)))
    trained(smp, out, net, around=lambda: saved_tensors_hooks(coarse, Tensor.float))


@program(stages=(2,), refused=REFUSED)
def a_list_of_the_containers(smp: Any, out: Any) -> None:
    """What is checkpointed is container code, which counts its calls."""
    calls: list[int] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def two(self, first: int, x: Tensor) -> Tensor:
            calls.append(1)
            return self.blocks[first + 1](self.blocks[first](x)) / len(calls)

        def forward(self, x: Tensor) -> Tensor:
            for first in (0, 2):
                x = checkpoint(self.two, first, x, use_reentrant=False)
            return x

    trained(smp, out, Net())


@program(stages=(2,), refused=REFUSED)
def a_list_of_the_containers_reentrant(smp: Any, out: Any) -> None:
    calls: list[int] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Block()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def both(self, x: Tensor) -> Tensor:
            calls.append(1)
            return self.blocks[1](self.blocks[0](x)) / len(calls)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.both, self.stem(x), use_reentrant=True)

    trained(smp, out, Net())
