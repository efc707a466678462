"""A dry run of a loop of one's own holds and communicates what a world that computes does."""

from __future__ import annotations

import pytest
from own_loop import OwnLoop, Recorded, described, of_the_batches

from mindspeed_core import activate
from mindspeed_core.run import Batch
from mindspeed_testing.dry_run import differences, followed_run
from mindspeed_testing.worlds import run_world

STEPS = 2
KERNELS = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
LLAMA = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-swiglu-fusion")
ROTARY = ("--position-embedding-type", "rope")
SMALLER = ("--num-layers", "2")
PADDED_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-expert-capacity-factor", "1.0"),
    *("--moe-pad-expert-input-to-capacity", "--no-gradient-accumulation-fusion"),
)
LAYOUTS = {
    "tensor and sequence, kernels": (
        (*LLAMA, *SMALLER, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        KERNELS,
    ),
    "pipeline, distributed optimizer": (
        ("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
        (),
    ),
    "two replicas": (SMALLER, ()),
    "distributed optimizer, bfloat16": ((*SMALLER, "--use-distributed-optimizer", "--bf16"), ()),
    "interleaved": (
        ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
        (),
    ),
    "split sequence": (
        (*SMALLER, *ROTARY, "--context-parallel-size", "2"),
        ("--context-parallel-algo", "ulysses_cp_algo"),
    ),
    "full recompute": (
        (
            *(*SMALLER, "--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1"),
        ),
        (),
    ),
    "padded experts": ((*SMALLER, *PADDED_EXPERTS), ()),
    "latent attention": (
        (*LLAMA, *SMALLER, *ROTARY, "--multi-latent-attention", "--untie-embeddings-and-output-weights"),
        (),
    ),
    "further tokens": ((*SMALLER, *ROTARY, "--mtp-num-layers", "1"), ()),
}
ALWAYS = ("tensor and sequence, kernels",)


def train(platform, model_flags, feature_flags):
    """Start a world, build a model and train it for two steps, as a program around a session does."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    args, configs = described(*model_flags)
    config = configs[0]
    flags = [*of_the_batches(args), *feature_flags]
    with followed_run(platform) as followed:
        options = {"platform": platform, "configs": configs, "extra_plugins": followed.plugins}
        with activate(flags, **options) as session:
            torch.distributed.init_process_group("gloo")
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                config.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(1234)
            own = OwnLoop(session, configs, Recorded(), args)
            for _ in range(STEPS):
                micro_batches = [batch(args) for _ in range(args.global_batch_size)]
                own.step([micro_batches for _ in own.chunks], args)
    return followed.measured


def batch(args):
    import torch

    shape = args.micro_batch_size, args.seq_length
    tokens = torch.zeros(shape, dtype=torch.long)
    return Batch(
        tokens=tokens,
        labels=tokens.clone(),
        loss_mask=torch.ones(shape),
        position_ids=torch.arange(shape[1]).expand(shape),
    )


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in LAYOUTS]
)
def test_a_dry_run_has_the_bytes_and_calls_of_the_real_one(layout):
    computed, planned = (run_world(train, 2, name, *LAYOUTS[layout]) for name in ("cpu", "fake"))

    assert differences(computed, planned) == []
    assert computed[0].calls
    assert {"build", "forward and backward", "update"} <= computed[0].phases.keys()
