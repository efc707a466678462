"""Combinations that MindSpeed's own scripts use: what is counted, and that numbers stay the same."""

import shlex

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.resolver.plan import PlanError

SMALL = (
    "--platform cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --vocab-size 128 --mock-data --train-iters 4 --lr 1e-3 --disable-bias-linear "
    "--tokenizer-type NullTokenizer"
)
SWAP = "--use-flash-attn --swap-attention --swap-min-bytes 0"
PER_RANK = "--enable-recompute-layers-per-pp-rank"


def planned(flags):
    return plan_for(shlex.split(f"{SMALL} {flags}"), host="standalone", platform="cpu")


def layers_that_compute_feed_forward_again(flags):
    from mindspeed_megatron.unwrap import unwrap
    from mindspeed_train import loop

    with prepare(shlex.split(f"{SMALL} {flags}"), host="standalone") as session:
        run = loop.setup(session)
        layers = [layer for chunk in run.model for layer in unwrap(chunk).decoder.layers]
        found = [index for index, layer in enumerate(layers) if "forward" in vars(layer.mlp)]
        loop.teardown(session)
    return found


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (SWAP, []),
        (f"{SWAP} --recompute-num-layers 0", []),
        (f"{SWAP} --recompute-num-layers 2", [0, 1]),
        (f"{SWAP} --recompute-num-layers 9 --reduce-recompute-for-last-chunk", [0, 1, 2]),
        # Behind those that compute all of it again, the others compute their activation again.
        (
            f"{SWAP} --recompute-num-layers 1 --recompute-activation-function "
            "--recompute-activation-function-num-layers 2",
            [0, 1, 2],
        ),
    ],
)
def test_swapped_attention_counts_the_layers_that_compute_feed_forward_again(flags, expected):
    assert layers_that_compute_feed_forward_again(flags) == expected


def test_a_number_beside_swapped_attention_changes_no_bit(mindspeed_equivalence):
    flags = shlex.split(SWAP)
    mindspeed_equivalence((*flags, "--recompute-num-layers", "1"), ("--use-flash-attn",), tolerance=0.0)


def test_swapped_attention_brings_flash_attention():
    plan, parsed = planned("--swap-attention")
    assert "flash-attn" in plan
    assert parsed.provenance["use_flash_attn"] == "preset swap-attention"


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-activation-function --recompute-activation-function-num-layers 1",
        "--recompute-norm --recompute-norm-num-layers 1",
        f"{SWAP} --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
)
def test_numbers_of_layers_are_counted_over_a_pipeline_rank(flags):
    plan, _ = planned(f"{PER_RANK} {flags}")
    assert "recompute-layers-per-pp-rank" in plan


def test_a_count_of_nothing_is_held_back_with_the_reason():
    plan, _ = planned(f"{PER_RANK} --recompute-activation-function")
    (held,) = plan.held_back
    assert held.name == "recompute-layers-per-pp-rank"
    assert "no number of layers" in held.reason


def test_a_count_beside_uniform_recomputation_is_refused():
    with pytest.raises(PlanError, match="--recompute-method block"):
        planned(
            f"{PER_RANK} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )


def test_pipelined_experts_keep_their_activations_and_say_so():
    experts = (
        "--num-experts 4 --expert-model-parallel-size 2 --use-pipe-experts "
        "--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1,0,1] --recompute-activation-function"
    )
    plan, _ = planned(experts)
    assert any("leaves experts alone" in note.text for note in plan.notes)


CHUNKS = "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (f"{SWAP} --recompute-num-layers 4", True),
        (f"{SWAP} --recompute-num-layers 3", False),
        (f"{SWAP} --recompute-num-layers 2 {CHUNKS}", True),
        (f"{SWAP} --recompute-num-layers 1 {CHUNKS}", False),
        (f"{SWAP} --recompute-num-layers 3 {CHUNKS} {PER_RANK}", False),
        (f"{SWAP} --recompute-num-layers 4 {CHUNKS} {PER_RANK}", True),
    ],
)
def test_recomputed_activations_stand_down_where_swapped_attention_leaves_no_layer(flags, idle):
    plan, _ = planned(f"{flags} --recompute-activation-function")
    assert ("recompute-activation" in plan.names) is not idle


def test_recomputed_activations_stand_down_where_every_layer_has_pipelined_experts():
    experts = "--num-experts 4 --expert-model-parallel-size 2 --use-pipe-experts"
    plan, _ = planned(f"{experts} --moe-token-dispatcher-type alltoall --recompute-activation-function")
    (held,) = plan.held_back
    assert held.name == "recompute-activation"
    assert "no layer is without" in held.reason


@pytest.mark.thorough
def test_pipelined_experts_beside_recomputed_activations_train_like_one_process(mindspeed_equivalence):
    experts = shlex.split(
        "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall "
        "--moe-layer-freq [0,1,0,1]"
    )
    pipelined = shlex.split(
        "--expert-model-parallel-size 2 --use-pipe-experts --recompute-activation-function"
    )
    mindspeed_equivalence((*experts, *pipelined), experts, world_size=2, baseline_world_size=1)
