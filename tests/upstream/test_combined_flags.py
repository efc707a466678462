"""Flags that upstream's own scripts combine: what works, and what stands down with its reason."""

import shlex
from functools import lru_cache

import pytest

from mindspeed_core.registry import Registry
from mindspeed_core.validation import check

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 1 "
    "--vocab-size 128 --mock-data --train-iters 4 --lr 1e-3 --tokenizer-type NullTokenizer"
)
BIASED = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
EXPERTS = f"{BIASED} --disable-bias-linear --expert-model-parallel-size 2"
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap"
KEPT = "--context-parallel-size 2 --use-flash-attn --context-parallel-kv-cache-policy full"
AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@lru_cache
def checked(flags, world_size):
    words = shlex.split(f"{MODEL} {flags}")
    found = check(words, world_size=world_size, platform="cpu", registry=Registry.discover())
    assert found.problems == ()
    return found


def said(found):
    plan = found.plan
    return "\n".join(
        [
            *(str(note) for note in (*plan.notes, *plan.flag_notes)),
            *(f"{held.name}: {held.reason}" for held in plan.held_back),
        ]
    )


@pytest.mark.parametrize(
    ("flags", "world_size", "active", "says"),
    [
        pytest.param(
            "--ddp-average-in-collective",
            2,
            None,
            "gradients are divided before they are summed",
            id="means of gradients where the backend has none",
        ),
        pytest.param(
            f"{EXPERTS} --use-transformer-engine-op-fuser",
            2,
            None,
            "--use-transformer-engine-op-fuser",
            id="operations that TransformerEngine fuses",
        ),
        pytest.param(
            f"{EXPERTS} --moe-model-type deepspeed_moe --noisy-gate-policy RSample",
            2,
            "moe-deepspeed",
            "two are made without noise",
            id="noise of one choice beside two choices",
        ),
        pytest.param(
            f"{EXPERTS} --moe-permutation-async-comm --moe-token-dispatcher-type alltoall {SHARED}",
            2,
            "moe-async-comm",
            "--moe-shared-expert-overlap changes nothing",
            id="messages of a permutation beside shared experts on a stream",
        ),
        pytest.param(
            f"{KEPT} --context-parallel-algo megatron_cp_algo {AGAIN}",
            2,
            "context-parallel",
            "--recompute-granularity full computes attention again",
            id="kept keys beside full recomputation, ring",
        ),
        pytest.param(
            f"{KEPT} --context-parallel-algo ulysses_cp_algo --use-ulysses-allgather-kv "
            f"--group-query-attention --num-query-groups 2 {AGAIN}",
            2,
            "context-parallel",
            "--recompute-granularity full computes attention again",
            id="kept keys beside full recomputation, gathered keys",
        ),
        pytest.param(
            f"{BIASED} --tensor-model-parallel-size 8 --sequence-parallel",
            8,
            "",
            "experts with biases are not cut in megatron-core",
            id="experts with biases at tensor parallelism 8",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --use-multiparameter-pipeline-model-parallel",
            2,
            "",
            "stages hand over one tensor, as without it",
            id="several tensors between stages without their shapes",
        ),
        pytest.param(
            f"{EXPERTS} --moe-permute-fusion --moe-token-dispatcher-type flex",
            2,
            "moe-permute-fusion",
            "alltoall sends the same tokens",
            id="fused permutation with the flexible dispatcher",
        ),
        pytest.param(
            f"{EXPERTS} --moe-permute-fusion --moe-token-dispatcher-type alltoall "
            "--cuda-graph-impl transformer_engine --te-rng-tracker",
            2,
            "moe-permute-fusion",
            "this host captures no graphs",
            id="fused permutation beside graphs",
        ),
        pytest.param(
            "--attention-backend flash", 1, "flash-attn", "read as --use-flash-attn", id="flash attention"
        ),
    ],
)
def test_a_combination_of_upstreams_scripts_starts_and_says_what_stands_down(flags, world_size, active, says):
    found = checked(flags, world_size)
    assert not active or active in found.plan.names
    assert says in said(found)


def test_what_stands_down_is_not_asked_of_megatron_core():
    flags = f"{EXPERTS} --moe-permutation-async-comm --moe-token-dispatcher-type alltoall {SHARED}"
    assert checked(flags, 2).args.moe_shared_expert_overlap is False
    flags = f"{EXPERTS} --moe-permute-fusion --moe-token-dispatcher-type flex"
    assert checked(flags, 2).args.moe_token_dispatcher_type == "alltoall"
    assert checked(flags, 2).args.moe_permute_fusion is False
    assert checked("--ddp-average-in-collective", 2).args.ddp_average_in_collective is False
