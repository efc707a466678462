"""Mixtures of experts train the same on every layout, also where megatron-core alone would not."""

import pytest
import torch

from mindspeed_megatron.corrections import holds
from mindspeed_testing.training import train_side

THOROUGH = pytest.mark.thorough

MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear --swiglu "
    "--num-layers 2 --moe-aux-loss-coeff 0.01"
).split()
BIASED = "--num-experts 4 --moe-ffn-hidden-size 32 --num-layers 2".split()
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split()
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel".split()
ETP1 = ("--expert-tensor-parallel-size", "1")
PP2 = ("--pipeline-model-parallel-size", "2")
VPP2 = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


@pytest.mark.parametrize(
    ("options", "layout", "size"),
    [
        pytest.param("", "--expert-model-parallel-size 2", 2, id="allgather-ep2"),
        pytest.param("--moe-z-loss-coeff 0.001", " ".join(EP2), 2, id="alltoall-ep2-z-loss"),
        pytest.param("", " ".join([*TP2, *ETP1]), 2, id="tp2-whole-experts", marks=THOROUGH),
        pytest.param("", " ".join([*TP2, *EP2]), 4, id="tp2-ep2-cut-experts"),
        pytest.param("", " ".join([*PP2, *EP2]), 4, id="pp2-ep2", marks=THOROUGH),
        pytest.param("", " ".join([*EP2, *OVERLAP]), 4, id="ep2-dp2-overlap", marks=THOROUGH),
        pytest.param(
            "--num-layers 4", " ".join([*VPP2, *EP2, *OVERLAP]), 4, id="vpp2-ep2-overlap", marks=THOROUGH
        ),
        pytest.param(
            "", " ".join([*TP2, *ETP1, *EP2, *PP2]), 4, id="tp2-ep2-pp2-whole-experts", marks=THOROUGH
        ),
        pytest.param(
            "--clip-grad 0.05", " ".join([*TP2, *ETP1, *EP2]), 2, id="clipped-tp2-ep2-whole-experts"
        ),
        pytest.param(
            "--moe-router-load-balancing-type seq_aux_loss --moe-router-pre-softmax --moe-router-dtype fp64",
            " ".join(EP2),
            2,
            id="seq-aux-loss-ep2",
            marks=THOROUGH,
        ),
        pytest.param(
            "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --moe-aux-loss-coeff 0",
            " ".join(EP2),
            2,
            id="sinkhorn-ep2",
            marks=THOROUGH,
        ),
        pytest.param(
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2 "
            "--moe-router-group-topk 1 --moe-router-load-balancing-type none "
            "--moe-router-topk-scaling-factor 2.5",
            " ".join(EP2),
            2,
            id="sigmoid-groups-expert-bias-ep2",
        ),
        pytest.param(
            "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap --moe-layer-freq [0,1] "
            "--moe-token-dispatcher-type alltoall",
            " ".join([*TP2, *ETP1]),
            2,
            id="dense-then-shared-expert-tp2",
            marks=THOROUGH,
        ),
    ],
)
def test_experts_on_a_layout_equal_one_process(mindspeed_equivalence, options, layout, size):
    model = (*MOE, *options.split())
    mindspeed_equivalence((*model, *layout.split()), model, world_size=size, baseline_world_size=1)


@pytest.mark.parametrize("layout", [(*TP2, *ETP1), (*TP2, *ETP1, *EP2)], ids=["ep1", "ep2"])
def test_experts_with_biases_equal_one_process(mindspeed_equivalence, layout):
    mindspeed_equivalence((*BIASED, *layout), BIASED, world_size=2, baseline_world_size=1)


def test_without_us_whole_experts_of_tensor_parallel_ranks_drift_apart(mindspeed_equivalence):
    with pytest.raises(AssertionError, match=r"experts\.linear_fc"):
        mindspeed_equivalence(
            (*MOE, *TP2, *ETP1),
            MOE,
            world_size=2,
            baseline_world_size=1,
            probes=("native_parts:NativeExperts",),
        )


def test_without_us_the_gradient_norm_lacks_the_biases_of_experts():
    flags = (*BIASED, *TP2, *ETP1, *EP2)
    one = train_side(BIASED, 1, 1, gradients=False)
    ours = train_side(flags, 2, 1, initial=one.initial, gradients=False)
    without = train_side(
        flags, 2, 1, initial=one.initial, gradients=False, probes=("native_parts:NativeBias",)
    )
    assert ours.grad_norms[0] == pytest.approx(one.grad_norms[0], rel=1e-5)
    if holds("norm-of-whole-experts"):
        assert without.grad_norms[0] < one.grad_norms[0] * (1 - 1e-4)
    else:
        assert without.grad_norms[0] == pytest.approx(one.grad_norms[0], rel=1e-5)


def test_every_rank_draws_experts_of_its_own_on_cpu():
    one = train_side(MOE, 1, 1, gradients=False).initial.tensors
    ours = train_side((*MOE, *EP2), 2, 1, gradients=False).initial.tensors
    without = train_side(
        (*MOE, *EP2), 2, 1, gradients=False, probes=("native_parts:NativeExperts",)
    ).initial.tensors
    key = next(key for key in one if key.endswith("experts.experts.linear_fc2.weight"))
    assert [name for name in one if not torch.equal(ours[name], one[name])] == []
    assert torch.equal(without[key][0], without[key][2])


def test_balance_losses_are_reported_alike_on_every_layout():
    flags = (*MOE, "--moe-z-loss-coeff", "0.001")
    one = train_side(flags, 1, 2, gradients=False)
    four = train_side((*flags, *TP2, *PP2), 4, 2, initial=one.initial, gradients=False)
    for name in ("load_balancing_loss", "z_loss"):
        assert four.losses[name] == pytest.approx(one.losses[name], rel=1e-5)


def test_a_z_loss_of_weight_zero_is_none():
    without = train_side(MOE, 1, 1, gradients=False)
    zero = train_side((*MOE, "--moe-z-loss-coeff", "0"), 1, 1, initial=without.initial, gradients=False)
    assert zero.losses == without.losses


PER_TOKEN = (
    *MOE,
    *("--calculate-per-token-loss", "--moe-z-loss-coeff", "0.1"),
    *("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    *("--moe-aux-loss-coeff", "0.1", "0.2", "0.3", "--micro-batch-size", "2"),
)
PREDICTIONS = ("--mtp-num-layers", "1", "--untie-embeddings-and-output-weights")


@pytest.mark.parametrize(
    "options", [(), pytest.param(PREDICTIONS, marks=THOROUGH)], ids=["decoder", "predictions"]
)
def test_losses_of_experts_weigh_alike_where_gradients_are_averaged_over_tokens(
    mindspeed_equivalence, options
):
    model = (*PER_TOKEN, *options)
    mindspeed_equivalence((*model, *TP2), model, world_size=2, baseline_world_size=1)


GLOBAL = (*MOE, "--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff")
ONE = (*GLOBAL, "0.1", "--micro-batch-size", "4")


def test_a_global_balance_loss_weighs_alike_on_data_parallel_ranks(mindspeed_equivalence):
    mindspeed_equivalence(
        (*GLOBAL, "0.1", "--micro-batch-size", "2"), ONE, world_size=2, baseline_world_size=1
    )
