"""Fused attention as the core attention of megatron-core's attention modules, and its placement."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mindspeed_kernels.attention.bias import COMPRESSED_ROWS, alibi_slopes
from mindspeed_kernels.attention.mask_store import STORE
from mindspeed_kernels.attention.visibility import UNLIMITED
from mindspeed_kernels.ops import npu_fusion_attention
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_megatron.sharded_modules import sharded_tensors

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session

logger = logging.getLogger(__name__)

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_ENDS = "_mindspeed_sequence_ends"


@dataclass(frozen=True)
class AttentionOptions:
    """Options of the core attention, from flags.

    Attributes:
        sparse_mode: of causal attention, see `mindspeed_kernels.attention.visibility`.
        pre_tokens: keys before the position, for the modes 0, 4, 7 and 8.
        next_tokens: keys behind it.
        alibi: kind of the bias by distance: 0 a tensor of biases, 2 slopes, 3 slopes and the root of the
            distance; None for no bias.
        version: version of the kernel on NPUs, 1 or 2.
    """

    sparse_mode: int = 0
    pre_tokens: int = UNLIMITED
    next_tokens: int = 0
    alibi: int | None = None
    version: int = 1


class FusedCoreAttention(MegatronModule):
    """Attention between this rank's heads without a score matrix and without a mask tensor.

    Takes the place of megatron-core's ``DotProductAttention``: query ``[sq, b, n/tp, d]``, key and value
    ``[sk, b, g/tp, d]``, result ``[sq, b, n/tp * dv]``; packed sequences ``[t, n/tp, d]`` likewise. Its only
    parameter is ``softmax_offset``, where the configuration has a learnable one.
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
        options: AttentionOptions | None = None,
    ) -> None:
        """Read the configuration; ``k_channels`` and ``v_channels`` come from multi-latent attention.

        Args:
            config: dropout, window, softmax and parallelism are read from here.
            layer_number: number in the whole model from 1; decides whether a window applies.
            attn_mask_type: what is visible where a call does not say.
            attention_type: ``"self"`` or ``"cross"``.
            attention_dropout: overrides ``config.attention_dropout``.
            softmax_scale: factor of the scores; by default ``1 / sqrt(d)``.
            cp_comm_type: without meaning here.
            pg_collection: the tensor-parallel group; by default megatron-core's.
            k_channels: width of query and key heads; read from the tensors.
            v_channels: width of value heads; read from the tensors.
            options: what flags say.

        Raises:
            ValueError: context parallelism, or a window besides a sparse mode.
        """
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"--use-flash-attn attends within one rank, but --context-parallel-size is "
                f"{config.context_parallel_size}; use a context-parallel attention feature instead"
            )
        self.options = options or AttentionOptions()
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        # megatron-core divides the scores by the layer number and multiplies them again inside its softmax
        # when apply_query_key_layer_scaling is set, against overflow in half precision; here the scores
        # never leave float32, so there is nothing to scale.
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        skip = getattr(config, "window_attn_skip_freq", None)
        windowed = is_layer_window_attention(config.window_size, skip, layer_number)
        self.window: tuple[int, int] | None = tuple(config.window_size) if windowed else None
        if self.window is not None and self.options.sparse_mode not in (0, 2, 3):
            raise ValueError(
                f"--sparse-mode {self.options.sparse_mode} says what queries see, and so does --window-size; "
                "drop one"
            )
        self.pg_collection = pg_collection
        self._slopes: Tensor | None = None
        self._make_offset(config)

    def _make_offset(self, config: TransformerConfig) -> None:
        """Set ``softmax_offset``: a further score of every row, without value, as megatron-core has it."""
        kind = getattr(config, "softmax_type", "vanilla")
        self.softmax_offset: Tensor | None
        if kind == "vanilla":
            self.softmax_offset = None
            return
        if kind not in ("off-by-one", "learnable"):
            raise ValueError(f"softmax_type {kind!r} is none of vanilla, off-by-one, learnable")
        heads = config.num_attention_heads // self._tp_group().size()
        offset = torch.zeros(heads, dtype=config.params_dtype)
        if kind == "off-by-one":
            self.register_buffer("softmax_offset", offset, persistent=False)
            return
        self.softmax_offset = torch.nn.Parameter(offset)
        # Each rank has those of its heads, which the gradient norm counts everywhere.
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def _tp_group(self) -> Any:
        """Return the tensor-parallel group; it is looked up only where heads must be known."""
        if self.pg_collection is None:
            self.pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp"])
        return self.pg_collection.tp

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
            query: ``[sq, b, n/tp, d]``, packed ``[t, n/tp, d]``.
            key: ``[sk, b, g/tp, d]``, packed ``[t, g/tp, d]``.
            value: ``[sk, b, g/tp, dv]``, packed ``[t, g/tp, dv]``.
            attention_mask: ``[b | 1, 1, sq, sk]`` bool, True hides, instead of what ``attn_mask_type`` says.
                A causal model without one takes the mask of ``set_attention_mask``.
            attn_mask_type: overrides the constructor's.
            attention_bias: ``[b | 1, n/tp, sq, sk]``, added to the scaled scores.
            packed_seq_params: where each packed sequence ends.

        Returns:
            ``[sq, b, n/tp * dv]`` in the dtype of ``query``, packed ``[t, n/tp * dv]``.

        Raises:
            ValueError: flags do not go together with what the model asks for.
        """
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        given: dict[str, Any] = {"scale": self.softmax_scale or 1.0 / math.sqrt(query.shape[-1])}
        if packed_seq_params is not None:
            layout = "TND"
            given |= self._packed(query, kind, packed_seq_params)
        else:
            layout = "SBND"
            if attention_mask is None and kind in _CAUSAL:
                attention_mask = STORE.given_on(query.device)
            given |= self._visible(kind, query.shape[0], key.shape[0], attention_mask)
        given |= self._bias(query, key, attention_bias, given["sparse_mode"])
        if self.softmax_offset is not None:
            given["sink"] = self.softmax_offset
        if self.options.version == 2 and "pse" not in given:
            # Start positions select the second version of the kernel and change nothing without a bias.
            given |= {"q_start_idx": 0, "kv_start_idx": 0}
        dropout = self.dropout if self.training else 0.0
        with self._random_state(dropout):
            context = npu_fusion_attention(
                query, key, value, query.shape[-2], layout, keep_prob=1.0 - dropout, **given
            )[0]
        return context.flatten(-2)

    def _visible(self, kind: AttnMaskType, sq: int, sk: int, mask: Tensor | None) -> dict[str, Any]:
        """Return the options that say what queries see."""
        mode = self.options.sparse_mode
        if mode in (7, 8) and self.training:
            raise ValueError(f"--sparse-mode {mode} is for packed sequences, but this batch has none; use 2")
        band = self._own_band(sk)
        if mask is not None:
            if self.window is not None:
                raise ValueError("--window-size and a mask tensor both say what queries see; drop one")
            hidden = mask if band is None else mask | _outside(*band, sq, sk, mask.device)
            return {"sparse_mode": 1, "atten_mask": hidden}
        if kind not in _CAUSAL:
            if kind is AttnMaskType.arbitrary:
                raise ValueError(f"attention of kind {kind} needs a mask tensor")
            if self.window is not None:
                return self._window_of(None, sq, sk)
            # A token behind cached keys: megatron-core names no mask, and all keys stand before it.
            cached = not self.training and self.attn_mask_type in _CAUSAL
            return self._band(*band) if cached and band is not None else {"sparse_mode": 0}
        if self.window is not None:
            return self._window_of(0, sq, sk)
        if band is not None:
            return self._band(*band)
        return {"sparse_mode": 2 if sq == sk else 3}

    def _own_band(self, sk: int) -> tuple[int, int] | None:
        """Return how many keys before and behind its own a query sees by the flags; None where all before it.

        Modes 7 and 8 say so of the last and of the first sequence of a pack; outside of training a text is
        both.
        """
        mode, pre, following = self.options.sparse_mode, self.options.pre_tokens, self.options.next_tokens
        if mode in (4, 7, 8):
            return pre, following
        return (pre, min(0, following)) if mode == 0 and pre < sk - 1 else None

    def _window_of(self, right: int | None, sq: int, sk: int) -> dict[str, Any]:
        assert self.window is not None
        before, behind = (UNLIMITED if side < 0 else side for side in self.window)
        behind = behind if right is None else min(behind, right)
        if before >= sk - 1 and behind == 0:
            return {"sparse_mode": 2 if sq == sk else 3}
        return self._band(before, behind)

    @staticmethod
    def _band(before: int, behind: int) -> dict[str, Any]:
        return {"sparse_mode": 4, "pre_tokens": before, "next_tokens": behind}

    def _packed(self, query: Tensor, kind: AttnMaskType, packed: PackedSeqParams) -> dict[str, Any]:
        """Return the options of packed sequences; lists of ends are made once per batch."""
        if packed.qkv_format not in (None, "thd"):
            raise ValueError(f"packed sequences come as thd, got {packed.qkv_format!r}")
        causal = kind in _CAUSAL
        if causal and STORE.given is not None:
            raise ValueError("set_attention_mask gave a mask of one sample; packed sequences take none")
        ends = getattr(packed, _ENDS, None)
        if ends is None:
            ends = _sequence_ends(packed, query.shape[0], causal)
            setattr(packed, _ENDS, ends)
        given: dict[str, Any] = {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
        mode = self.options.sparse_mode
        if self.window is not None:
            before, behind = (UNLIMITED if side < 0 else side for side in self.window)
            return given | self._band(before, 0 if causal else behind)
        if not causal:
            return given | {"sparse_mode": 0}
        if mode in (4, 7, 8) or (mode == 0 and self.options.pre_tokens < query.shape[0] - 1):
            band = self._band(self.options.pre_tokens, min(0, self.options.next_tokens))
            return given | band | {"sparse_mode": mode or 4}
        return given | {"sparse_mode": 3}

    def _bias(self, query: Tensor, key: Tensor, bias: Tensor | None, mode: int) -> dict[str, Any]:
        """Return the options of what is added to the scores."""
        kind = self.options.alibi
        if kind is None:
            return {} if bias is None else {"pse": bias, "pse_type": 0}
        if bias is not None:
            raise ValueError(
                "--position-embedding-type alibi is a bias of attention, and the model has another"
            )
        if mode in (7, 8):
            raise ValueError(f"--sparse-mode {mode} takes no bias, but --position-embedding-type is alibi")
        slopes = self._own_slopes(query.device)
        if kind in (2, 3) or query.dim() == 3:
            # The position of the first query: fewer queries than keys are the last ones.
            start = 0 if query.dim() == 3 else key.shape[0] - query.shape[0]
            return {"pse": slopes, "pse_type": 3 if kind == 3 else 2, "q_start_idx": start, "kv_start_idx": 0}
        sq, sk = query.shape[0], key.shape[0]
        # Rows differ by a shift only; the last ones say everything where the kernel knows the short form.
        count = min(sq, COMPRESSED_ROWS) if sq == sk and mode in (0, 2, 3) else sq
        rows = torch.arange(sk - count, sk, device=query.device)
        distance = (rows.unsqueeze(1) - torch.arange(sk, device=query.device)).abs()
        return {"pse": (-slopes[:, None, None] * distance)[None], "pse_type": 0}

    def _own_slopes(self, device: torch.device) -> Tensor:
        """Return the slopes of this rank's query heads, ``[n/tp]`` float32."""
        if self._slopes is None or self._slopes.device != device:
            group, every = self._tp_group(), alibi_slopes(self.config.num_attention_heads)
            heads = len(every) // group.size()
            first = group.rank() * heads
            self._slopes = torch.tensor(every[first : first + heads], device=device)
        return self._slopes

    def _random_state(self, dropout: float) -> AbstractContextManager[Any]:
        # Tensor-parallel ranks hold different heads, which must drop different weights; under sequence
        # parallelism the surrounding code runs in the ranks' own state already.
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the learnable offset of the softmax, cut by heads, under megatron-core's name for it."""
        state, axes = self.state_dict(prefix="", keep_vars=True), {"softmax_offset": 0}
        return sharded_tensors(
            state, prefix, axes, sharded_offsets, tp_group=self._tp_group(), metadata=metadata
        )


def _outside(before: int, behind: int, sq: int, sk: int, device: torch.device) -> Tensor:
    """Return the keys outside of a band ``[1, 1, sq, sk]`` bool; the last query stands at the last key."""
    rows = torch.arange(sk - sq, sk, device=device)
    distance = rows[:, None] - torch.arange(sk, device=device)
    return ((distance > before) | (distance < -behind))[None, None]


def _sequence_ends(packed: PackedSeqParams, tokens: int, causal: bool) -> tuple[list[int], list[int]]:
    """Return where packed queries and keys end, without leading zero, padding included.

    Raises:
        ValueError: padding would take part in attention that is not causal.
    """
    found = []
    for side in ("q", "kv"):
        exact = getattr(packed, f"cu_seqlens_{side}")
        padded = getattr(packed, f"cu_seqlens_{side}_padded", None)
        starts = (exact if padded is None else padded).tolist()
        if not causal and padded is not None and starts != exact.tolist():
            raise ValueError("packed sequences with padding need causal attention, which never looks at it")
        ends = starts[1:]
        # Tokens behind the last sequence are padding; they attend to each other and to nobody else.
        found.append(ends if ends and ends[-1] == tokens else [*ends, tokens])
    return found[0], found[1]


def options_from_flags(args: Namespace, active: tuple[str, ...] = ()) -> AttentionOptions:
    """Read the flags of the core attention; those that are not there have their defaults."""
    default = AttentionOptions()
    pre, following = getattr(args, "pre_tockens", None), getattr(args, "next_tockens", None)
    return AttentionOptions(
        sparse_mode=getattr(args, "sparse_mode", None) or default.sparse_mode,
        pre_tokens=default.pre_tokens if pre is None else pre,
        next_tokens=default.next_tokens if following is None else following,
        alibi=args.alibi_fusion_attn_type if {"alibi", "alibi-tensor"} & set(active) else None,
        version=2 if "fusion-attn-v2" in active else 1,
    )


def place_attention(session: Session, spec: Any, options: AttentionOptions | None = None) -> Any:
    """Return the tree with `FusedCoreAttention` as the core of every attention."""
    editor = SpecEditor(spec, owner="flash-attn", session=session)
    editor.replace(
        "core_attention", lambda site: site.carry(FusedCoreAttention, options=options or AttentionOptions())
    )
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
