"""The first half of megatron-core's shared experts, called by itself.

Since 0.18 a shared expert counts which of its halves ran, begins to count only where it was built to overlap
by itself, and refuses a half that is not the next one. The counter is set here; in older versions there is
none.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor


def first_half(experts: SharedExpertMLP, gathered: Tensor) -> Tensor:
    """Compute the first linear layer and the activation.

    Args:
        experts: whose configuration says ``moe_shared_expert_overlap``.
        gathered: ``[s, b, h]``, the input of the first linear layer.

    Returns:
        ``[s, b, f/tp]``, the input of the second linear layer; nothing is left of it in the module.
    """
    halves: Any = experts
    states = getattr(shared_experts, "SharedExpertState", None)
    if states is not None:
        halves._overlap_state = states.PRE_FORWARD_COMM_DONE
    halves.cached_fc1_input = gathered
    halves.linear_fc1_forward_and_act()
    inner: Tensor = halves.cached_fc2_input
    halves.cached_fc2_input = None
    return inner
