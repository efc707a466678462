"""A training of some weights beside others that are frozen, for the count of its operations.

A feature that freezes weights says so in the session's `TrainedParts` once the model is built; figures of
throughput follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
