"""``MoePermuteMaskMap`` and ``MoeUnpermuteMaskMap``: permutation by routing map as scripts call it.

They take every argument by position. Megatron-core calls its fused permutation so.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mindspeed_kernels.ops.npu_moe_token_permute_with_routing_map import (
    npu_moe_token_permute_with_routing_map,
)
from mindspeed_kernels.ops.npu_moe_token_unpermute_with_routing_map import (
    npu_moe_token_unpermute_with_routing_map,
)


class MoePermuteMaskMap:
    """Sorts tokens by expert."""

    @staticmethod
    def apply(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: int | None = None,
        drop_and_pad: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return rows, their probabilities and indices; see `npu_moe_token_permute_with_routing_map`."""
        return npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens, drop_and_pad=drop_and_pad
        )


class MoeUnpermuteMaskMap:
    """Brings experts' results back to their tokens."""

    @staticmethod
    def apply(
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        restore_shape: Sequence[int],
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        drop_and_pad: bool = False,
    ) -> Tensor:
        """Return the tokens ``[T, h]``; see `npu_moe_token_unpermute_with_routing_map`."""
        return npu_moe_token_unpermute_with_routing_map(
            permuted_tokens,
            sorted_indices,
            restore_shape,
            probs=probs,
            routing_map=routing_map,
            drop_and_pad=drop_and_pad,
        )
