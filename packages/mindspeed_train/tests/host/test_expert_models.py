"""Published models of experts, scaled down, train with every rank's share as in one process."""

import pytest

from mindspeed_testing.training import train_side

THOROUGH = pytest.mark.thorough

LLAMA = (
    "--num-layers 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --adam-eps 1e-3 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm --moe-ffn-hidden-size 32"
)
GROUPED_QUERY = "--group-query-attention --num-query-groups 2"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 "
    "--qk-layernorm"
)
SHARED = "--moe-shared-expert-intermediate-size 48 --moe-layer-freq [0,1]"
MODELS = {
    "mixtral": f"{LLAMA} {GROUPED_QUERY} --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.02",
    "qwen3-moe": (
        f"{LLAMA} {GROUPED_QUERY} --qk-layernorm --num-experts 8 --moe-router-topk 4 "
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.001"
    ),
    "deepseek-v2": (
        f"{LLAMA} {LATENT} {SHARED} --num-experts 8 --moe-router-topk 3 --moe-router-pre-softmax "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 16 "
        "--moe-aux-loss-coeff 0.003 --moe-device-level-aux-loss-coeff 0.05 --moe-comm-aux-loss-coeff 0.02"
    ),
    "deepseek-v3": (
        f"{LLAMA} {LATENT} {SHARED} --q-lora-rank 16 --num-experts 8 --moe-router-topk 4 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --mtp-num-layers 1 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.0001"
    ),
}
EXPERTS = "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce"
OVERLAP = "--moe-alltoall-overlap-comm --moe-permute-fusion"
TENSORS = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
STAGES = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        pytest.param("mixtral", f"{EXPERTS} {OVERLAP}", 2, marks=THOROUGH),
        pytest.param("mixtral", f"{EXPERTS} {STAGES} {OVERLAP} --moe-zero-memory level1", 4, marks=THOROUGH),
        pytest.param("qwen3-moe", f"{EXPERTS} {OVERLAP}", 2, marks=THOROUGH),
        pytest.param("qwen3-moe", f"{EXPERTS} {TENSORS} --overlap-param-gather {OVERLAP}", 4, marks=THOROUGH),
        pytest.param("deepseek-v2", f"{EXPERTS} {OVERLAP} --moe-zero-memory level0", 2),
        pytest.param("deepseek-v2", f"{EXPERTS} {TENSORS} {OVERLAP}", 4, marks=THOROUGH),
        pytest.param("deepseek-v3", f"{EXPERTS} {TENSORS} {OVERLAP}", 2, marks=THOROUGH),
        pytest.param("deepseek-v3", f"{EXPERTS} {STAGES} {OVERLAP} --moe-zero-memory level0", 4),
    ],
)
def test_a_model_of_experts_equals_one_process(mindspeed_equivalence, name, layout, ranks):
    model = MODELS[name].split()
    # The loss over the global batch weighs a micro-batch by those before it, which depends on the replicas.
    plain = 2 if "global_aux_loss" in model else 1
    mindspeed_equivalence((*model, *layout.split()), model, world_size=ranks, baseline_world_size=plain)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_experts_trains_in_bfloat16_on_four_ranks(name):
    flags = f"{MODELS[name]} {EXPERTS} {TENSORS} {OVERLAP} --bf16 --moe-router-dtype fp32"
    side = train_side(flags.split(), 4, 8, gradients=False)
    assert side.losses["lm loss"][-1] < side.losses["lm loss"][0]
