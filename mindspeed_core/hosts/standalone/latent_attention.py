"""The core of multi-latent attention on megatron-core's own layers.

Its keys are wider than its values, which megatron-core's plain attention supports in everything but its
constructor and the width of its result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.dot_product_attention import DotProductAttention

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
        """Build the attention.

        Args:
            config: the model's configuration.
            args: as for megatron-core's plain attention.
            k_channels: width of a query's or key's head; the tensors say it themselves.
            v_channels: width of a value's head; None for the configuration's.
            options: as for megatron-core's plain attention.
        """
        super().__init__(config, *args, **options)
        if v_channels is not None:
            self.hidden_size_per_attention_head = v_channels
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
