"""Proofs of slices: a model trains as with attention and experts of whole sequences."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.deepspeed_proofs import NO_DROP
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED, TP2

AMPIPE = ("--ampipe-degree", "2")
GATHERS = ("--ampipe-tp-sp-comm-overlap",)
_MODEL = (*MODEL, *SHARED)
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_ROPE = ("--position-embedding-type", "rope")
_LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "12", *_ROPE),
)
_WHOLE = (*TP2, "--expert-tensor-parallel-size", "1")
_LOSSES = (
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-z-loss-coeff", "1e-3"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)


def _as_without(
    name: str,
    *layout: str,
    flags: tuple[str, ...] = AMPIPE,
    model: tuple[str, ...] = _MODEL,
    ranks: int = 2,
    tolerance: float = 1e-5,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    both = (*model, *EP2, *layout)
    return Scenario(
        name, flags=(*both, *flags), baseline=both, world_size=ranks, tolerance=tolerance, gains=gains
    )


AMPIPE_PROOFS = (
    _as_without("ep2", gains=(Gain("sent_bytes", 1.01),)),
    _as_without("four-slices", flags=("--ampipe-degree", "4")),
    _as_without("rope-fused-attention", *_ROPE, "--use-flash-attn", "--group-query-attention"),
    _as_without("latent-attention", *_LATENT),
    _as_without("device-losses", "--moe-device-level-aux-loss-coeff", "0.1"),
    _as_without("sequence-losses-and-bias", *_LOSSES),
    _as_without("global-loss", "--moe-router-load-balancing-type", "global_aux_loss"),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS),
    _as_without("bf16", *_BF16, tolerance=2e-2),
    _as_without("tp2-whole-experts", *_WHOLE, *_ROPE),
    _as_without("tp2-cut-experts", *TP2, *_ROPE, ranks=4),
    _as_without("tp2-gathers-apart", *TP2, *_ROPE, flags=("--ampipe-degree", "4", *GATHERS), ranks=4),
    _as_without("recompute-full", *_FULL),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    _as_without("predictions", "--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
    _as_without("dense-then-experts", "--moe-layer-freq", "[0,1]"),
    _as_without("per-token-loss", "--calculate-per-token-loss"),
    _as_without("sequential-experts", model=tuple(flag for flag in _MODEL if flag != "--moe-grouped-gemm")),
    _as_without("deepspeeds-gate", model=(*_MODEL, *NO_DROP)),
    Scenario(
        "one-process",
        flags=(*_MODEL, *EP2, *AMPIPE),
        baseline=_MODEL,
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*_MODEL, *EP2, *_BOTH_OVERLAPS, *AMPIPE),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*_MODEL, *_SHARDED), world_size=1, with_feature=False),
    ),
)
