"""Attention within documents: a description of the batch, and an attention module that reads it.

The description is megatron-core's ``PackedSeqParams`` with the documents' boundaries. It is made from the
tokens, so every pipeline stage asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mindspeed_core.layer_spec import SpecEditor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mindspeed_core.session import Session


def describe(tokens: torch.Tensor | None, separator: int) -> PackedSeqParams:
    """The documents of ``tokens`` ``[1, s]``, each of which ends with the separator."""
    assert tokens is not None
    ends = (tokens[0] == separator).nonzero().flatten() + 1
    length = tokens.new_tensor([tokens.shape[1]])
    boundaries = torch.cat([tokens.new_tensor([0]), ends, length]).unique().to(torch.int32)
    longest = int(boundaries.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def visible(boundaries: torch.Tensor) -> torch.Tensor:
    """``[s, s]`` bool: whether the row's token may look at the column's."""
    positions = torch.arange(int(boundaries[-1]), device=boundaries.device)
    document = torch.searchsorted(boundaries, positions, right=True)
    same = document[:, None] == document[None, :]
    return same & (positions[:, None] >= positions[None, :])


class DocumentAttention(DotProductAttention):
    """Causal attention within the documents that ``packed_seq_params`` describes, computed densely."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Query, key and value are ``[s, n, d]``; the result is ``[s, n * d]``."""
        if packed_seq_params is None:
            raise RuntimeError("toy-documents: attention got no description of its documents")
        scores = torch.einsum("qnd,knd->nqk", query, key) * self.softmax_scale
        scores = scores.masked_fill(~visible(packed_seq_params.cu_seqlens_q), float("-inf"))
        mixed = torch.einsum("nqk,knd->qnd", scores.softmax(dim=-1), value)
        return mixed.flatten(1)


def replace_attention(
    spec: TransformerBlockSubmodules, session: Session, *, owner: str
) -> TransformerBlockSubmodules:
    """Put `DocumentAttention` into every layer."""
    editor = SpecEditor(spec, owner=owner, session=session)
    editor.replace("core_attention", lambda site: site.carry(DocumentAttention))
    return editor.spec
