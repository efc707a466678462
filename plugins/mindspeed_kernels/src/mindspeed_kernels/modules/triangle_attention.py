"""Causal attention by blocks of queries as the core attention of megatron-core, and its placement."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_kernels.ops import triangle_attention
from mindspeed_megatron.layer_spec import SpecEditor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session


class TriangleCoreAttention(MegatronModule):
    """Attention between this rank's heads, block by block of queries, in place of ``DotProductAttention``."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        block_size: int = 512,
        **others: Any,
    ) -> None:
        """Read the configuration.

        Args:
            config: dropout, window and softmax are read from here.
            layer_number: number in the whole model from 1.
            attn_mask_type: must be causal.
            attention_type: ``"self"`` or ``"cross"``.
            attention_dropout: overrides ``config.attention_dropout``.
            softmax_scale: factor of the scores; by default ``1 / sqrt(d)``.
            block_size: queries per block.
            others: what megatron-core passes besides; heads do not talk to each other.

        Raises:
            ValueError: the configuration asks for a window, another softmax or context parallelism.
        """
        super().__init__(config=config)
        wanted = {"window_size": None, "softmax_type": "vanilla", "context_parallel_size": 1}
        for name, plain in wanted.items():
            value = getattr(config, name, plain)
            if value != plain:
                raise ValueError(f"--triangle-attn computes plain causal attention, but {name} is {value}")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.block_size = block_size
        self._plain: DotProductAttention | None = None
        named = (config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale)
        self._make_plain = partial(DotProductAttention, *named, **others)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[s, b, n/tp, d]``.
            key: ``[s, b, g/tp, d]``.
            value: ``[s, b, g/tp, dv]``.
            attention_mask: must be None in training.
            attn_mask_type: must be causal in training.
            attention_bias: must be None in training.
            packed_seq_params: must be None.

        Returns:
            ``[s, b, n/tp * dv]``.

        Raises:
            UserError: anything else than one causal sequence in training.
        """
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        others = {
            "a mask tensor": attention_mask,
            "an attention bias": attention_bias,
            "packed sequences": packed_seq_params,
        }
        given = [name for name, item in others.items() if item is not None]
        if given or kind is not AttnMaskType.causal or len(query) != len(key):
            if not self.training and packed_seq_params is None:
                # Masks of a program, and caches of keys.
                if self._plain is None:
                    self._plain = self._make_plain().eval()
                named = {"attn_mask_type": kind, "attention_bias": attention_bias}
                plain: Tensor = self._plain(query, key, value, attention_mask, **named)
                return plain
            cause = given[0] if given else f"attention of kind {kind}"
            raise UserError(f"--triangle-attn computes plain causal attention, but got {cause}; drop one")
        dropout = self.dropout if self.training else 0.0
        arguments = query, key, value, self.softmax_scale, self.block_size, dropout
        if dropout == 0.0 or self.config.sequence_parallel:
            return triangle_attention(*arguments).flatten(2)
        # Ranks hold different heads, which must drop different weights.
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return triangle_attention(*arguments).flatten(2)


def place_triangle_attention(session: Session, spec: Any, block_size: int) -> Any:
    """Return the tree with `TriangleCoreAttention` as the core of every attention."""
    editor = SpecEditor(spec, owner="triangle-attn", session=session)
    editor.replace("core_attention", lambda site: site.carry(TriangleCoreAttention, block_size=block_size))
    return editor.spec
