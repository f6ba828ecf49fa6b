"""Parameters lie over replicas, in pieces and as masters as they do in one process.

Kernels are chosen by how a parameter lies, and a norm goes along its memory: for other strides both give
other last bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_distributed

OWN = "tests.transparency.training.parameter_strides"
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0}
NONE_WHOLE = {**SHARDED, "sdp_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({}, {}),
        ({}, {"gradient_as_bucket_view": True}),
        ({"shard_optimizer_state": True}, {}),
        (SHARDED, {}),
        (NONE_WHOLE, {}),
        ({"bf16": True}, {}),
    ],
    ids=["replicas", "views", "optimizer's state", "small", "pieces", "masters"],
)
def test_parameters_lie_as_in_one_process(parameters: dict[str, Any], options: dict[str, Any]) -> None:
    for found in run_distributed(f"{OWN}:train", 2, kwargs={"parameters": parameters, "options": options}):
        ours, theirs = found["ours"], found["theirs"]
        assert ours["strides"] == theirs["strides"]
        assert set(ours["seen"]) == set(theirs["seen"])
        if "bf16" in parameters:
            expected = {name: theirs["strides"][name] for name in ours["masters"]}
            assert len(expected) == 4
            assert ours["masters"] == expected
            continue
        assert ours["gradients"] == {name: theirs["strides"][name] for name in ("wide.weight", "turned")}
        assert ours["losses"] == theirs["losses"]
        assert ours["norms"] == (
            theirs["norms"] if parameters is not NONE_WHOLE else pytest.approx(theirs["norms"], rel=1e-6)
        )
        if parameters is not NONE_WHOLE:
            torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)


def test_no_slice_of_a_whole_one_that_is_no_row() -> None:
    for error in run_distributed(f"{OWN}:slice_of_small", 2, kwargs={"parameters": SHARDED}):
        assert "ds_tensor.norm: this parameter is small and stays whole" in error
