"""Blocks that differ in a number that nobody has read are described once, and all others each for itself."""

from __future__ import annotations

import copy
import gc
import inspect
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import smp_lite as smp
from smp_lite.record.describe import attribute_reads
from smp_lite.record.describe.descriptions import Description, Descriptions
from smp_lite.record.describe.metadata import MetadataInference
from smp_lite.record.state.ambient import Ambient
from smp_lite.record.values.calls import Arguments

FACTOR = 1
BY_MODULE: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
BY_ID: dict[int, int] = {}


class Block(nn.Module):
    """Returns its input ``times`` times, which is 1 more than its number where that is read."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.name = f"block {layer_idx}"
        self.linear = nn.Linear(4, 4)

    def times(self) -> int:
        return 1

    def forward(self, x: torch.Tensor, asks: bool = False) -> torch.Tensor:
        number = self.layer_idx if asks else 0
        return self.linear(x).repeat(self.times() + number, 1)


class Branches(Block):
    def times(self) -> int:
        return 3 if self.layer_idx > 0 else 1


class ByDict(Block):
    def times(self) -> int:
        return int(self.__dict__["layer_idx"]) + 1


class ByVars(Block):
    def times(self) -> int:
        return int(vars(self)["layer_idx"]) + 1


class ByGetattr(Block):
    def times(self) -> int:
        return int(getattr(self, "layer" + "_idx")) + 1


class ByName(Block):
    def times(self) -> int:
        return int(self.name.split()[1]) + 1


class ByProperty(Block):
    @property
    def number(self) -> int:
        return self.layer_idx + 1

    def times(self) -> int:
        return self.number


class ByPattern(Block):
    def times(self) -> int:
        match self:
            case Block(layer_idx=0):
                return 1
        return 2


class ByGetter(Block):
    def times(self) -> int:
        return int(operator.attrgetter("layer_idx")(self)) + 1


class ByText(Block):
    def extra_repr(self) -> str:
        return f"number={self.layer_idx}"

    def times(self) -> int:
        return 2 if "number=1" in repr(self) else 1


class ByCopy(Block):
    def times(self) -> int:
        return copy.copy(self).layer_idx + 1


class ByPickle(Block):
    def times(self) -> int:
        return 2 if b"block 1" in pickle.dumps(self.table()) else 1

    def table(self) -> Any:
        return self.__reduce_ex__(2)[2]["name"]


class RoundTheHook(Block):
    def times(self) -> int:
        return int(object.__getattribute__(self, "layer_idx")) + 1


class Statically(Block):
    def times(self) -> int:
        return int(inspect.getattr_static(self, "layer_idx")) + 1


class ByReferents(Block):
    def times(self) -> int:
        found = [part for part in gc.get_referents(self) if isinstance(part, dict)]
        held = [part["layer_idx"] for part in found if "layer_idx" in part]
        return int(held[0] if held else next(p for p in gc.get_referents(self) if type(p) is int)) + 1


class ByTable(Block):
    def times(self) -> int:
        return BY_MODULE[self]


class ById(Block):
    def times(self) -> int:
        return BY_ID[id(self)]


class OwnWay(Block):
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "layer_idx" if name == "number" else name)

    def times(self) -> int:
        return int(self.number) + 1


class Falls(Block):
    def __getattr__(self, name: str) -> Any:
        return self.__dict__["layer_idx"] if name == "number" else super().__getattr__(name)

    def times(self) -> int:
        return int(self.number) + 1


class _Child(nn.Module):
    def forward(self, x: torch.Tensor, parent: Block) -> torch.Tensor:
        return x.repeat(parent.layer_idx + 1, 1)


class ChildOf(Block):
    """A child is handed its parent, and asks it."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.child = _Child()

    def forward(self, x: torch.Tensor, asks: bool = False) -> torch.Tensor:
        return self.child(x, self)


class InnerNumber(Block):
    """A part of it has a number, and reads it."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(0)
        self.inner = Branches(layer_idx)

    def times(self) -> int:
        return self.inner.times()


class ByHook(Block):
    """A hook that it puts on a child asks."""

    def forward(self, x: torch.Tensor, asks: bool = False) -> torch.Tensor:
        handle = self.linear.register_forward_hook(
            lambda module, args, out: out.repeat(self.layer_idx + 1, 1)
        )
        try:
            return self.linear(x)
        finally:
            handle.remove()


READERS = [
    Branches,
    ByDict,
    ByVars,
    ByGetattr,
    ByName,
    ByProperty,
    ByPattern,
    ByGetter,
    ByText,
    ByCopy,
    ByPickle,
    RoundTheHook,
    Statically,
    ByReferents,
    ByTable,
    ById,
    OwnWay,
    Falls,
    ChildOf,
    InnerNumber,
    ByHook,
]


@pytest.fixture
def descriptions() -> Descriptions:
    return Descriptions()


def describe(descriptions: Descriptions, module: nn.Module, *more: Any) -> tuple[Any, bool]:
    """What the call is described as, and whether that took a run."""
    descriptions.has_described = False
    found = descriptions.describe(
        "call", module, Arguments.of((torch.ones(2, 4), *more), {}), Ambient.current()
    )
    return found, descriptions.has_described


def meta_of(found: Any) -> Any:
    return found.meta if isinstance(found, Description) else found


def test_numbers_that_are_not_read_do_not_count(descriptions: Descriptions) -> None:
    first, has_run = describe(descriptions, Block(0))
    assert isinstance(first, Description) and has_run
    for number in (1, 2, 7):
        found, has_run = describe(descriptions, Block(number))
        assert found.meta is first.meta and not has_run


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_what_is_read_counts(kind: Callable[[int], nn.Module], descriptions: Descriptions) -> None:
    blocks = [kind(number) for number in (0, 1, 2)]
    for number, block in enumerate(blocks):
        BY_MODULE[block] = BY_ID[id(block)] = number + 1
    for block in blocks:
        found, has_run = describe(descriptions, block)
        assert has_run
        alone, _ = describe(Descriptions(), block)
        assert meta_of(found) == meta_of(alone)


def test_a_call_that_reads_the_number_is_for_itself(descriptions: Descriptions) -> None:
    """Another call of the same block did not read it."""
    one, other = Block(1), Block(2)
    first, _ = describe(descriptions, one, False)
    asking, _ = describe(descriptions, one, True)
    assert not describe(descriptions, other, False)[1]
    found, has_run = describe(descriptions, other, True)
    assert has_run
    shapes = [description.meta.leaves[0].meta.shape for description in (first, asking, found)]
    assert shapes == [(2, 4), (4, 4), (6, 4)]


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "linear", nn.Linear(4, 5)),
        lambda block: setattr(block, "layer_idx", True),
        lambda block: setattr(block, "more", 1),
        lambda block: block.linear.requires_grad_(False),
        lambda block: block.eval(),
    ],
)
def test_all_else_has_to_be_equal(change: Callable[[Block], Any], descriptions: Descriptions) -> None:
    describe(descriptions, Block(0))
    other = Block(1)
    change(other)
    assert describe(descriptions, other)[1]


class ReadsAGlobal(Block):
    def times(self) -> int:
        return FACTOR


def test_what_the_code_reads_elsewhere_has_to_be_equal(
    descriptions: Descriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(descriptions, ReadsAGlobal(0))
    monkeypatch.setitem(globals(), "FACTOR", 2)
    found, has_run = describe(descriptions, ReadsAGlobal(1))
    assert has_run and found.meta.leaves[0].meta.shape == (4, 4)
    assert not describe(descriptions, ReadsAGlobal(2))[1]


def test_hooks_are_not_compared(descriptions: Descriptions) -> None:
    describe(descriptions, Block(0))
    other = Block(1)
    other.linear.register_forward_hook(lambda module, args, out: out.repeat(2, 1))
    found, has_run = describe(descriptions, other)
    assert has_run and found.meta.leaves[0].meta.shape == (4, 4)
    assert describe(descriptions, Block(2))[1] is False


def test_modules_read_as_before_afterwards(descriptions: Descriptions) -> None:
    describe(descriptions, Block(0))
    assert nn.Module.__getattribute__ is object.__getattribute__
    assert nn.Module.__hash__ is object.__hash__


def test_a_class_with_its_own_way_to_read_is_not_shared() -> None:
    assert attribute_reads.numbers_and_texts(Block(0)) == {("", "layer_idx"), ("", "name")}
    assert not attribute_reads.numbers_and_texts(nn.Sequential(Block(0), OwnWay(0)))


def test_compiled_code_reads_unseen() -> None:
    assert attribute_reads._is_compiled(torch.compile(lambda x: x, backend="eager").__code__)
    assert not attribute_reads._is_compiled(describe.__code__)


def test_a_step_describes_alike_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []
    original = MetadataInference.module

    def module(self: MetadataInference, module: nn.Module, arguments: Arguments) -> Any:
        described.append(type(module).__name__)
        return original(self, module, arguments)

    monkeypatch.setattr(MetadataInference, "module", module)
    blocks = [*map(Block, range(4)), Branches(4), Branches(5)]
    plain = copy.deepcopy(blocks)
    smp.reset()
    smp.init_in_memory({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(nn.Sequential(*blocks))

    @smp.step
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        model.backward(out.sum())
        return out

    x = torch.randn(2, 4)
    found = step(model, x).concat()
    # What comes to the first one needs no gradient.
    assert described == ["Block", "Block", "Branches", "Branches"]
    for part in x.split(1):
        nn.Sequential(*plain)(part).sum().backward()
    assert torch.equal(found, torch.cat([nn.Sequential(*plain)(part) for part in x.split(1)]))
    for one, other in zip(blocks, plain, strict=True):
        assert one.linear.weight.grad is not None and other.linear.weight.grad is not None
        assert torch.equal(one.linear.weight.grad * 2, other.linear.weight.grad)
    smp.reset()
