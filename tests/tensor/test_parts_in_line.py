"""Modules called one after another: what stands behind a layer that gives parts of features."""

from __future__ import annotations

import pytest
from torch import nn

from smp_lite.comm.groups.axis import Axis
from smp_lite.errors import SMPError
from smp_lite.nn.one_d import ColumnParallelLinear, FeatureParallelDropout, RowParallelLinear
from smp_lite.tensor_parallel.parts_in_line import refuse_mixing_features

TWO = Axis("tp", range(2), 1)


def line(*between: nn.Module, gather: bool = False) -> nn.Sequential:
    column = ColumnParallelLinear(4, 8, axis=TWO, gather_output=gather)
    row = RowParallelLinear(8, 4, axis=TWO, input_is_parallel=not gather)
    return nn.Sequential(column, *between, row, nn.Softmax(-1))


@pytest.mark.parametrize(
    "part",
    [
        nn.Softmax(-1),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.Sequential(nn.Tanh(), nn.Softmax(-1)),
        nn.Flatten(),
        nn.PReLU(),
        nn.Linear(4, 4),
    ],
)
def test_what_looks_across_features_is_refused(part: nn.Module) -> None:
    with pytest.raises(SMPError, match=r"behind 0, which gives each rank its part.*gather_output=True"):
        refuse_mixing_features(line(nn.Tanh(), part))
    refuse_mixing_features(line(nn.Tanh(), part, gather=True))


def test_dropout_of_parts_is_refused() -> None:
    with pytest.raises(SMPError, match=r"1 is torch's Dropout behind 0.*FeatureParallelDropout"):
        refuse_mixing_features(line(nn.Dropout(0.5)))
    refuse_mixing_features(line(nn.Dropout(0.0)))


def test_what_takes_each_feature_by_itself_is_not() -> None:
    refuse_mixing_features(line(nn.GELU(), nn.Identity(), FeatureParallelDropout(0.5, axis=TWO)))
    refuse_mixing_features(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)))


def test_names_are_full() -> None:
    with pytest.raises(SMPError, match=r"net\.1 is a Softmax behind net\.0"):
        refuse_mixing_features(nn.ModuleDict({"net": line(nn.Softmax(-1))}))
