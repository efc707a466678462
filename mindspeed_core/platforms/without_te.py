"""Names that megatron-core forgets to define where TransformerEngine is not installed.

Its guarded imports leave some names unbound that later code tests for ``None``. Every platform adds them, as
``None``, so that the code takes the branch it has for that case.
"""

from __future__ import annotations

from mindspeed_core.feature import Patch

PATCHES = (
    Patch(
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        new=None,
        kind="add",
        required=False,
        reason="the router's gating linear reads a name that only importing TransformerEngine binds",
    ),
)
