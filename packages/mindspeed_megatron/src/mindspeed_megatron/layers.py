"""Default specifications of a model chunk: its decoder layers, and its multi-token prediction."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.broken_packages import why_unusable
from mindspeed_megatron.corrections import holds
from mindspeed_megatron.experts import ExpertOutput, PlainExperts
from mindspeed_megatron.latent_attention import LatentCoreAttention, LatentSelfAttention
from mindspeed_megatron.layer_patterns import PATTERNS, spelled_out
from mindspeed_megatron.layer_sites import Site
from mindspeed_megatron.layer_spec import NORM_ROLES, SpecEditor
from mindspeed_megatron.plain_norm import PlainNorm


@hookimpl(trylast=True)
def build_layer_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Build megatron-core's own layers, with parts that also work sharded."""
    use_te = _uses_te(args)
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization=args.normalization,
        # megatron-core 0.15 has no field, and so no flag, for it.
        qk_l2_norm=getattr(args, "qk_l2_norm", False),
        vp_stage=vp_stage,
    )
    return with_residuals(spec if use_te else plain_parts(spec, config), config)


@hookimpl(trylast=True)
def build_mtp_spec(
    args: Namespace, config: TransformerConfig, layer_spec: TransformerBlockSubmodules, vp_stage: int | None
) -> Any:
    """Prediction layers like the decoder's last layer."""
    use_te = _uses_te(args)
    spec = get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=use_te, vp_stage=vp_stage)
    return with_residuals(spec if use_te else plain_parts(spec, config), config)


def of_last_layer(config: TransformerConfig) -> TransformerConfig:
    """Return a changed copy: the configuration of a model of the last layer alone, on one stage."""
    one = copy.copy(config)
    patterns = {name: getattr(config, name, None) for name in PATTERNS}
    patterns |= spelled_out({"num_layers": config.num_layers, **patterns})
    for name, chosen in patterns.items():
        if isinstance(chosen, list):
            setattr(one, name, chosen[-1:])
    one.num_layers, one.pipeline_model_parallel_size = 1, 1
    one.virtual_pipeline_model_parallel_size = one.pipeline_model_parallel_layout = None
    one.num_layers_in_first_pipeline_stage = one.num_layers_in_last_pipeline_stage = None
    one.account_for_embedding_in_pipeline_split = one.account_for_loss_in_pipeline_split = False
    return one


def _uses_te(args: Namespace) -> bool:
    """Return whether layers are TransformerEngine's.

    Raises:
        ArgumentError: it is installed, and cannot be imported.
    """
    if args.transformer_impl != "transformer_engine":
        return False
    problem = why_unusable("transformer_engine")
    if problem:
        remedy = "mend or uninstall transformer-engine, or pass --transformer-impl local"
        raise ArgumentError("--transformer-impl", args.transformer_impl, problem, remedy)
    return True


def with_residuals(spec: Any, config: TransformerConfig) -> Any:
    """Keep the residual stream in its dtype: a changed copy of the tree with ``fp32_residual_connection``.

    megatron-core converts the residual to the dtype of what is added to it, so that nothing of the option is
    left after the first sum, and pipeline stages disagree about the dtype of what they exchange.
    """
    if not config.fp32_residual_connection or not holds("residual-dtype"):
        return spec
    editor = SpecEditor(spec, owner="")
    editor.replace(("self_attn_bda", "mlp_bda"), ModuleSpec(module=residual_dropout_add))
    return editor.spec


def residual_dropout_add(
    training: bool, fused: bool
) -> Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]:
    """Return megatron-core's ``get_bias_dropout_add`` with the sum in the residual's dtype.

    Args:
        training: whether values are dropped.
        fused: accepted; there is nothing to fuse.

    Returns:
        A function of an output ``[s, b, h]`` and its bias ``[h]`` or None, the residual ``[s, b, h]`` and the
        share of dropped values.
    """

    def add(
        output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, share: float
    ) -> torch.Tensor:
        values, bias = output
        if bias is not None:
            values = values + bias
        return residual + torch.nn.functional.dropout(values, p=share, training=training).to(residual.dtype)

    return add


def plain_parts(spec: Any, config: TransformerConfig) -> Any:
    """Replace, in a copy of the tree, the parts of megatron-core's local layers that not every layout allows.

    Norms without sequence parallelism, experts whose copies drift apart, and an attention that knows one
    width for keys and values.
    """
    editor = SpecEditor(spec, owner="")
    editor.replace(NORM_ROLES, _norm)
    editor.replace("experts", _in_place_of(SequentialMLP, PlainExperts))
    if config.add_bias_linear:
        editor.replace("experts.fc2", _in_place_of(RowParallelLinear, ExpertOutput))
    if config.multi_latent_attention:
        editor.replace("core_attention", _in_place_of(DotProductAttention, LatentCoreAttention))
        editor.replace("self_attention", _in_place_of(MLASelfAttention, LatentSelfAttention))
    return editor.spec


def _norm(site: Site) -> ModuleSpec | None:
    module = _module(site)
    # A prediction layer is a copy of the decoder's last one, where a feature may have put a norm of its own.
    theirs = getattr(module, "__module__", "").startswith("megatron.")
    # The norm of length has no weights, and works everywhere.
    return ModuleSpec(module=PlainNorm) if theirs and module is not L2Norm else None


def _in_place_of(theirs: type, ours: type) -> Callable[[Site], ModuleSpec | None]:
    return lambda site: site.carry(ours) if _module(site) is theirs else None


def _module(site: Site) -> Any:
    return site.spec.module if site.spec is not None else None
