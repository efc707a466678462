"""Attention over a split sequence as megatron-core's core attention, and its placement."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mindspeed_core.errors import UserError
from mindspeed_cp import attention_flags
from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.scores import Dropout
from mindspeed_cp.modules.batch import SplitBatch
from mindspeed_cp.modules.members import members_of
from mindspeed_cp.options import CPOptions, cp_options
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_megatron.sharded_modules import sharded_tensors

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session


def add_offset(module: nn.Module, config: TransformerConfig, heads_group: Callable[[], Any]) -> None:
    """Give a core attention ``softmax_offset``, ``[n / tp]`` or None, by the kind that its configuration has.

    It is a further score of every row, without value, under the name and in the shards that megatron-core
    gives it: ``--softmax-type off-by-one`` makes it zero, ``learnable`` a parameter for each head.

    Raises:
        ValueError: there is no such kind.
    """
    kind = getattr(config, "softmax_type", "vanilla")
    if kind == "vanilla":
        module.register_parameter("softmax_offset", None)
        return
    if kind not in ("off-by-one", "learnable"):
        raise ValueError(f"--softmax-type {kind} is none of vanilla, off-by-one, learnable")
    offset = torch.zeros(config.num_attention_heads // heads_group().size(), dtype=config.params_dtype)
    if kind == "off-by-one":
        module.register_buffer("softmax_offset", offset, persistent=False)
        return
    learned = nn.Parameter(offset)
    # Each rank has those of its heads, which the gradient norm counts everywhere.
    set_tensor_model_parallel_attributes(learned, True, 0, 1)
    module.register_parameter("softmax_offset", learned)
    if config.perform_initialization:
        config.init_method(learned)


class SplitCoreAttention(MegatronModule):
    """Attention between this rank's tokens and those of all ranks of context parallelism.

    Takes the place of megatron-core's ``DotProductAttention``: query ``[s/cp, b, n/tp, d]``, key and value
    ``[s/cp, b, g/tp, d]``, result ``[s/cp, b, n/tp * dv]``. Its parameter is
    ``softmax_offset``, where the configuration has a learnable one.
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
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        options: CPOptions | None = None,
        members: Callable[[], Members] | None = None,
        band: int | None = None,
        slopes: Sequence[float] | None = None,
        root: bool = False,
    ) -> None:
        """Read the configuration.

        Args:
            config: dropout, window and softmax are read from here.
            layer_number: number in the whole model from 1.
            attn_mask_type: causal or not, where a call does not say.
            attention_type: ``"self"``.
            attention_dropout: overrides ``config.attention_dropout``.
            softmax_scale: factor of the scores; by default ``1 / sqrt(d)``.
            cp_comm_type: without meaning here.
            pg_collection: the tensor-parallel group; by default megatron-core's.
            k_channels: read from the tensors.
            v_channels: read from the tensors.
            options: what flags say.
            members: gives this rank's groups.
            band: keys before its own that a causal query sees, where the configuration has no window.
            slopes: of the biases by distance, one for every head of the model.
            root: the biases take the root of the distance.

        Raises:
            ValueError: cross attention, or no softmax that megatron-core has.
        """
        super().__init__(config=config)
        if attention_type != "self" or options is None or members is None:
            raise ValueError("attention over a split sequence is self attention, placed by a session")
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = self._window(config, layer_number)
        self.band = band
        self.slopes, self.root = slopes, root
        self.options = options
        self._members = members
        self._tp_group = getattr(pg_collection, "tp", None)
        self.softmax_offset: Tensor | None
        add_offset(self, config, self._heads_group)

    @staticmethod
    def _window(config: TransformerConfig, layer_number: int) -> int | None:
        from megatron.core.transformer.utils import is_layer_window_attention

        skip = getattr(config, "window_attn_skip_freq", None)
        if not is_layer_window_attention(config.window_size, skip, layer_number):
            return None
        before, behind = config.window_size
        if behind not in (0, -1):
            raise ValueError(f"--window-size {before},{behind} looks ahead, which a causal model does not")
        return None if before < 0 else int(before)

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
        """Attend; see the class.

        Raises:
            UserError: a mask or a bias tensor was given, or no description of the batch.
        """
        if attention_mask is not None or attention_bias is not None:
            raise UserError(
                "attention over documents or a split sequence makes its masks itself, and was given the "
                "tensor of a mask or bias: pass None, or leave out --reset-attention-mask and "
                "--context-parallel-size"
            )
        described = isinstance(packed_seq_params, SplitBatch)
        batch: SplitBatch = packed_seq_params if described else self._undescribed(query, key)
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        rules = tuple(self._rule(rule, kind, batch.stated) for rule in batch.rules)
        heads, width = query.shape[2], query.shape[3]
        call = CallOptions(
            scale=self.softmax_scale or 1.0 / math.sqrt(width),
            first_head=self._tp_rank() * heads,
            slopes=self._own_slopes(heads, query.device),
            root=self.root,
            dropout=self._dropout(batch),
            sink=self.softmax_offset,
            kept=self.options.kept(self.layer_number) if self.training else "none",
        )
        q, k, v = (tensor.permute(1, 2, 0, 3).contiguous() for tensor in (query, key, value))
        output = split_attention(q, k, v, rules, self._members(), self.options, call, batch.rules)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _undescribed(self, query: Tensor, key: Tensor) -> SplitBatch:
        """Describe a batch that nobody described: outside of training each sample is one whole document.

        Raises:
            UserError: in training, or where a sequence is split, or not all of its tokens are here.
        """
        if self.training or self.options.grid.ranks > 1:
            raise UserError(
                "attention over documents or a split sequence got a batch without the description that the "
                "stage get_batch gives it (session.batch in a loop of your own): pass batches through it; in "
                "inference use --context-parallel-size 1, with which any checkpoint loads"
            )
        if len(query) != len(key):
            raise UserError(
                "attention that keeps documents apart has no cache of keys: leave --reset-attention-mask and "
                "--fix-sub-seq-length out where text is generated with one"
            )
        return _one_document(len(query))

    def _rule(self, rule: MaskRule, kind: AttnMaskType, stated: bool) -> MaskRule:
        """Return the rule of this layer: with its window, and causal as it is where the rule does not say."""
        causal = rule.causal if stated else kind in (AttnMaskType.causal, AttnMaskType.padding_causal)
        window = self.band if self.window is None and causal else self.window
        if window is None and stated:
            window = rule.window
        if rule.causal == causal and rule.window == window:
            return rule
        return _with_window(rule, causal, window)

    def _dropout(self, batch: SplitBatch) -> Dropout | None:
        if not (self.training and self.dropout > 0.0):
            return None
        return Dropout(self.dropout, batch.seed * 1_000_003 + self.layer_number, batch.first_sample)

    def _own_slopes(self, heads: int, device: torch.device) -> Tensor | None:
        """Return the slopes of this tensor-parallel rank's heads, ``[n / tp]`` float32."""
        if self.slopes is None:
            return None
        first = self._tp_rank() * heads
        return torch.tensor(self.slopes[first : first + heads], dtype=torch.float32, device=device)

    def _tp_rank(self) -> int:
        rank: int = self._heads_group().rank()
        return rank

    def _heads_group(self) -> Any:
        """Return the tensor-parallel group, which shares the heads."""
        return self._tp_group or parallel_state.get_tensor_model_parallel_group()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the learnable offset of the softmax, sharded as in megatron-core's core attention."""
        state, axes = self.state_dict(prefix="", keep_vars=True), {"softmax_offset": 0}
        return sharded_tensors(
            state, prefix, axes, sharded_offsets, tp_group=self._heads_group(), metadata=metadata
        )


def place_attention(session: Session, args: Namespace, spec: Any, owner: str) -> Any:
    """Return the tree with `SplitCoreAttention` in every attention."""
    editor = SpecEditor(spec, owner=owner, session=session)
    asked, options = session.plan.arguments, cp_options(args)
    params = {
        "band": attention_flags.band(asked, args.seq_length),
        "slopes": _slopes(args.num_attention_heads) if attention_flags.alibi(asked) else None,
        "root": attention_flags.alibi(asked) and asked.get("alibi_fusion_attn_type") == 3,
        "options": options,
        # A function, since specifications are copied deeply and groups cannot be; asked once for all layers.
        "members": cache(lambda: members_of(session, options, parallel_state.get_context_parallel_group())),
    }

    def chosen(site: Any) -> ModuleSpec:
        old = dict(site.spec.params) if site.spec is not None else {}
        return ModuleSpec(module=SplitCoreAttention, params={**old, **params})

    editor.replace("core_attention", chosen)
    return editor.spec


@lru_cache(maxsize=64)
def _one_document(length: int) -> SplitBatch:
    return SplitBatch(qkv_format="sbhd", rules=(MaskRule(length),))


@lru_cache(maxsize=64)
def _with_window(rule: MaskRule, causal: bool, window: int | None) -> MaskRule:
    """Return a changed rule, the same object for all layers: what is planned for it stays."""
    return replace(rule, causal=causal, window=window)


def _slopes(heads: int) -> list[float]:
    # Its flag is declared there: the package is installed.
    from mindspeed_kernels.attention.bias import alibi_slopes

    return alibi_slopes(heads)
