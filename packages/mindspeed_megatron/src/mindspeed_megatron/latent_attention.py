"""Multi-latent attention on megatron-core's own layers.

Its keys are wider than its values, which megatron-core's plain attention supports in everything but its
constructor and the width of its result; one gradient of it is incomplete under tensor parallelism; and newer
versions refuse the norm of compressed keys where queries are not compressed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class LatentCoreAttention(DotProductAttention):
    """Plain attention whose keys and values have widths of their own."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        """Build the attention as megatron-core's, with heads of values of another width.

        ``k_channels``, the width of the heads of queries and keys, is not needed: the tensors say it.
        """
        super().__init__(config, *args, **options)
        if v_channels is not None:
            self.hidden_size_per_attention_head = v_channels
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentSelfAttention(MLASelfAttention):
    """Multi-latent attention whose shared key positions learn from the heads of every tensor-parallel rank.

    The compressed keys and the one key of positions come from a linear that is cut over the ranks, and are
    gathered. The gradient of what is gathered is cut again, which is right for the compressed keys, whose
    gradient is the same on every rank; that of the positions is the sum over a rank's own heads only, and has
    to be added up first. megatron-core leaves that out.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Build the attention; the arguments are those of megatron-core's."""
        super().__init__(*args, **options)
        if self.pg_collection.tp.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._complete)
        if self.config.sequence_parallel:
            self.linear_kv_up_proj.register_forward_pre_hook(_with_contiguous_rows)

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        """Choose projections and norms; megatron-core asks since 0.19.

        Queries that are not compressed have no norm here, and compressed keys keep theirs, as in every
        version before. 0.19 refuses a specification with a norm for such queries, which its own local one
        has, and without that norm it wants a linear of TransformerEngine.
        """
        if self.config.q_lora_rank is not None or not self.config.qk_layernorm or self.config.qk_l2_norm:
            return super()._resolve_qk_norm_config(submodules)
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _complete(self, linear: Module, inputs: Any, result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Turn ``[s, b, (kv+p)/tp]`` into ``[s, b, kv+p]``, or ``[s/tp, b, kv+p]`` when cut.

        Given whole rows, megatron-core gathers nothing but the positions of a sharded sequence, with the
        right gradient.
        """
        group = self.pg_collection.tp
        whole = gather_from_tensor_model_parallel_region(result[0], group=group)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole, group=group), result[1]
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        compressed, positions = torch.split(whole, widths, dim=-1)
        positions = _SumOverRanks.apply(positions, group)
        return torch.cat((compressed, positions), dim=-1), result[1]


def _with_contiguous_rows(linear: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy rows ``[s/tp, b, kv]`` that were split from the positions, where no norm did so before.

    The linear gathers its input as it is, and neither NCCL nor HCCL gathers tensors with gaps.
    """
    rows, *others = arguments
    return rows.contiguous(), *others


class _SumOverRanks(torch.autograd.Function):
    """Identity whose gradient is summed; megatron-core's own reduces a copy where it has strides."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None
