"""Names that megatron-core gets wrong where TransformerEngine is not installed.

Its guarded imports leave some names unbound that later code tests for ``None``. Every platform adds them, as
``None``, so that the code takes the branch it has for that case. Others are bound to stand-ins, and the code
believes that TransformerEngine is there. A checkpoint that drops its output needs it for no reason.
"""

from __future__ import annotations

from importlib.util import find_spec

from mindspeed_core.feature import Patch

PATCHES = (
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
    *(
        ()
        if find_spec("transformer_engine") is not None
        else (
            Patch(
                target="megatron.core.transformer.multi_latent_attention:HAVE_TE",
                new=False,
                required=False,
                reason="stand-ins for TransformerEngine's layers import without it, and are no classes",
            ),
        )
    ),
)
