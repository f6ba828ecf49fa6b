"""Before it is cut, the model is the same on all ranks of an mp group: the first one's, if they differ.

Each stage keeps what its rank has built. Where only one rank has loaded weights (``if smp.rank() == 0:
model.load_state_dict(...)``, which suits data parallelism, where they are sent to all), or where each has
seeded otherwise, the stages would be those of several models. As replicas do (Li et al. 2020, "PyTorch
Distributed", section 3.1), they begin with those of the first. What has no memory yet (delayed
initialization) nobody can send: each stage makes its own, so all must be about to make the same.

Where several ranks share a stage they meet twice: before layers are split, and, as all others, before the
model is cut over stages. A part of a tensor nobody can take over from a rank that has another part. Of what
was split before they meet (layers made by hand, ``smp.parallelize``) the layers have noted what they were cut
from (:mod:`smp_lite.nn.keeping`), and that must have been the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ...comm.layout import arrival, as_bytes, departure
from ...comm.waiting import wait_until
from ...deferred import is_deferred, origin_of
from ...errors import SMPMismatch
from ...nn.guarding import plain
from ...nn.keeping import Beginning, KeepsLayouts
from ...nn.layout import is_part
from ...record.parameters.away import is_away
from ...record.values.memory import digest_of
from ...record.values.placed import TensorMeta

if TYPE_CHECKING:
    from ...session import Session

__all__ = ["compare_parts", "share_stages", "take_over_first"]

_WHAT = "the weights that ranks have built"
Said: TypeAlias = tuple[tuple[int, ...], str, tuple[int, ...], int]
"""Of a tensor: shape, type, strides and a digest of the numbers, in their places."""


class _Built(NamedTuple):
    """What a rank says of its model, by names.

    Attributes:
        tensors: that have memory, and lie on no rank in part.
        origins: of what is made later, what it will be made from.
        parts: of what is split already, what it was cut from.
        of_stage: what may differ between the ranks of a stage.
    """

    tensors: dict[str, Said]
    origins: dict[str, int]
    parts: dict[str, Beginning]
    of_stage: frozenset[str]


def share_stages(session: Session) -> bool:
    """Whether several ranks have parts of one stage's tensors."""
    topology = session.topology
    return math.prod(map(topology.axis_size, topology.stage_axes)) > 1


def take_over_first(session: Session, module: nn.Module) -> None:
    """Collective over the mp group.

    Raises:
        SMPMismatch: a parameter or buffer has another shape or type on another rank; or numbers that nobody
            can send are other ones there: parts of another tensor, or what is made later.
    """
    world = session.world
    kind = "MP" if share_stages(session) else "PP"  # without such ranks they are the same
    ranks = session.group(kind)
    if world is None or len(ranks) == 1:
        return
    own = _whole_tensors(module)
    of_stage = _of_stage(module) if kind == "MP" else frozenset[str]()
    mine = {name: _said(tensor) for name, tensor in own.items()}
    built = _Built(mine, _origins(module), _parts(module), of_stage)
    heard: dict[int, _Built] = dict(zip(ranks, world.exchange(built, kind, _WHAT), strict=True))
    of_stage = heard[ranks[0]].of_stage
    _check_parts(heard, session)
    everywhere = {rank: _of(theirs, lambda name: name not in of_stage) for rank, theirs in heard.items()}
    _take_over(session, kind, own, everywhere)
    if of_stage:
        at_place = {rank: _of(heard[rank], of_stage.__contains__) for rank in session.group("PP")}
        _take_over(session, "PP", own, at_place)


def compare_parts(session: Session, module: nn.Module) -> None:
    """What was written into parts since the model was cut; collective over the ranks of a stage.

    Raises:
        SMPMismatch: other parts were changed than on another rank, or filled with its numbers.
    """
    world, ranks = session.world, session.group("MP")
    if world is not None and share_stages(session):
        heard = world.exchange(_parts(module), "MP", "what was written into parts of split layers")
        built = {rank: _Built({}, {}, parts, frozenset()) for rank, parts in zip(ranks, heard, strict=True)}
        _check_parts(built, session)


def _take_over(
    session: Session, kind: str, own: Mapping[str, torch.Tensor], built: Mapping[int, _Built]
) -> None:
    """Collective over the group: its first rank's numbers are everybody's.

    Args:
        own: tensors of this rank.
        built: what each of the group's ranks says, in order.
    """
    world, ranks = session.world, list(built)
    assert world is not None
    _check_origins(built)
    heard = [theirs.tensors for theirs in built.values()]
    first = heard[0]
    names = [name for name in first if all(name in theirs for theirs in heard)]
    for name in names:
        for rank, theirs in zip(ranks, heard, strict=True):
            if theirs[name][:2] != first[name][:2]:
                forms = [f"{dtype}{list(shape)}" for shape, dtype, *_ in (theirs[name], first[name])]
                raise SMPMismatch(
                    f"{name!r} is {forms[0]} on rank {rank} and {forms[1]} on rank {ranks[0]}: build the "
                    "same model on all ranks"
                )
    differing = [name for name in names if any(theirs[name] != first[name] for theirs in heard)]
    if not differing:
        return
    collectives = world.collectives(kind)
    is_first = world.group_rank(kind) == 0
    for name in differing:
        tensor = plain(own[name])
        if 0 in tensor.stride():
            raise SMPMismatch(
                f"{name!r} has other numbers on the ranks {ranks}, and several of its elements are one "
                "in memory (expand), so the first rank's cannot be taken: build the same on all ranks"
            )
        meta = TensorMeta.of(tensor)._replace(stride=first[name][2], requires_grad=False)
        row = departure(tensor, meta) if is_first else arrival(meta)
        pending = collectives.broadcast(as_bytes(row), 0)
        wait_until(pending.done, lambda: f"not all ranks of the {kind.lower()} group {ranks} came to {_WHAT}")
        if not is_first:
            with torch.no_grad():
                tensor.copy_(row)
    if is_first:
        warnings.warn(
            f"the ranks {ranks} have built models with other numbers in {len(differing)} parameters "
            f"and buffers ({differing[0]!r} is the first): those of rank {ranks[0]} are taken, as in data "
            f"parallelism. Seed ranks alike, or {_by_replica(session)}, and load weights on all of them",
            stacklevel=3,
        )


def _of(built: _Built, wanted: Callable[[str], bool]) -> _Built:
    """What it says of the names that are wanted."""
    tensors = {name: said for name, said in built.tensors.items() if wanted(name)}
    origins = {name: origin for name, origin in built.origins.items() if wanted(name)}
    return built._replace(tensors=tensors, origins=origins)


def _origins(module: nn.Module) -> dict[str, int]:
    """Of what is made later, what it will be made from."""
    named = (*module.named_parameters(), *module.named_buffers())
    known: dict[Any, Any] = {}
    return {name: origin_of(tensor.smp_place, known) for name, tensor in named if is_deferred(tensor)}  # type: ignore[attr-defined]


def _check_origins(built: Mapping[int, _Built]) -> None:
    first, *_ = built
    for rank, theirs in built.items():
        for name, origin in theirs.origins.items():
            if built[first].origins.get(name, origin) != origin:
                raise SMPMismatch(
                    f"the parameter {name!r}, whose initialization is delayed, would begin with other "
                    f"numbers on rank {rank} than on rank {first}, and each stage makes its own: seed "
                    "these ranks alike before the model is built (by smp.rdp_rank(), never by rank)"
                )


def _parts(module: nn.Module) -> dict[str, Beginning]:
    """Of what is split already, what it was cut from."""
    return {
        f"{prefix}.{name}" if prefix else name: beginning
        for prefix, part in module.named_modules()
        if isinstance(part, KeepsLayouts)
        for name, beginning in part.beginnings().items()
    }


def _check_parts(built: Mapping[int, _Built], session: Session) -> None:
    first, *others = built
    for name, beginning in built[first].parts.items():
        _check_drawn(
            name, {rank: theirs.parts[name] for rank, theirs in built.items() if name in theirs.parts}
        )
        digest, changed, *_ = beginning
        for rank in others:
            its_digest, its_changed, *_ = built[rank].parts.get(name, beginning)
            if its_digest != digest:
                raise SMPMismatch(
                    f"{name!r} was split before smp.DistributedModel, and rank {rank} has cut its part from "
                    f"other numbers than rank {first}, so they would train parts of different models. Seed "
                    f"all ranks of an mp group alike before its layer is made ({_by_replica(session)}, never "
                    "by rank), draw as many random numbers on each, and load weights on all of them. Layers "
                    "that smp.DistributedModel splits itself (smp.tensor_parallelism, "
                    "smp.set_tensor_parallelism) begin with the first rank's"
                )
            if its_changed != changed:
                where, not_where = (rank, first) if its_changed else (first, rank)
                raise SMPMismatch(
                    f"{name!r} is split over ranks, and its numbers were changed (loaded, or written in "
                    f"place) since, on rank {where} and not on rank {not_where}, so they would train parts "
                    "of different models: do that on all ranks, or before the layer is split"
                )


def _check_drawn(name: str, parts: Mapping[int, Beginning]) -> None:
    """Ranks that draw alike, with seeds alike, give all parts the numbers that one of them would have."""
    seen: dict[int, tuple[int, Beginning]] = {}
    for rank, part in parts.items():
        if part.numbers is None:
            continue
        other, its = seen.setdefault(part.numbers, (rank, part))
        if its.place != part.place:
            raise SMPMismatch(
                f"{name!r} is split over ranks, and was given the same numbers on rank {other} and on rank "
                f"{rank} since, which have other parts of it: it was drawn (nn.init, normal_) as if each "
                "part were all. Initialise before smp.DistributedModel, or load a state dict"
            )


def _by_replica(session: Session) -> str:
    """How replicas may be told apart where ranks are seeded."""
    return "by smp.rdp_rank()" if share_stages(session) else "by smp.dp_rank()"


def _said(tensor: torch.Tensor) -> Said:
    found = plain(tensor)
    kind = str(found.dtype).removeprefix("torch.")
    return tuple(found.shape), kind, tuple(found.stride()), digest_of(found.cpu())


def _whole_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that have memory here and lie on no rank in part."""
    return {
        name: tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not nn.parameter.is_lazy(tensor)
        and not is_deferred(tensor)
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_away(tensor)
        and not is_part(tensor)
    }


def _of_stage(module: nn.Module) -> frozenset[str]:
    """What may differ between the ranks of a stage: parts, and where layers are split also buffers of modules
    that are not torch's own, which may be about this rank's part."""
    parts = {name for name, parameter in module.named_parameters() if is_part(parameter)}
    if not any(isinstance(part, KeepsLayouts) for part in module.modules()):
        return frozenset(parts)
    buffers = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if not type(part).__module__.startswith("torch.nn.")
        for name in part._buffers
    }
    return frozenset(parts | buffers)
