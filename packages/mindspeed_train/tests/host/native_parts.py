"""megatron-core's own parts in place of the host's: what a run does without the host's corrections."""

from __future__ import annotations

from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from mindspeed_core.feature import hookimpl
from mindspeed_megatron.layer_spec import SpecEditor


def replaced(spec, roles, new):
    """A copy of a specification tree with other parts."""
    editor = SpecEditor(spec, owner="")
    editor.replace(roles, new)
    return editor.spec


class NativeExperts:
    """Sequential experts as megatron-core builds them."""

    @hookimpl(wrapper=True)
    def build_layer_spec(self):
        return replaced((yield), "experts", lambda site: site.carry(SequentialMLP))

    @hookimpl(wrapper=True)
    def wrap_ddp(self, config, model):
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if ".local_experts." in name:
                    parameter.allreduce = config.expert_model_parallel_size == 1
        return (yield)


class NativeBias:
    """Experts that are megatron-core's but for the sum of their gradients."""

    @hookimpl(wrapper=True)
    def wrap_ddp(self, model):
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
                    module.bias.tensor_model_parallel = False
        return (yield)


class NativeLatentAttention:
    """Multi-latent attention as megatron-core builds it."""

    @hookimpl(wrapper=True)
    def build_layer_spec(self):
        return replaced((yield), "self_attention", lambda site: site.carry(MLASelfAttention))


class NativeResiduals:
    """Layers that add to the residual stream as megatron-core does."""

    @hookimpl(wrapper=True)
    def build_layer_spec(self):
        return replaced((yield), ("self_attn_bda", "mlp_bda"), ModuleSpec(module=get_bias_dropout_add))


class BatchedExchange:
    """An interleaved pipeline that sends and receives in one batch."""

    @hookimpl(wrapper=True)
    def build_transformer_config(self):
        config = yield
        config.overlap_p2p_comm = False
        config.batch_p2p_comm = True
        return config


class NativeReduction:
    """Megatron-FSDP that reduces the gradients of a single rank as those of several."""

    @hookimpl(wrapper=True)
    def wrap_ddp(self):
        chunks = yield
        for chunk in chunks:
            chunk._alone.clear()
        return chunks


class OverlappedReduction:
    """Megatron-FSDP that shards the optimizer's state alone and reduces while backward runs."""

    @hookimpl(wrapper=True)
    def build_ddp_config(self, args):
        args.overlap_grad_reduce = True
        return (yield)


class NativeGradientNorm:
    """The norm of gradients that every rank holds, summed over the ranks."""

    @hookimpl(wrapper=True)
    def build_optimizer(self, pg):
        optimizer = yield
        optimizer.grad_stats_parallel_group = pg.dp_cp
        return optimizer


class NativeRandomStates:
    """Megatron-FSDP as it leaves random states: those of the first tensor-parallel rank on all."""

    @hookimpl(wrapper=True)
    def wrap_ddp(self):
        chunks = yield
        for chunk in chunks:
            FullyShardedDataParallel.sync_rng_states_across_tp_group(chunk)
        return chunks
