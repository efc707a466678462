"""Common part of the proofs: layouts in which a model trains as without a feature, to the bit."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
MODEL = (*DROPOUT, "--adam-eps", "1e-3")
"""4 layers with biases and GELU; sequences of 32, one sample in a micro-batch, width 64 and 256."""
LLAMA = (
    *("--hidden-dropout", "0.1", "--attention-dropout", "0", "--adam-eps", "1e-3"),
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2", "--ffn-hidden-size", "128"),
)
KERNELS = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
"""Of mindspeed-kernels."""
FUSED_LLAMA = (*LLAMA, *KERNELS)
EXPERTS = (
    *(*DROPOUT, "--adam-eps", "1e-3", "--num-layers", "2", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--moe-ffn-hidden-size", "32", "--moe-shared-expert-intermediate-size", "48"),
    *("--swiglu", "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"),
)
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")
SHARDED = ("--use-distributed-optimizer",)
OVERLAPPED = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
RING = ("--context-parallel-size", "2")
"""Of mindspeed-cp."""
FSDP2 = ("--use-torch-fsdp2", "--untie-embeddings-and-output-weights")
MEGATRON_FSDP = (
    *("--use-megatron-fsdp", "--use-distributed-optimizer"),
    *("--data-parallel-sharding-strategy", "optim_grads_params"),
)
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers")


def as_without(
    name: str,
    flags: tuple[str, ...],
    *layout: str,
    ranks: int = 1,
    model: tuple[str, ...] = MODEL,
    baseline: tuple[str, ...] | None = None,
    gains: tuple[Gain, ...] = (),
    tolerance: float = 0.0,
) -> Scenario:
    """Compare a model with a feature to the same one without it, on the same ranks.

    Args:
        name: of the scenario.
        flags: of the feature.
        layout: further flags of both sides.
        ranks: processes.
        model: flags of both sides.
        baseline: further flags of the side without, ``layout`` by default.
        gains: what is measured beside it.
        tolerance: 0 demands equal bits.
    """
    return Scenario(
        name,
        flags=(*model, *layout, *flags),
        baseline=(*model, *(layout if baseline is None else baseline)),
        world_size=ranks,
        tolerance=tolerance,
        gains=gains,
    )


def in_layouts(flags: tuple[str, ...], *, model: tuple[str, ...] = FUSED_LLAMA) -> tuple[Scenario, ...]:
    """Return the proofs of a feature in every layout, beside kernels and split sequences.

    Args:
        flags: of the feature.
        model: of both sides.
    """
    return (
        as_without("tp2-sequence-parallel", flags, *TP2, ranks=2, model=model),
        as_without("pp2", flags, *PP2, ranks=2, model=model),
        as_without("interleaved", flags, *INTERLEAVED, ranks=2, model=model),
        as_without("dp2-overlapped", flags, *OVERLAPPED, ranks=2, model=model, baseline=SHARDED),
        as_without("cp2-ring", flags, *RING, ranks=2, model=model),
        as_without("bf16", flags, "--bf16", model=model),
        resumed(flags, model=model),
    )


def fully_sharded(
    flags: tuple[str, ...],
    *layout: str,
    model: tuple[str, ...] = MODEL,
    baseline: tuple[str, ...] | None = None,
) -> tuple[Scenario, ...]:
    """Return the proofs of a feature beside each kind of fully sharded parameters.

    Args:
        flags: of the feature.
        layout: further flags of both sides.
        model: flags of both sides.
        baseline: further flags of the side without, ``layout`` by default.
    """
    return tuple(
        as_without(
            name,
            flags,
            *(*layout, *sharded),
            ranks=2,
            model=model,
            baseline=(*(layout if baseline is None else baseline), *sharded),
        )
        for name, sharded in (("fsdp2", FSDP2), ("megatron-fsdp", MEGATRON_FSDP))
    )


def resumed(flags: tuple[str, ...], *layout: str, model: tuple[str, ...] = MODEL) -> Scenario:
    """Save on two ranks, and continue on one, without the feature.

    Args:
        flags: of the feature.
        layout: further flags of the run that saves.
        model: flags of both.
    """
    # Ranks draw dropout from seeds of their own: another number of them trains otherwise.
    common = (*model, "--hidden-dropout", "0", "--attention-dropout", "0", *SHARDED)
    return Scenario(
        "resume",
        flags=(*common, *layout, *flags),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=common, world_size=1, with_feature=False),
    )
