"""Norms of gradients mean the whole model: torch's own functions, made right while a session is open.

``clip_grad_norm_``, ``get_total_norm`` and ``clip_grads_with_norm_`` of ``torch.nn.utils`` see one process
only: on each rank they would find the norm of that rank's stage, and clip every stage by another factor. They
are used under many names, imported into scripts and other libraries before and after this one. All those
names are one object, which calls an inner function that it holds in a closure cell; that inner function is
what is replaced, from ``smp.init`` until ``smp.reset``. Nothing changes for tensors that have nothing to do
with the model, nor before partition.

A call that involves the model is collective over the mp group: each rank computes the norms of the tensors
that live there, as torch would; :mod:`.norm_parts` puts them in the order of one process; each rank then
takes the norm of the norms, as torch would. A roll call carries them, so a rank that does not call is named;
it costs some tenths of a millisecond a step.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from .errors import SMPError, SMPMismatch
from .norm_parts import FOREIGN, Norm, Part, as_in_one_process
from .own_parameters import OwnParameters

if TYPE_CHECKING:
    from .session import Session

__all__ = ["clip_grad_norm_", "norms_of_the_whole_model", "refuse_inside_step"]

Tensors = torch.Tensor | Iterable[torch.Tensor]

_REPLACED = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_")


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over the whole model. Collective over the mp group.

    torch's own does the same while a session is open. With ``max_norm=math.inf`` nothing is clipped and the
    norm returned.

    Args:
        parameters: of the model, the same on every rank (``model.parameters()``), or all of a rank's own
            (``model.local_parameters()``); a tensor or an iterable. Others may be among them.
        max_norm: gradients are scaled down to it.
        norm_type: of the norm; may be ``inf``.
        error_if_nonfinite: the norm must be finite.
        foreach: as in torch.

    Returns:
        The norm before clipping, one element, the same on every rank of the group.

    Raises:
        SMPMismatch: the ranks were given different things.
        SMPTimeout: a rank did not call; the text names it.
        SMPError: called inside a step, where gradients are not there yet.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@contextlib.contextmanager
def norms_of_the_whole_model(session: Session) -> Iterator[None]:
    """Within: torch's functions mean the whole model of this session.

    Raises:
        SMPError: this version of torch builds them in another way.
    """
    cells = {name: _cell(name) for name in _REPLACED}
    originals = {name: cell.cell_contents for name, cell in cells.items()}
    functions = _Functions(session, originals)
    try:
        for name, cell in cells.items():
            cell.cell_contents = getattr(functions, name)
        yield
    finally:
        for name, cell in cells.items():
            cell.cell_contents = originals[name]


def _cell(name: str) -> types.CellType:
    """Where torch's function holds the inner one that it calls."""
    function = getattr(torch.nn.utils, name)
    try:
        return function.__closure__[function.__code__.co_freevars.index("func")]  # type: ignore[no-any-return]
    except (AttributeError, TypeError, ValueError):
        raise SMPError(
            f"torch {torch.__version__} builds torch.nn.utils.{name} in a way not known here, so norms of "
            "gradients would be wrong: use torch 2.6 to 2.13"
        ) from None


def refuse_inside_step(session: Session, what: str) -> None:
    """Refuses what needs gradients, while a step function is being recorded.

    Raises:
        SMPError: it is.
    """
    if _is_recording(session):
        raise SMPError(
            f"{what} was called inside a function decorated with @smp.step: gradients are there when the "
            "step function has returned, so call it after the step"
        )


def _is_recording(session: Session) -> bool:
    """Whether the user's step function runs now; False while the library executes what it recorded."""
    runtime = None if session.step is None else session.step.runtime
    return runtime is not None and not runtime.recorder.suspended


@dataclass(frozen=True)
class _Item:
    """A tensor that a function was given.

    Attributes:
        number: of the parameter that it, or whose gradient it is; FOREIGN: not the model's.
        tensor: itself; None: it lives on another stage.
    """

    number: int
    tensor: torch.Tensor | None


class _Functions:
    """What replaces torch's inner functions.

    Args:
        session: whose model it is.
        originals: torch's own, by name.
    """

    def __init__(self, session: Session, originals: dict[str, Callable[..., Any]]) -> None:
        self._session = session
        self._torch = types.SimpleNamespace(**originals)

    # With torch's names and signatures ----------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        parameters: Tensors,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = _listed(parameters)
        items = self._parameters("clip_grad_norm_", given)
        if not self._is_collective(items):
            if not given and isinstance(parameters, types.GeneratorType):
                _warn_of_empty_generator()
            tensors = parameters if isinstance(parameters, torch.Tensor) else given
            return self._torch.clip_grad_norm_(tensors, max_norm, norm_type, error_if_nonfinite, foreach)
        here = [item.tensor for item in items if item.tensor is not None]
        counted = [None if item.tensor is None else item.tensor.grad for item in items]
        arguments = {"norm_type": float(norm_type), "max_norm": float(max_norm)}
        is_single = isinstance(parameters, torch.Tensor)
        call = _Call("clip_grad_norm_", arguments, is_single, foreach)
        total, was_empty = self._total(call, items, counted, error_if_nonfinite)
        if was_empty and isinstance(parameters, types.GeneratorType):
            _warn_of_empty_generator()
        self._torch.clip_grads_with_norm_(here, max_norm, total, foreach)
        return total

    def get_total_norm(
        self,
        tensors: Tensors,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = _listed(tensors)
        items = self._tensors("get_total_norm", given)
        if not self._is_collective(items):
            given_to_torch = tensors if isinstance(tensors, torch.Tensor) else given
            return self._torch.get_total_norm(given_to_torch, norm_type, error_if_nonfinite, foreach)
        is_single = isinstance(tensors, torch.Tensor)
        call = _Call("get_total_norm", {"norm_type": float(norm_type)}, is_single, foreach)
        return self._total(call, items, [item.tensor for item in items], error_if_nonfinite)[0]

    def clip_grads_with_norm_(
        self,
        parameters: Tensors,
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        items = self._parameters("clip_grads_with_norm_", _listed(parameters))
        here = [item.tensor for item in items if item.tensor is not None]
        self._torch.clip_grads_with_norm_(here, max_norm, total_norm, foreach)

    def clip_grad_value_(self, parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
        """Each gradient for itself; but torch fails where there is none, as may be on one stage."""
        items = self._parameters("clip_grad_value_", _listed(parameters))
        here = [item.tensor for item in items if item.tensor is not None]
        is_a_part = self._is_shared() and self._is_of_the_model(items)
        if not is_a_part or any(tensor.grad is not None for tensor in here):
            self._torch.clip_grad_value_(here, clip_value, foreach)

    # Which tensors those are --------------------------------------------------------------------------------

    @property
    def _own(self) -> OwnParameters | None:
        """None before partition, when every rank has the whole model."""
        model = self._session.model
        return None if model is None else model.own_parameters

    def _parameters(self, what: str, given: list[torch.Tensor]) -> list[_Item]:
        if (own := self._own) is None:
            return [_Item(FOREIGN, tensor) for tensor in given]
        recording = _is_recording(self._session)
        find = own.finder(recording=recording)
        items = []
        for tensor in given:
            number = find(tensor)
            if number is None:
                items.append(_Item(FOREIGN, tensor))
            else:
                items.append(_Item(number, tensor if own.is_local(number) else None))
        if recording and any(item.number != FOREIGN for item in items):
            refuse_inside_step(self._session, what)
        return items

    def _tensors(self, what: str, given: list[torch.Tensor]) -> list[_Item]:
        """Gradients of the model by their parameters' numbers, parameters by higher ones."""
        if (own := self._own) is None:
            return [_Item(FOREIGN, tensor) for tensor in given]
        if _is_recording(self._session):
            # A norm of weights may be part of the model's forward, and is recorded.
            find_kept = own.gradients(recording=True)
            if any(find_kept(tensor) is not None for tensor in given):
                refuse_inside_step(self._session, what)
            return [_Item(FOREIGN, tensor) for tensor in given]
        find, find_parameter = own.gradients(), own.finder()
        items = []
        for tensor in given:
            number, parameter = find(tensor), find_parameter(tensor)
            if number is not None:
                items.append(_Item(number, tensor))
            elif parameter is not None:
                here = tensor if own.is_local(parameter) else None
                items.append(_Item(len(own.names) + parameter, here))
            else:
                items.append(_Item(FOREIGN, tensor))
        return items

    def _is_of_the_model(self, items: list[_Item]) -> bool:
        """Whether a call may be about the model, judged alike on all ranks.

        An empty list may be what is left of it on this rank, and so may a list of tensors that are in one
        optimizer with it.
        """
        if self._own is None:
            return False
        if not items or any(item.number != FOREIGN for item in items):
            return True
        optimizer = self._session.optimizer
        if optimizer is None or not any(name for names in optimizer.names_in_groups for name in names):
            return False
        beside = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(tensor) for p in beside for tensor in (p, p.grad)}
        return any(id(item.tensor) in known for item in items)

    def _is_shared(self) -> bool:
        """Whether other processes hold parts of the model."""
        return self._session.world is not None and self._session.num_stages > 1

    def _is_collective(self, items: list[_Item]) -> bool:
        if not self._is_shared() or not self._is_of_the_model(items):
            return False
        if self._session.step is None:
            return True
        # A hook that runs where a gradient arises: the other ranks do not call.
        if any(item.tensor is None for item in items):
            raise SMPError(
                "a norm over several stages was asked for while a step runs (in a hook?), when the other "
                "ranks cannot take part: ask for it after the step"
            )
        return False

    # Over the group -----------------------------------------------------------------------------------------

    def _total(
        self,
        call: _Call,
        items: list[_Item],
        counted: list[torch.Tensor | None],
        error_if_nonfinite: bool,
    ) -> tuple[torch.Tensor, bool]:
        """The norm of what counts on all ranks, and whether all of them were given nothing."""
        session, own = self._session, self._own
        assert own is not None and session.world is not None
        failure: Exception | None = None
        part = None
        try:
            part = self._part(call, items, counted)
        except Exception as error:  # raised when the others have heard of it
            failure = error
        said = (call.arguments, part, None if failure is None else str(failure))
        heard = session.world.exchange(said, "MP", call.what)
        if failure is not None:
            raise failure
        ranks = session.group("MP")
        for rank, (arguments, _, error) in zip(ranks, heard, strict=True):
            if error is not None:
                raise SMPError(f"{call.what} failed on rank {rank}: {error}")
            call.compare(arguments, rank, session.rank)

        def describe(member: int, numbers: Sequence[int]) -> str:
            names = [own.names[number % len(own.names)] for number in numbers]
            more = ", ..." if len(names) > 3 else ""
            return f"rank {ranks[member]} gave {', '.join(map(repr, names[:3]))}{more}"

        parts = [heard_part for _, heard_part, _ in heard]
        norms = as_in_one_process(call.what, parts, self._orders(), describe)
        total = _norm_of(norms, call.arguments["norm_type"], session.device)
        if error_if_nonfinite and not torch.isfinite(total):
            # torch's own words (torch.nn.utils.get_total_norm).
            raise RuntimeError(
                f"The total norm of order {call.arguments['norm_type']} for gradients from "
                "`parameters` is non-finite, so it cannot be clipped. To disable "
                "this error and scale the gradients by the non-finite norm anyway, "
                "set `error_if_nonfinite=False`"
            )
        return total, not any(part.named for part in parts)

    def _part(self, call: _Call, items: list[_Item], counted: list[torch.Tensor | None]) -> Part:
        own = self._own
        assert own is not None
        positions = [i for i, tensor in enumerate(counted) if tensor is not None]
        tensors = [tensor for tensor in counted if tensor is not None]
        norms = dict(zip(positions, _norms(tensors, call.arguments["norm_type"], call.foreach), strict=True))
        mine = {items[i].number for i in positions} - {FOREIGN}
        here = own.with_gradient()
        weights = {len(own.names) + number for number in own.local}
        groups = {i: members & here for i, members in enumerate(self._groups())}
        chosen = frozenset(i for i, members in groups.items() if members and members <= mine)
        covered = frozenset().union(*(groups[i] for i in chosen))
        return Part(
            named=tuple(item.number for item in items),
            norms=norms,
            is_single=call.is_single,
            is_whole=mine in (here, weights),
            groups=chosen if covered == mine else frozenset(),
            populated=frozenset(i for i, members in groups.items() if members),
        )

    def _groups(self) -> list[frozenset[int]]:
        """Numbers of the parameters in each of the optimizer's groups."""
        return [frozenset(numbers) for numbers in self._numbers_in_groups()]

    def _numbers_in_groups(self) -> list[list[int]]:
        own, optimizer = self._own, self._session.optimizer
        if own is None or optimizer is None:
            return []
        return [
            [own.number(name) for name in names if name is not None] for names in optimizer.names_in_groups
        ]

    def _orders(self) -> list[Sequence[int]]:
        own = self._own
        assert own is not None
        by_optimizer = [number for numbers in self._numbers_in_groups() for number in numbers]
        return [range(2 * len(own.names)), *([by_optimizer] if by_optimizer else [])]


@dataclass(frozen=True)
class _Call:
    """What a function was asked for.

    Attributes:
        what: its name.
        arguments: that must be the same on all ranks.
        is_single: it was given one tensor.
        foreach: as given.
    """

    what: str
    arguments: dict[str, float]
    is_single: bool
    foreach: bool | None

    def compare(self, theirs: dict[str, float], their_rank: int, rank: int) -> None:
        """Raises SMPMismatch where another rank asked for something else."""
        for name, mine in self.arguments.items():
            if repr(theirs[name]) != repr(mine):
                raise SMPMismatch(
                    f"{self.what}: {name} is {theirs[name]} on rank {their_rank} and {mine} on rank {rank}: "
                    "it must be the same on all ranks of the mp group"
                )


def _listed(given: Tensors) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


def _warn_of_empty_generator() -> None:
    warnings.warn(
        "`parameters` is an empty generator, no gradient clipping will occur.",
        stacklevel=4,  # the caller of torch's function
    )


def _norms(tensors: list[torch.Tensor], norm_type: float, foreach: bool | None) -> list[Norm]:
    """Of each tensor, by the function that torch would use (torch.nn.utils.get_total_norm)."""
    found: dict[int, torch.Tensor] = {}
    if not tensors:
        return []
    grouped = _group_tensors_by_device_and_dtype([tensors], with_indices=True)  # type: ignore[list-item]
    for (device, _), ([group], indices) in grouped.items():
        if (foreach is None and _has_foreach_support(group, device)) or (  # type: ignore[arg-type]
            foreach and _device_has_foreach_support(device)
        ):
            norms = torch._foreach_norm(group, norm_type)  # type: ignore[arg-type]
        elif foreach:
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
            )
        else:
            norms = tuple(torch.linalg.vector_norm(tensor, norm_type) for tensor in group)
        found.update(zip(indices, norms, strict=True))
    ordered = [found[i] for i in range(len(tensors))]
    # Stacking goes to the widest dtype and from there to Python's doubles: both keep every bit.
    values = torch.stack(ordered).tolist()
    return [Norm(v, t.dtype, n.dtype) for v, t, n in zip(values, tensors, ordered, strict=True)]


def _norm_of(norms: Sequence[Norm], norm_type: float, device: torch.device) -> torch.Tensor:
    """Of the norms, stacked as torch would stack them: grouped by the dtype of the tensors."""
    if not norms:
        return torch.tensor(0.0)
    if len({norm.kind for norm in norms}) > 1:
        # The order of the groups is that of a hash table of torch's, so torch is asked.
        empty = {norm.kind: torch.empty(0, dtype=norm.kind, device=device) for norm in norms}
        stand_ins = [empty[norm.kind] for norm in norms]
        grouped = _group_tensors_by_device_and_dtype([stand_ins], with_indices=True)  # type: ignore[list-item]
        norms = [norms[i] for _, indices in grouped.values() for i in indices]
    dtype = functools.reduce(torch.promote_types, [norm.dtype for norm in norms])
    stacked = torch.tensor([norm.value for norm in norms], dtype=dtype, device=device)
    return torch.linalg.vector_norm(stacked, norm_type)
