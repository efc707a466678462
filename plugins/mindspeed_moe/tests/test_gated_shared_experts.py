"""The gate of shared experts reads the input of the layer beside the two halves, and learns the same."""

import pytest

from mindspeed_moe.features.proofs import EP2, MODEL, OVERLAP, SHARED


@pytest.mark.thorough
def test_gated_shared_experts_learn_as_without_the_overlap(mindspeed_equivalence):
    model = (*MODEL, *SHARED, *EP2, "--moe-shared-expert-gate")
    mindspeed_equivalence((*model, *OVERLAP), model, world_size=2, tolerance=0.0)
