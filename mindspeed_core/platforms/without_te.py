"""Names that megatron-core gets wrong where TransformerEngine cannot be imported.

Its guarded imports leave some names unbound that later code tests for ``None``. Every platform adds them, as
``None``, so that the code takes the branch it has for that case. Others are bound to stand-ins, and the code
believes that TransformerEngine is there. A checkpoint that drops its output needs it for no reason. Repairs
of what such a checkpoint meets, and of megatron-core's own offloading, stand beside them.
"""

from __future__ import annotations

from mindspeed_core.feature import Patch
from mindspeed_core.platforms.broken_packages import why_unusable

_OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload:ChunkOffloadHandler"
_ALWAYS = (
    Patch(
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        new=None,
        kind="add",
        required=False,
        reason="the router's gating linear reads a name that only importing TransformerEngine binds",
    ),
    Patch(
        target="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        new="mindspeed_core.megatron.output_checkpoint:repaired",
        kind="wrap",
        required=False,
        reason="takes its default for fp8 without TransformerEngine, and empties what nothing fills again",
    ),
    Patch(
        target=f"{_OFFLOAD}.tensor_need_offloading_checker",
        new="mindspeed_core.megatron.activation_offload:sparing_dropped",
        kind="wrap",
        required=False,
        reason="copies storages to the host that their owner empties and computes again",
    ),
    Patch(
        target=f"{_OFFLOAD}.reload",
        new="mindspeed_core.megatron.activation_offload:waiting_for_copies",
        kind="wrap",
        required=False,
        reason="reads on the compute stream what is still on its way to the host",
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
