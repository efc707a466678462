"""Proofs of the two ends of a model: every layout trains what one process trains."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_PLAIN = (
    *("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    "--untie-embeddings-and-output-weights",
)


def _in_layouts(*flags: str) -> tuple[Scenario, ...]:
    model = (*_PLAIN, *flags)
    sharded = (*model, "--use-distributed-optimizer")
    resumed = Scenario(
        "resume-tp2",
        flags=sharded,
        world_size=2,
        tolerance=5e-5,
        resume=Resume(flags=(*sharded, *TP2), world_size=2),
    )
    found = tuple(
        Scenario(
            name,
            flags=(*model, *layout),
            baseline=model,
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
        )
        for name, layout in (("tp2-sp", TP2), ("pp2", PP2), ("dp2-overlaps", OVERLAPS))
    )
    return (*found, resumed)


HEAD_PROOFS = _in_layouts("--lm-norm-weight")
EMBEDDING_PROOFS = _in_layouts("--embed-layernorm")
Z_LOSS_PROOFS = _in_layouts("--z-loss-weight", "0.01")
BIAS_PROOFS = _in_layouts("--row-col-parallel-linear-bias")
