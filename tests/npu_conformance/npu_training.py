"""A Llama-2-7B-wide GPT with our kernels, one rank of worlds of 1, 2 and 8, on the platform npu."""

from __future__ import annotations

import pytest

from mindspeed_testing.npu import shape_only_training

LAYERS = 2
MICRO_BATCHES = 2
FLAGS = (
    *("--num-layers", str(LAYERS), "--hidden-size", "4096", "--ffn-hidden-size", "11008"),
    *("--num-attention-heads", "32", "--group-query-attention", "--num-query-groups", "8"),
    *("--seq-length", "4096", "--max-position-embeddings", "4096", "--vocab-size", "32000"),
    *(
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        str(MICRO_BATCHES),
        "--train-iters",
        "1",
        "--lr",
        "1e-3",
    ),
    *("--bf16", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--mock-data", "--num-workers", "0", "--eval-iters", "0"),
)
KERNELS = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")


def step(*flags, world_size=1, rank=0):
    with shape_only_training([*FLAGS, *flags], world_size=world_size, rank=rank) as training:
        return training.step()


def test_a_layer_runs_each_kernel_of_the_device_once_and_every_parameter_gets_a_gradient():
    record = step(*KERNELS)
    assert record.without_gradient == ()
    norms = MICRO_BATCHES * (2 * LAYERS + 1)
    layers = MICRO_BATCHES * LAYERS
    counts = {
        "npu_rms_norm": norms,
        "npu_rms_norm_backward": norms,
        "npu_fusion_attention": layers,
        "npu_fusion_attention_grad": layers,
        "npu_swiglu": layers,
        "npu_swiglu_backward": layers,
    }
    assert {name: record.count(name) for name in counts} == counts


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (8, 7)])
def test_sequence_parallel_ranks_communicate_what_the_algorithm_says(size, rank):
    flags = (*KERNELS, "--tensor-model-parallel-size", str(size), "--sequence-parallel")
    record = step(*flags, world_size=size, rank=rank)
    assert record.without_gradient == ()
    # Forward gathers before qkv, fc1 and the output layer, and scatters after proj, fc2 and the embedding.
    # Backward mirrors that, and gathers the three inputs once more for the gradients of their weights.
    joints = MICRO_BATCHES * (2 * LAYERS + 1)
    assert record.calls("all_gather_into_tensor", "TENSOR") == 3 * joints
    assert record.calls("reduce_scatter_tensor", "TENSOR") == 2 * joints
    gathered = record.communication["all_gather_into_tensor", "TENSOR_MODEL_PARALLEL_GROUP"]
    hidden_states = 4096 * 4096 * 2
    assert gathered.input_bytes == 3 * joints * hidden_states // size


def test_flash_attention_keeps_no_scores():
    without = tuple(flag for flag in KERNELS if flag != "--use-flash-attn")
    scores = 32 * 4096 * 4096 * 2
    assert step(*without).peak_bytes - step(*KERNELS).peak_bytes > LAYERS * scores


def test_the_distributed_optimizer_reduces_gradients_in_shards():
    record = step(*KERNELS, "--use-distributed-optimizer", "--global-batch-size", "4", world_size=2)
    assert record.without_gradient == ()
    assert record.calls("reduce_scatter_tensor", "DATA_PARALLEL") == 1


def test_recompute_runs_the_kernels_again():
    recompute = (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    )
    record = step(*KERNELS, *recompute)
    assert record.without_gradient == ()
    assert record.count("npu_fusion_attention") == 2 * MICRO_BATCHES * LAYERS
    assert record.count("npu_fusion_attention_grad") == MICRO_BATCHES * LAYERS
