"""Launches that gloo trains and devices refuse: without the cure their dry run refuses them too."""

import os
from unittest import mock

import pytest

from mindspeed_megatron.backend_contracts import BackendRefusal
from mindspeed_testing import run_world
from mindspeed_testing.dry_run import MeasureRequest, measure_rank
from mindspeed_testing.lagging.planting import PlantedFault, planted
from mindspeed_testing.model_flags import training_flags

LATENT = (
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *("--v-head-dim", "12", "--position-embedding-type", "rope", "--num-layers", "1"),
    *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--global-batch-size", "1"),
)
WITH_GAPS = PlantedFault(
    "mindspeed_megatron.latent_attention", "return rows.contiguous(), *others", "return rows, *others"
)


def plan():
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0"):
        return measure_rank(MeasureRequest(training_flags(LATENT, 3), "fake-cuda"))


def without_and_with_the_cure():
    gathers = [call for call in plan().calls if call.operation == "all_gather_into_tensor"]
    try:
        with planted(WITH_GAPS):
            plan()
    except BackendRefusal as refusal:
        return len(gathers), str(refusal)
    return len(gathers), ""


@pytest.mark.thorough
def test_latent_attention_gathers_no_rows_with_gaps():
    gathers, refusal = run_world(without_and_with_the_cure, 1)[0]

    assert gathers
    assert "nccl refuses all_gather_into_tensor" in refusal
    assert "not contiguous" in refusal
