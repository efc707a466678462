"""Features that need communication of experts take those that tensor parallelism spreads."""

from __future__ import annotations

import pytest

from mindspeed_core import Registry, check
from mindspeed_testing.model_flags import training_flags

MODEL = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-grouped-gemm", "--disable-bias-linear", "--tensor-model-parallel-size", "2"),
    "--sequence-parallel",
)
FEATURES = {
    "moe-expert-placement": ("--enable-expert-placement", "--expert-placement-freq", "1"),
    "moe-fb-overlap": ("--moe-fb-overlap",),
    "moe-pipe-experts": ("--use-pipe-experts",),
    "moe-balanced-experts": (
        *("--balanced-moe-experts", "--balanced-moe-hot-expert-num", "1"),
        *("--trans-hot-expert-group-num", "1"),
    ),
}
SPREAD = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")


@pytest.mark.parametrize("feature", FEATURES)
def test_experts_on_ranks_of_tensor_parallelism_communicate(feature):
    flags = training_flags((*MODEL, "--moe-tp-extend-ep", *FEATURES[feature]), 1)
    checked = check(flags, world_size=2, registry=Registry.discover())

    assert checked.ok, checked.problems
    assert feature in checked.plan


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param("moe-expert-placement", marks=pytest.mark.thorough),
        pytest.param("moe-fb-overlap", marks=pytest.mark.thorough),
        pytest.param("moe-pipe-experts", marks=pytest.mark.thorough),
        "moe-balanced-experts",
    ],
)
def test_they_train_as_on_ranks_of_expert_parallelism_without_the_feature(feature, mindspeed_equivalence):
    flags = (*MODEL, "--moe-tp-extend-ep", *FEATURES[feature])
    mindspeed_equivalence(flags, (*MODEL, *SPREAD), world_size=2, steps=2, tolerance=2e-5)


@pytest.mark.parametrize("feature", FEATURES)
def test_whole_experts_on_one_rank_are_refused_as_before(feature):
    flags = training_flags((*MODEL[:-3], "--moe-tp-extend-ep", *FEATURES[feature]), 1)

    assert "2 or more" in str(check(flags, registry=Registry.discover()).problems[0])
