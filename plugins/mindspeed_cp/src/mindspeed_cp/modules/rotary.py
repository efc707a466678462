"""Rotary embeddings of the positions that a rank holds, in whatever order it holds them.

megatron-core slices the angles of a sequence for one layout only. The built modules get another ``forward``:
it takes the angles of the positions in the batch's description, which megatron-core shows the module just
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from mindspeed_cp.modules.batch import SplitBatch

if TYPE_CHECKING:
    from mindspeed_core.session import Session

OWNER = "context-parallel"


def follow_layout(session: Session, model: list[Any]) -> None:
    """Let every rotary embedding of a model follow the layout; taken back when the session closes."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, RotaryEmbedding):
                remembered = _Remembered(module)
                session.instances.set(OWNER, module, "get_rotary_seq_len", remembered.get_rotary_seq_len)
                session.instances.set(OWNER, module, "forward", remembered.forward)


class _Remembered:
    """One rotary module, with the batch that it was shown last."""

    def __init__(self, module: RotaryEmbedding) -> None:
        self.length: Callable[..., int] = module.get_rotary_seq_len
        self.whole: Callable[..., Any] = module.forward
        self.own_group = module.cp_group
        self.module = module
        self.batch: SplitBatch | None = None

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> int:
        """Length of the whole sequence; remembers the batch's description."""
        described = options.get("packed_seq_params", args[4] if len(args) > 4 else None)
        self.batch = described if isinstance(described, SplitBatch) else None
        return self.length(*args, **options)

    def forward(self, max_seq_len: int, *args: Any, **options: Any) -> Any:
        """Angles ``[s / cp, 1, 1, d]`` of this rank's positions."""
        if self.batch is None or self.batch.positions is None:
            return self.whole(max_seq_len, *args, **options)
        positions = self.batch.positions
        found = self.module.get_emb(max_seq_len)
        if isinstance(found, tuple):
            return found[0].index_select(0, positions), *found[1:]
        angles: Tensor = found
        return angles.index_select(0, positions)
