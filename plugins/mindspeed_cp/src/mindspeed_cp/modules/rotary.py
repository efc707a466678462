"""Rotary embeddings of the positions that a rank holds, in whatever order it holds them.

megatron-core slices the angles of a sequence for one layout only. The built modules get another ``forward``:
it takes the angles of the positions in the batch's description, which megatron-core shows the module just
before. Multi-latent attention, which rotates by itself, is to see samples side by side, not one packed
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from mindspeed_cp.modules.batch import SplitBatch

if TYPE_CHECKING:
    from mindspeed_core.session import Session

OWNER = "context-parallel"


def follow_layout(session: Session, model: list[Any]) -> None:
    """Let every rotary embedding of a model follow the layout; taken back when the session closes."""
    for chunk in model:
        followed: dict[int, _LayoutRotary] = {}
        for module in chunk.modules():
            if isinstance(module, RotaryEmbedding):
                remembered = followed[id(module)] = _LayoutRotary(module)
                session.instances.set(OWNER, module, "get_rotary_seq_len", remembered.get_rotary_seq_len)
                session.instances.set(OWNER, module, "forward", remembered.forward)
        for module in chunk.modules():
            if isinstance(module, MLASelfAttention):
                projected = _unpacked_projection(
                    module.get_query_key_value_tensors, followed[id(module.rotary_pos_emb)]
                )
                session.instances.set(OWNER, module, "get_query_key_value_tensors", projected)


def _unpacked_projection(original: Callable[..., Any], remembered: _LayoutRotary) -> Callable[..., Any]:
    """Return the projection of multi-latent attention for samples ``[s / cp, b, h]`` side by side.

    Given a description, megatron-core takes the batch for one packed sequence and drops a dimension.
    """

    def get_query_key_value_tensors(
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        split = isinstance(packed_seq_params, SplitBatch)
        remembered.described_batch = packed_seq_params if split else None
        given = None if split else packed_seq_params
        return original(hidden_states, key_value_states, position_ids, given, *args, **options)

    return get_query_key_value_tensors


class _LayoutRotary:
    """A rotary module that follows the layout of the batch described last."""

    def __init__(self, module: RotaryEmbedding) -> None:
        self.length: Callable[..., int] = module.get_rotary_seq_len
        self.whole: Callable[..., Any] = module.forward
        self.described_batch: SplitBatch | None = None
        self.batch: SplitBatch | None = None

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> int:
        """Return the length of the whole sequence, and remember the batch's description."""
        described = options.get("packed_seq_params", args[4] if len(args) > 4 else None)
        described = described or self.described_batch
        self.batch = described if isinstance(described, SplitBatch) else None
        if self.batch is not None:
            return int(self.batch.max_seqlen_q)
        return self.length(*args, **options)

    def forward(self, max_seq_len: int, *args: Any, **options: Any) -> Any:
        """Return the angles ``[s / cp, 1, 1, d]`` of this rank's positions."""
        if self.batch is None or self.batch.positions is None:
            return self.whole(max_seq_len, *args, **options)
        positions = self.batch.positions
        # Of packed sequences megatron-core gives the angles of every position.
        found = self.whole(max_seq_len, packed_seq=True)
        if isinstance(found, tuple):
            return found[0].index_select(0, positions), *found[1:]
        angles: Tensor = found
        return angles.index_select(0, positions)
