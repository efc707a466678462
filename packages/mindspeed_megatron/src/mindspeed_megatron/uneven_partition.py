"""Dimensions that tensor parallelism does not divide: left to the feature in slot ``tp-partition``.

Hosts check that heads, widths, the vocabulary and sequences divide, and megatron-core's configuration classes
check again while they are built. With a feature that distributes uneven dimensions neither applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from mindspeed_core.session import Session

Config = TypeVar("Config")

SLOT = "tp-partition"


def leaves_partition(session: Session) -> bool:
    """Return whether an active feature distributes dimensions that tensor parallelism does not divide."""
    return SLOT in session.plan.slots


def build_for_any_partition(build: Callable[[dict[str, Any]], Config], values: Mapping[str, Any]) -> Config:
    """Build a configuration whose dimensions need not divide by the tensor-parallel size.

    It is built for one tensor-parallel rank, which passes megatron-core's checks, and then gets the size and
    the sequence parallelism of ``values``.

    Args:
        build: makes the configuration from fields or arguments by name.
        values: those names and their values.
    """
    size = values.get("tensor_model_parallel_size", 1)
    alone = {
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        # By default experts are cut like the other layers, which the class reads from the size it is given.
        "expert_tensor_parallel_size": values.get("expert_tensor_parallel_size") or size,
    }
    config: Any = build({**values, **alone})
    config.tensor_model_parallel_size = size
    config.sequence_parallel = bool(values.get("sequence_parallel"))
    return cast("Config", config)
