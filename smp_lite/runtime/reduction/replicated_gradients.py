"""Whether what the ranks of a stage hold alike gets the same gradient on all of them.

A parameter that is not split is the same on all ranks of its stage, and stays so only if its gradient is.
That is so where every split layer adds up, in its backward, what its ranks have of their common input's
gradient. A layer that is used in another way than it is made for (a column-parallel one whose output is not
used as one rank's features, a value from which each rank takes its own part) leaves the ranks different
gradients, and training would go on with models that drift apart. So the first steps, and then one now and
then, are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...comm.groups.stage_peers import StagePeers
from ...devices import CPU
from ...errors import SMPMismatch
from ...nn.guarding import plain
from ...nn.layout import layout_of

__all__ = ["check_replicated_gradients", "check_results"]

_TOLERANCE = 1e-4
"""Relative; kernels may add in another order in every run."""


def check_replicated_gradients(parameters: Mapping[str, nn.Parameter], peers: StagePeers) -> None:
    """Compares the norms of gradients between ranks of the stage with the same batch; collective over them.

    Args:
        parameters: of the stage by name; the same on all its ranks.
        peers: which get the same batch.

    Raises:
        SMPMismatch: they differ; on all ranks of the stage.
    """
    named = [(name, p) for name, p in parameters.items() if p.requires_grad and _is_replicated(p, peers)]
    if not named:
        return
    norms = [0.0 if p.grad is None else float(plain(p.grad).norm(dtype=torch.float64)) for _, p in named]
    mine = torch.tensor(norms, dtype=torch.float64, device=CPU)
    theirs = peers.sharing.all_gather(mine.unsqueeze(0))
    low, high = theirs.amin(0), theirs.amax(0)
    differs = (high - low) > _TOLERANCE * high
    if bool(differs.any()):
        worst = int(torch.where(differs, (high - low) / high, 0.0).argmax())
        found = ", ".join(f"{norm:.4g}" for norm in theirs[:, worst].tolist())
        raise SMPMismatch(
            f"the gradient of {named[worst][0]!r} has the norms {found} on the ranks that share its stage, "
            "and must be the same on all, since the parameter is not split: a layer that is split over ranks "
            "does not get its input, or hand on its output, as it is made for (look at the modules between "
            "this parameter and the next split one), or gradients or parameters were changed by hand with a "
            "number made of the part that is here (a norm of gradients counts only the pieces of split "
            "parameters that this rank holds: use torch.nn.utils.clip_grad_norm_)"
        )


def check_results(results: Sequence[torch.Tensor], losses: Sequence[torch.Tensor], peers: StagePeers) -> None:
    """Compares numbers that a step function returns, and losses, between those ranks; collective over them.

    A sum over parameters, such as a penalty on their size, has each rank's part of the split ones only. The
    mean of the losses of parts would give gradients that are too large by the number of ranks.

    Args:
        results: of the step, the same ones on all ranks; only tensors of one number count.
        losses: single numbers that ``model.backward()`` was given on this stage.
        peers: which get the same batch.

    Raises:
        SMPMismatch: they differ; on all ranks.
    """
    returned, given = _numbers(results), _numbers(losses)
    numbers = [*returned, *given]
    if not numbers:
        return
    mine = torch.tensor(numbers, dtype=torch.float64, device=CPU)
    theirs = peers.sharing.all_gather(mine.unsqueeze(0))
    close = torch.isclose(theirs, theirs[:1], rtol=_TOLERANCE, atol=0.0, equal_nan=True).all(0)
    if not bool(close.all()):
        worst = int((~close).nonzero()[0])
        found = ", ".join(f"{number:.6g}" for number in theirs[:, worst].tolist())
        if worst >= len(returned):
            raise SMPMismatch(
                f"a loss that model.backward() was given is {found} on the ranks that share a stage, and "
                "must be the same on all: it was made from one rank's part of something split. Take the "
                "loss of whole outputs (gather_output), or one that adds up over the ranks "
                "(vocab_parallel_cross_entropy, cross_entropy_2d, cross_entropy_3d, cross_entropy_sequence), "
                "or put summands of your own together: smp_lite.nn.one_d.sum_over_ranks(summand, axis)"
            )
        raise SMPMismatch(
            f"a number that the step function returns is {found} on the ranks that share a stage, and must "
            "be the same on all: it was made from one rank's part of something split. A sum over parameters "
            "(a penalty on their size) counts only the part that is here: use the optimizer's weight_decay"
        )


def _numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    return [float(each.detach()) for each in tensors if each.numel() == 1 and not each.is_complex()]


def _is_replicated(parameter: nn.Parameter, peers: StagePeers) -> bool:
    """Whether all ranks of the stage hold it alike, and nobody adds up gradients afterwards."""
    layout = layout_of(parameter)
    return layout is None or not (layout.partial_over or any(layout.dims))
