"""Flash attention as the core attention of megatron-core's attention modules, and its placement."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mindspeed_core.layer_spec import SpecEditor
from mindspeed_kernels.ops import attention

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session

logger = logging.getLogger(__name__)

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


class FlashCoreAttention(MegatronModule):
    """Attention between this rank's heads without a score matrix and without a mask tensor.

    Takes the place of megatron-core's ``DotProductAttention``: query ``[sq, b, n/tp, d]``, key and value
    ``[sk, b, g/tp, d]``, result ``[sq, b, n/tp * dv]``. It has no parameters.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        """Read the configuration; ``k_channels`` and ``v_channels`` come from multi-latent attention.

        Args:
            config: dropout, window and parallelism are read from here.
            layer_number: number in the whole model from 1; decides whether a window applies.
            attn_mask_type: causal or no_mask.
            attention_type: ``"self"`` or ``"cross"``.
            attention_dropout: overrides ``config.attention_dropout``.
            softmax_scale: factor of the scores; by default ``1 / sqrt(d)``.
            cp_comm_type: without meaning here.
            pg_collection: without meaning here: heads do not talk to each other.
            k_channels: width of query and key heads; read from the tensors.
            v_channels: width of value heads; read from the tensors.

        Raises:
            ValueError: context parallelism, or a softmax with an offset.
        """
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"--use-flash-attn attends within one rank, but --context-parallel-size is "
                f"{config.context_parallel_size}; use a context-parallel attention feature instead"
            )
        softmax_type = getattr(config, "softmax_type", "vanilla")
        if softmax_type != "vanilla":
            raise ValueError(
                f"--use-flash-attn computes the plain softmax, but softmax_type is {softmax_type!r}; drop one"
            )
        self.attn_mask_type = attn_mask_type
        # megatron-core divides the scores by the layer number and multiplies them again inside its softmax
        # when apply_query_key_layer_scaling is set, against overflow in half precision; here the scores
        # never leave float32, so there is nothing to scale.
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        skip = getattr(config, "window_attn_skip_freq", None)
        windowed = is_layer_window_attention(config.window_size, skip, layer_number)
        self.window: tuple[int, int] | None = tuple(config.window_size) if windowed else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[sq, b, n/tp, d]``.
            key: ``[sk, b, g/tp, d]``.
            value: ``[sk, b, g/tp, dv]``.
            attention_mask: must be None; the mask follows from ``attn_mask_type``.
            attn_mask_type: overrides the constructor's.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Returns:
            ``[sq, b, n/tp * dv]`` in the dtype of ``query``.

        Raises:
            ValueError: a mask, bias or packing that the operator does not compute.
        """
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if packed_seq_params is not None:
            raise ValueError("--use-flash-attn does not know packed sequences; drop it for packed data")
        if attention_bias is not None:
            raise ValueError("--use-flash-attn adds no attention bias; drop it for a model with one")
        if attention_mask is not None or kind not in _CAUSAL:
            raise ValueError(
                "--use-flash-attn knows causal and full attention only, but got "
                f"{'a mask tensor' if attention_mask is not None else kind}; drop "
                "--create-attention-mask-in-dataloader and --reset-attention-mask, or --use-flash-attn"
            )
        dropout = self.dropout if self.training else 0.0
        with self._random_state(dropout):
            context = attention(
                query,
                key,
                value,
                scale=self.softmax_scale,
                causal=_CAUSAL[kind],
                window=self.window,
                dropout=dropout,
            )
        return context.reshape(*context.shape[:2], -1)

    def _random_state(self, dropout: float) -> AbstractContextManager[Any]:
        # Tensor-parallel ranks hold different heads, which must drop different weights; under sequence
        # parallelism the surrounding code runs in the ranks' own state already.
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


def place_attention(session: Session, spec: Any) -> Any:
    """The tree with `FlashCoreAttention` as the core of every attention."""
    editor = SpecEditor(spec, owner="flash-attn", session=session)
    editor.replace("core_attention", FlashCoreAttention)
    return editor.spec


def without_attention_recompute(config: Any) -> Any:
    """Drop ``core_attn`` from selective recompute: it saves the score matrix, which does not exist here."""
    modules = getattr(config, "recompute_modules", None)
    if config.recompute_granularity == "selective" and modules and "core_attn" in modules:
        config.recompute_modules = [name for name in modules if name != "core_attn"]
        logger.warning(
            "--recompute-granularity selective: attention is not recomputed, --use-flash-attn keeps no scores"
        )
    return config
