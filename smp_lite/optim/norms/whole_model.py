"""Norms of gradients mean the whole model: torch's own functions, made right while a session is open.

``clip_grad_norm_``, ``get_total_norm`` and ``clip_grads_with_norm_`` of ``torch.nn.utils`` see one process
only: on each rank they would find the norm of that rank's stage, and clip every stage by another factor. They
are used under many names, imported into scripts and other libraries before and after this one. All those
names are one object, which calls an inner function that it holds in a closure cell; that inner function is
what is replaced, from ``smp.init`` until ``smp.reset``. Nothing changes for tensors that have nothing to do
with the model, nor before partition.

A call that involves the model is collective over the mp group: each rank computes the norms of the tensors
that live there, as torch would; :mod:`.parts` puts them in the order of one process; each rank then
takes the norm of the norms, as torch would. A roll call carries them, so a rank that does not call is named;
it costs some tenths of a millisecond a step.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import SMPError
from ...nn.layout import layout_of
from ..state.own_parameters import OwnParameters, are_gradients
from .exchange import Call, Item, layout_of_item, total_norm
from .parts import FOREIGN

if TYPE_CHECKING:
    from ...session import Session

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
            "gradients would be wrong: use torch 2.8 to 2.13"
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
        here = [item.tensor for item in items if item.tensor is not None]
        is_empty = not given
        if self._is_collective(items):
            counted = [None if item.tensor is None else self._gradient(item.tensor) for item in items]
            arguments = {"norm_type": float(norm_type), "max_norm": float(max_norm)}
            call = Call("clip_grad_norm_", arguments, isinstance(parameters, torch.Tensor), foreach)
            total, is_empty = total_norm(self._session, call, items, counted, error_if_nonfinite)
        else:
            # Not torch's whole function, which would come back here for its parts.
            gradients = [g for tensor in here if (g := self._gradient(tensor)) is not None]
            total = self._torch.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
        if is_empty and isinstance(parameters, types.GeneratorType):
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.",
                stacklevel=3,  # the caller of torch's function
            )
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
        call = Call("get_total_norm", {"norm_type": float(norm_type)}, is_single, foreach)
        return total_norm(self._session, call, items, [item.tensor for item in items], error_if_nonfinite)[0]

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

    def _parameters(self, what: str, given: list[torch.Tensor]) -> list[Item]:
        if (own := self._own) is None:
            return [Item(FOREIGN, tensor) for tensor in given]
        recording = _is_recording(self._session)
        find = own.finder()
        items = []
        for tensor in given:
            number = find(tensor)
            if number is None:
                items.append(Item(FOREIGN, tensor))
            else:
                if not recording and own.is_local(number) and not own.is_stand_in(tensor):
                    self._refuse_scaled(what, tensor)
                items.append(Item(number, tensor if own.is_local(number) else None))
        if recording and any(item.number != FOREIGN for item in items):
            refuse_inside_step(self._session, what)
        return items

    def _tensors(self, what: str, given: list[torch.Tensor]) -> list[Item]:
        """Gradients of the model by their parameters' numbers, parameters by higher ones."""
        if (own := self._own) is None:
            return [Item(FOREIGN, tensor) for tensor in given]
        if _is_recording(self._session):
            # A norm of weights may be part of the model's forward, and is recorded.
            find_kept = own.gradients()
            if any(find_kept(tensor) is not None for tensor in given):
                refuse_inside_step(self._session, what)
            return [Item(FOREIGN, tensor) for tensor in given]
        find, find_parameter = own.gradients(), own.finder()
        items = []
        for tensor in given:
            number, parameter = find(tensor), find_parameter(tensor)
            if number is not None:
                self._refuse_scaled(what, None)
                items.append(Item(number, tensor if own.is_local(number) else None))
            elif parameter is not None:
                here = tensor if own.is_local(parameter) else None
                items.append(Item(len(own.names) + parameter, here))
            else:
                items.append(Item(FOREIGN, tensor))
        self._refuse_copies(what, own, items)
        return items

    def _refuse_copies(self, what: str, own: OwnParameters, items: list[Item]) -> None:
        """Raises SMPError for what a script has made of gradients, which nobody can tell from other tensors
        but by their shapes: its norm would be that of what is here.

        They have the shapes of all gradients of this rank, or stand beside some of these.
        """
        beside = {id(t) for t in self._beside()}
        others = [item.tensor for item in items if item.number == FOREIGN]
        given = [t for t in others if t is not None and type(t) is not nn.Parameter and id(t) not in beside]
        shapes = _shapes(given)
        if not shapes or not self._is_shared() or self._session.step is not None:
            return
        local = [own.parameter(number) for number in own.local]
        if any(item.number != FOREIGN and item.number < len(own.names) for item in items):
            if shapes - _shapes(local):
                return
        elif shapes not in (
            _shapes(p for p in local if p.requires_grad),
            _shapes(p for p in local if p.grad is not None),
        ):
            return
        in_parts = {tuple(p.shape) for p in local if (layout := layout_of(p)) is not None and layout.axes}
        if self._session.num_stages == 1 and in_parts.isdisjoint(shapes):
            return
        if not are_gradients(given):  # of another model, which may be built like this one
            raise SMPError(
                f"{what}: tensors of the shapes of the model's parameters, which are not their gradients "
                "(p.grad) but made of them (divided, copied, converted), or something that only has their "
                "shapes: this rank has a part of the model, and the norm of what is made of gradients would "
                "be that of the part. Give the gradients themselves, as in "
                "smp.clip_grad_norm_(model.parameters(), math.inf), and divide the norm instead"
            )

    def _beside(self) -> list[torch.Tensor]:
        """Parameters that are in one optimizer with the model's, and their gradients."""
        groups = [group for each in self._session.optimizers for group in each.param_groups]
        found = [tensor for g in groups for p in g["params"] for tensor in (p, p.grad)]
        return [tensor for tensor in found if tensor is not None]

    def _refuse_scaled(self, what: str, parameter: torch.Tensor | None) -> None:
        """Raises SMPError where it is about gradients of fp16; of a parameter, if it has one."""
        if self._session.cfg.fp16 and (parameter is None or parameter.grad is not None):
            raise SMPError(
                f"{what} of the model's gradients in fp16, which are multiplied by the loss scale: call "
                "optimizer.clip_master_grads(max_norm), which clips what the optimizer steps with and "
                "returns its norm (max_norm=math.inf clips nothing)"
            )

    def _gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A parameter's; of a master that is cut over replicas the whole one."""
        own = self._own
        if own is not None and own.is_stand_in(tensor):
            owner = next(each for each in self._session.optimizers if each.steps_in_place(tensor))
            found: torch.Tensor | None = owner.whole_gradient_of(tensor)
            return found
        return tensor.grad

    def _is_of_the_model(self, items: list[Item]) -> bool:
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
        return self._session.world is not None and self._session.replica_size > 1

    def _is_collective(self, items: list[Item]) -> bool:
        if not self._is_shared() or not self._is_of_the_model(items):
            return False
        if self._session.step is None:
            return True
        # A hook that runs where a gradient arises: the other ranks do not call.
        if any(item.tensor is None or layout_of_item(self._own, item) is not None for item in items):
            raise SMPError(
                "a norm over several ranks was asked for while a step runs (in a hook?), when the other "
                "ranks cannot take part: ask for it after the step"
            )
        return False


def _listed(given: Tensors) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


def _shapes(tensors: Iterable[torch.Tensor]) -> Counter[tuple[int, ...]]:
    """How often each is there; numbers alone tell nothing."""
    return Counter(tuple(tensor.shape) for tensor in tensors if tensor.dim())
