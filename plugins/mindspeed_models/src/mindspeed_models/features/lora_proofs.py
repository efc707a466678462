"""Proofs of adapters: every layout trains what one process trains."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario

PLAIN = (
    *("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu"),
    "--untie-embeddings-and-output-weights",
)
ALL = ("--lora-target-modules", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "--lora-r", "4")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTED = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
_BASE = (*PLAIN, *ALL)


def _against_one(name: str, layout: tuple[str, ...], ranks: int = 2) -> Scenario:
    return Scenario(
        name,
        flags=(*_BASE, *layout),
        baseline=_BASE,
        world_size=ranks,
        baseline_world_size=1,
        same_feature=True,
        # Gradients of adapters go through rounding of both factors.
        tolerance=5e-5,
        # Of the state of features there is the digest of the base alone, a text.
        compare=("losses", "gradients", "parameters"),
    )


LORA_PROOFS = (
    _against_one("tp2-sp", TP2),
    _against_one("pp2", PP2),
    _against_one("dp2-overlaps", OVERLAPS),
    _against_one("full-recomputation", RECOMPUTED, 1),
    _against_one("tp2-pp2", (*TP2, *PP2), 4),
    Scenario(
        "resume-tp2",
        flags=(*_BASE, "--use-distributed-optimizer"),
        world_size=2,
        tolerance=5e-5,
        resume=Resume(flags=(*_BASE, "--use-distributed-optimizer", *TP2), world_size=2),
    ),
)
