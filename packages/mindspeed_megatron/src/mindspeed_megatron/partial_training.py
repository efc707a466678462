"""A training of some weights beside others that are frozen, for the count of its operations.

A feature that freezes weights says so in the session's `TrainedParts` once the model is built; figures of
throughput follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.flops import FlopCount, count_flops

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@dataclass(frozen=True)
class PartialTraining:
    """The matrices of a model that train; all others are frozen.

    Gradients of inputs are computed down to the first layer, whichever weights train.

    Attributes:
        trained: parts of `flops.FlopCount` whose own weights train.
        added: elements of matrices that train beside those of a part, in every layer that has the part; of
            ``logits``, once.
    """

    trained: frozenset[str] = frozenset()
    added: Mapping[str, int] = field(default_factory=dict)


@dataclass
class TrainedParts:
    """The weights that a session trains; ``partial`` is None where it trains all of them."""

    partial: PartialTraining | None = None


def count_run(run: Run, seq_length: int, vocab_size: int | None = None, *, causal: bool = True) -> FlopCount:
    """Count the operations of one sequence of a run, frozen weights left out.

    Args:
        run: whose model is counted.
        seq_length: tokens of the sequence, before any sharding.
        vocab_size: rows of the output layer; by default those of the arguments.
        causal: see `flops.count_flops`.
    """
    rows: Any = run.args.padded_vocab_size if vocab_size is None else vocab_size
    partial = run.session.state(TrainedParts).partial
    return count_flops(run.config, seq_length=seq_length, vocab_size=rows, causal=causal, partial=partial)
