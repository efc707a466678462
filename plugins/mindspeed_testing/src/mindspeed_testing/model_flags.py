"""The small GPT on which proofs train, as flags: large enough for every parallelism up to four ranks each."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_core.registry import Registry
from mindspeed_megatron.data_source import SLOT

SMALL_GPT = (
    *("--num-layers", "4"),
    *("--hidden-size", "64"),
    *("--num-attention-heads", "4"),
    *("--seq-length", "32"),
    *("--vocab-size", "128"),
    # The vocabulary needs no padding at any tensor-parallel size: padded logits would take part in the loss.
    *("--make-vocab-size-divisible-by", "16"),
    *("--micro-batch-size", "1"),
    *("--global-batch-size", "4"),
    *("--attention-dropout", "0"),
    *("--hidden-dropout", "0"),
    *("--seed", "1234"),
    "--use-cpu-initialization",
    *("--optimizer", "adam"),
    # Adam divides by the gradient's own size: where the true gradient is zero (key biases), the default
    # epsilon would turn rounding noise into full-sized updates.
    *("--adam-eps", "1e-3"),
    *("--lr", "1e-2"),
    *("--lr-decay-style", "constant"),
    "--mock-data",
    *("--num-workers", "0"),
    *("--eval-iters", "0"),
)
"""The model and the training on both sides of a proof, before the flags of the side itself, which win.

4 layers of width 64 with 4 heads, sequences of 32 tokens out of a vocabulary of 128, 4 samples a step in
micro-batches of one, no dropout, float32, Adam at a constant learning rate. The samples are megatron-core's
mock data, drawn from the seed: both sides see the same ones in the same order. The feature's side starts from
the parameters of the baseline, in whatever layout.
"""

_HOST = "standalone"


def training_flags(flags: Sequence[str], train_iters: int, registry: Registry | None = None) -> list[str]:
    """Build the command line of one side: the small GPT, then ``flags`` (which win), then the steps.

    Its made-up samples make room for data that a flag brings.

    Args:
        flags: further flags.
        train_iters: steps.
        registry: what is installed, by default what the environment has.
    """
    found = registry or Registry.discover()
    given = {flag.partition("=")[0] for flag in flags}
    sources = [record.cls for record in found.features.values() if SLOT in record.cls.slots]
    host = {option for flag in found.host_flags(_HOST) for option in flag.options}
    flags_of_data = (
        flag
        for feature in sources
        for flag in feature.flags
        # Sources declare flags of the host again: those that name files bring data, others only its shape.
        if flag.name not in host or flag.name.endswith("-path")
    )
    brings = any(given.intersection(flag.options) for flag in flags_of_data)
    model = [flag for flag in SMALL_GPT if flag != "--mock-data" or not brings]
    return [*model, *flags, "--train-iters", str(train_iters)]
