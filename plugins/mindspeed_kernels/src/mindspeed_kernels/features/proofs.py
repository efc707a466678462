"""Command lines that proofs share, and the layouts in which every feature proves itself."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Scenario

# Adam divides by the root of the second moment: with its usual epsilon the sign of a gradient that is zero
# but for rounding decides about a whole step.
STEADY = ("--adam-eps", "1e-3")
LLAMA = (*STEADY, "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear")
GQA = ("--group-query-attention", "--num-query-groups", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
LONG = (*STEADY, "--seq-length", "256", "--max-position-embeddings", "256")
RECOMPUTE = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)


def scenarios(
    flag: str,
    model: tuple[str, ...],
    baseline: tuple[str, ...] = (),
    gain: tuple[Gain, ...] = (),
    tolerance: float = 1e-5,
) -> tuple[Scenario, ...]:
    """One process, tensor and sequence parallel, pipeline parallel, distributed optimizer, and bfloat16."""
    layouts = (
        ("single", (), 1),
        ("tp2-sp", TP2, 2),
        ("pp2", PP2, 2),
        ("dp2-distributed-optimizer", ("--use-distributed-optimizer",), 2),
    )
    exact = tuple(
        Scenario(
            name,
            flags=(*model, *layout, flag),
            baseline=(*model, *layout, *baseline),
            world_size=world_size,
            tolerance=tolerance,
            gains=gain if world_size == 1 else (),
        )
        for name, layout, world_size in layouts
    )
    # bfloat16 has 8 bits: where one side rounds once and the other several times, they differ by percents.
    rounded = Scenario(
        "bf16",
        flags=(*model, "--bf16", flag),
        baseline=(*model, "--bf16", *baseline),
        tolerance=0.1,
        gains=tuple(Gain(item.measure, 1.0) for item in gain),
    )
    return (*exact, rounded)
