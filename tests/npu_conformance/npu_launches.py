"""Launches that HCCL would have ended in their first step: their dry runs refuse them without the cure."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed_megatron.backend_contracts import BackendRefusal
from mindspeed_testing.dry_run import MeasureRequest, measure_rank
from mindspeed_testing.lagging.planting import PlantedFault, planted
from mindspeed_testing.model_flags import training_flags

IN_FLOAT64 = PlantedFault(
    "mindspeed_train.optimizer",
    "facts = torch.tensor(local, dtype=torch.float32",
    "facts = torch.tensor(local, dtype=torch.float64",
)
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "tp2-pp2": ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
}


def plan(layout):
    """Plan two steps of the last rank on fake NPUs, update included."""
    size = 2 ** (len(LAYOUTS[layout]) // 2)
    try:
        with mock.patch.dict(os.environ, RANK=str(size - 1), WORLD_SIZE=str(size), LOCAL_RANK="0"):
            return measure_rank(MeasureRequest(training_flags(LAYOUTS[layout], 3), "fake-npu"))
    finally:
        # A launch that was refused in its step was not torn down.
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_that_agrees_in_float64_is_refused_with_its_line(layout):
    with planted(IN_FLOAT64), pytest.raises(BackendRefusal, match="all_reduce of float64") as refused:
        plan(layout)
    assert "hccl 910B" in str(refused.value)
    assert "optimizer.py" in str(refused.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_update_of_today_is_accepted(layout):
    sums = [call for call in plan(layout).calls if call.operation == "all_reduce"]
    assert sums
    assert {call.dtype for call in sums} <= {"float32", "bfloat16", "int32", "int64"}


def test_an_unknown_generation_is_held_to_rules_that_say_so():
    import torch

    named = mock.patch.object(torch.npu, "get_device_name", mock.Mock(return_value="Ascend1100X1"))
    with named, planted(IN_FLOAT64), pytest.raises(BackendRefusal, match="assumed for Ascend1100X1"):
        plan("tp2")
