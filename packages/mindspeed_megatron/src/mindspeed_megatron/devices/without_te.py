"""Names that megatron-core gets wrong where TransformerEngine cannot be imported.

Its guarded imports leave some names unbound that later code tests for ``None``. Every platform adds them, as
``None``, so that the code takes the branch it has for that case. Others are bound to stand-ins, and the code
believes that TransformerEngine is there. The norm of gradients, which TransformerEngine brings, is taken one
tensor after the other without it. A checkpoint that drops its output needs it for no reason. Repairs
of what such a checkpoint meets, of megatron-core's own offloading and of its interleaved pipelines stand
beside them.
"""

from __future__ import annotations

from mindspeed_core.feature import Patch
from mindspeed_megatron.broken_packages import why_unusable

_OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
_ALWAYS = (
    Patch(
        target="megatron.core.optimizer.clip_grads:l2_norm_impl",
        new="mindspeed_megatron.tensor_norms:with_one_wait",
        kind="wrap",
        required=False,
        reason="waits for the device once for each shard of a gradient",
    ),
    Patch(
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        new=None,
        kind="add",
        required=False,
        reason="the router's gating linear reads a name that only importing TransformerEngine binds",
    ),
    Patch(
        target="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        new="mindspeed_megatron.output_checkpoint:repaired",
        kind="wrap",
        required=False,
        reason="takes its default for fp8 without TransformerEngine, and empties what nothing fills again",
    ),
    Patch(
        target=f"{_OFFLOAD}:ChunkOffloadHandler.tensor_need_offloading_checker",
        new="mindspeed_megatron.activation_offload:sparing_dropped",
        kind="wrap",
        required=False,
        reason="copies storages to the host that their owner empties and computes again",
    ),
    Patch(
        target=f"{_OFFLOAD}:ChunkOffloadHandler.reload",
        new="mindspeed_megatron.activation_offload:waiting_for_copies",
        kind="wrap",
        required=False,
        reason="reads on the compute stream what is still on its way to the host",
    ),
    Patch(
        target=f"{_OFFLOAD}:GPUTensorPool.allocate",
        new="mindspeed_megatron.activation_offload:waiting_for_reads",
        kind="wrap",
        required=False,
        reason="writes into a host buffer that the copy back still reads",
    ),
    # Its later name.
    Patch(
        target=f"{_OFFLOAD}:OffloadTensorPool.allocate",
        new="mindspeed_megatron.activation_offload:waiting_for_reads",
        kind="wrap",
        required=False,
        reason="writes into a host buffer that the copy back still reads",
    ),
    Patch(
        target=f"{_OFFLOAD}:ChunkOffloadHandler.tensor_pop",
        new="mindspeed_megatron.activation_offload:waiting_for_arrival",
        kind="wrap",
        required=False,
        reason="waits for another group of the same name than the one that is read",
    ),
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.send_forward_recv_forward",
        new="mindspeed_megatron.pipeline_sends:remembering_sends",
        kind="wrap",
        required=False,
        reason="the interleaved schedule drops the last output it sends without a wait",
    ),
)
_IN_LATENT_ATTENTION = Patch(
    target="megatron.core.transformer.multi_latent_attention:HAVE_TE",
    new=False,
    required=False,
    reason="stand-ins for TransformerEngine's layers import without it, and are no classes",
)


def patches_without_te() -> tuple[Patch, ...]:
    """Return the patches of this machine; imports TransformerEngine where it is installed.

    One that is installed and broken is as good as none: its stand-ins are no classes either.
    """
    return (*_ALWAYS, _IN_LATENT_ATTENTION) if why_unusable("transformer_engine") else _ALWAYS
