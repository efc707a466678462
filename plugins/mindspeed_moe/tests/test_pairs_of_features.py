"""Features that users switch on together train as the model without them, or are refused by name."""

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.feature import Scenario
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_moe.features import (
    AllToAllOverlap,
    AttentionExpertsPipeline,
    BalancedExperts,
    CommunicationPlan,
    ExpertPlacement,
    ForwardBackwardOverlap,
    FusedProducts,
)
from mindspeed_moe.features.proofs import EP2, MODEL, OVERLAP, SHARED
from mindspeed_testing.verify import verify

INSTALLED = Registry.discover()
MOVING = ("--enable-expert-placement", "--expert-placement-freq", "1")
COPIED = ("--balanced-moe-experts", "--balanced-moe-hot-expert-num", "1", "--trans-hot-expert-group-num", "1")
ONCE = ("--moe-zerc",)
TURNS = ("--moe-fb-overlap",)
PIPELINED = ("--use-pipe-experts",)
SLICED = ("--ampipe-degree", "2")
INSIDE = ("--moe-alltoall-mc2",)
LEVEL0 = ("--moe-zero-memory", "level0")
CROWDED = ("--moe-adaptive-recompute-activation",)
CAPACITY = ("--moe-model-type", "deepspeed_moe", "--moe-train-capacity-factor", "2.0")
NO_DROP = ("--moe-model-type", "deepspeed_moe", "--moe-no-drop")
DEVICES = ("--moe-device-level-aux-loss-coeff", "0.1")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("feature", "flags", "both_sides"),
    [
        pytest.param(ExpertPlacement, (*MOVING, *PIPELINED), (), id="moving, pipelined"),
        pytest.param(ExpertPlacement, (*MOVING, *TURNS, *LEVEL0), (), id="moving, turns, level0"),
        pytest.param(ExpertPlacement, (*MOVING, *ONCE), (), id="moving, rows once"),
        pytest.param(ExpertPlacement, (*MOVING, "--moe-permute-fusion"), (), id="moving, fused permutation"),
        pytest.param(ExpertPlacement, MOVING, CAPACITY, id="moving, capacity"),
        pytest.param(ExpertPlacement, MOVING, DEVICES, id="moving, device losses"),
        pytest.param(CommunicationPlan, (*ONCE, *OVERLAP), ("--fix-router",), id="rows once, fixed routes"),
        pytest.param(CommunicationPlan, (*ONCE, *OVERLAP), DEVICES, id="rows once, device losses"),
        pytest.param(CommunicationPlan, ONCE, NO_DROP, id="rows once, DeepSpeed's gate"),
        pytest.param(BalancedExperts, COPIED, DEVICES, id="copied, device losses"),
        pytest.param(BalancedExperts, (*COPIED, *ONCE), (), id="copied, rows once"),
        pytest.param(BalancedExperts, COPIED, CAPACITY, id="copied, capacity"),
        pytest.param(ExpertPlacement, (*MOVING, *SLICED), (), id="moving, sliced"),
        pytest.param(ExpertPlacement, (*MOVING, *INSIDE), (), id="moving, exchanged inside products"),
        pytest.param(CommunicationPlan, (*ONCE, *SLICED), (), id="rows once, sliced"),
        pytest.param(AttentionExpertsPipeline, SLICED, DEVICES, id="sliced, device losses"),
        pytest.param(FusedProducts, INSIDE, DEVICES, id="exchanged inside products, device losses"),
        pytest.param(FusedProducts, INSIDE, NO_DROP, id="exchanged inside products, DeepSpeed's gate"),
        pytest.param(ForwardBackwardOverlap, TURNS, CAPACITY, id="turns, capacity"),
        pytest.param(AllToAllOverlap, OVERLAP, CAPACITY, id="overlapped, capacity"),
    ],
)
def test_two_features_train_as_without_them(feature, flags, both_sides):
    model = (*MODEL, *SHARED, *EP2, *both_sides)
    scenario = Scenario("pair", flags=(*model, *flags), baseline=model, world_size=2, tolerance=1e-6)
    verdict = verify(feature, scenario)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((*COPIED, *TURNS), "it computes experts in a way of its own"),
        ((*COPIED, *PIPELINED), "it computes experts in a way of its own"),
        ((*COPIED, *CROWDED), "it computes experts in a way of its own"),
        ((*COPIED, *LEVEL0), "it computes experts in a way of its own"),
        ((*ONCE, *TURNS), "passes take turns at one exchange in each direction, not at several"),
        ((*ONCE, *PIPELINED), "experts of a pipeline exchange their rows by themselves"),
        ((*ONCE, *CROWDED), "rows that travel once are not those that a rank computes"),
        ((*LEVEL0, *PIPELINED), "its experts keep the results of each part"),
        ((*CROWDED, *PIPELINED), "its experts keep the results of each part"),
        ((*CROWDED, *CAPACITY), "experts with a capacity get no more rows than it"),
    ],
)
def test_two_features_that_order_one_layer_are_refused(flags, reason):
    line = [*MODEL[2:], *SHARED, *EP2, *flags]
    with pytest.raises(PlanError) as error:
        plan_for(line, platform="cpu", host="standalone", registry=INSTALLED)
    assert reason in str(error.value)
