"""Every model option trains the same on the layouts users run as in one process."""

import pytest

from mindspeed_testing.training import train_side

THOROUGH = pytest.mark.thorough

TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
ROPE = "--position-embedding-type rope"
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    f"--v-head-dim 12 --normalization RMSNorm --num-layers 2 {ROPE}"
)
DEEPSEEK = (
    f"{LATENT} --qk-layernorm --rotary-scaling-factor 4 --original-max-position-embeddings 16 --mscale 1.0 "
    "--mscale-all-dim 1.0 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 "
    "--moe-layer-freq [0,1] --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001 "
    "--moe-token-dispatcher-type alltoall"
)
PREDICTIONS = f"--mtp-num-layers 2 --untie-embeddings-and-output-weights --num-layers 2 {ROPE}"


@pytest.mark.parametrize(
    ("model", "layout", "size"),
    [
        pytest.param(
            f"{ROPE} --use-rope-scaling --rotary-percent 0.5 --rotary-base 50000 --qk-l2-norm",
            SP,
            2,
            id="scaled-partial-rope-l2-norm-tp2",
        ),
        pytest.param(
            "--quick-geglu --activation-func-clamp-value 7.0 --glu-linear-offset 1.0",
            SP,
            2,
            id="geglu-tp2",
            marks=THOROUGH,
        ),
        pytest.param("--softmax-type learnable", TP2, 2, id="learnable-softmax-tp2", marks=THOROUGH),
        pytest.param("--softmax-type off-by-one", PP2, 2, id="off-by-one-softmax-pp2", marks=THOROUGH),
        pytest.param("--window-size 8,0 --window-attn-skip-freq 2", PP2, 2, id="window-pp2"),
        pytest.param(LATENT, TP2, 2, id="latent-attention-tp2", marks=THOROUGH),
        pytest.param(
            LATENT.replace("--q-lora-rank 16", "--rope-type rope --qk-layernorm"),
            SP,
            2,
            id="latent-tp2-sp",
            marks=THOROUGH,
        ),
        pytest.param(
            DEEPSEEK,
            f"{SP} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
            2,
            id="deepseek-tp2-ep2",
            marks=THOROUGH,
        ),
        pytest.param(
            DEEPSEEK,
            f"{PP2} --expert-model-parallel-size 2 --use-distributed-optimizer",
            4,
            id="deepseek-pp2-ep2",
        ),
        pytest.param(PREDICTIONS, SP, 2, id="predictions-tp2", marks=THOROUGH),
        pytest.param(PREDICTIONS, PP2, 2, id="predictions-pp2", marks=THOROUGH),
        pytest.param(PREDICTIONS.replace("--num-layers 2", "--num-layers 4"), VPP2, 2, id="predictions-vpp2"),
        pytest.param(f"{LATENT} --qk-layernorm --num-layers 4", f"{SP} {VPP2}", 4, id="latent-tp2-sp-vpp2"),
        pytest.param(
            "--softmax-type learnable", f"{SP} {PP2}", 4, id="learnable-softmax-tp2-pp2", marks=THOROUGH
        ),
    ],
)
def test_a_model_on_a_layout_equals_one_process(mindspeed_equivalence, model, layout, size):
    mindspeed_equivalence(
        (*model.split(), *layout.split()), model.split(), world_size=size, baseline_world_size=1
    )


@pytest.mark.parametrize(
    "stages",
    [
        "--pipeline-model-parallel-layout Et|tttL",
        "--pipeline-model-parallel-layout E|tt|t|tL",
        "--decoder-first-pipeline-num-layers 1",
        "--decoder-last-pipeline-num-layers 1",
        "--num-virtual-stages-per-pipeline-rank 2",
    ],
)
def test_layers_placed_otherwise_train_alike(mindspeed_equivalence, stages):
    mindspeed_equivalence((*PP2.split(), *stages.split()), (), world_size=2, baseline_world_size=1)


def test_embedding_and_loss_count_as_layers(mindspeed_equivalence):
    model = "--num-layers 6"
    counted = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    mindspeed_equivalence(
        f"{model} {PP2} {counted}".split(), model.split(), world_size=2, baseline_world_size=1
    )


def test_predictions_sit_where_the_layout_says(mindspeed_equivalence):
    layout = f"{PP2} --pipeline-model-parallel-layout Et|tmmL"
    model = PREDICTIONS.split()
    mindspeed_equivalence((*model, *layout.split()), model, world_size=2, baseline_world_size=1)


@pytest.mark.parametrize(
    "recompute",
    [
        "--recompute-granularity selective",
        "--recompute-granularity selective --recompute-modules core_attn mlp",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
)
def test_recomputation_changes_no_bit(mindspeed_equivalence, recompute):
    model = ("--disable-bias-linear", "--num-layers", "2")
    mindspeed_equivalence((*model, *recompute.split()), model, tolerance=0.0)


def test_layers_of_predictions_are_not_recomputed_by_blocks(mindspeed_equivalence):
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    mindspeed_equivalence((*PREDICTIONS.split(), *block.split()), PREDICTIONS.split(), tolerance=0.0)


def test_without_us_latent_attention_loses_gradients_of_other_ranks(mindspeed_equivalence):
    with pytest.raises(AssertionError, match="linear_kv_down_proj"):
        mindspeed_equivalence(
            (*LATENT.split(), *TP2.split()),
            LATENT.split(),
            world_size=2,
            baseline_world_size=1,
            probes=("native_parts:NativeLatentAttention",),
        )


def test_without_us_a_batched_exchange_of_two_interleaved_ranks_mixes_up_messages(mindspeed_equivalence):
    flags = f"{PP2} --num-layers-per-virtual-pipeline-stage 1".split()
    with pytest.raises(AssertionError, match="quantities differ"):
        mindspeed_equivalence(
            flags, (), world_size=2, baseline_world_size=1, probes=("native_parts:BatchedExchange",)
        )


def test_predicted_tokens_have_losses_of_their_own():
    one = train_side(PREDICTIONS.split(), 1, 2, gradients=False)
    two = train_side((*PREDICTIONS.split(), *PP2.split()), 2, 2, initial=one.initial, gradients=False)
    for name in ("mtp_1 loss", "mtp_2 loss"):
        assert two.losses[name] == pytest.approx(one.losses[name], rel=1e-5)


def test_float16_follows_float32(mindspeed_equivalence):
    mindspeed_equivalence(
        ("--fp16", "--loss-scale", "128", "--use-distributed-optimizer"),
        (),
        world_size=2,
        baseline_world_size=1,
        tolerance=0.1,
        steps=2,
    )


def test_a_scale_that_overflows_is_lowered_until_steps_succeed():
    side = train_side(("--fp16", "--hysteresis", "1"), 1, 18, gradients=False)
    assert side.grad_norms[0] is None
    assert side.grad_norms[-1] is not None
    assert side.losses["lm loss"][-1] < side.losses["lm loss"][0]
