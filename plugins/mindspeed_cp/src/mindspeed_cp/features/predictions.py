"""The declaration of predictions of further tokens where a sequence is split. No torch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Feature, Patch, Requirement, hookimpl
from mindspeed_cp.features.model_proofs import PREDICTION_PROOFS


class SplitPredictions(Feature):
    """Multi-token prediction over sequences that are split over ranks."""

    name = "context-parallel-predictions"
    family = "cp"
    summary = "Predictions of further tokens (--mtp-num-layers) where the sequence is split over ranks"
    stability = "prototype"
    level = 2
    requires = (
        Requirement(feature="context-parallel", implies=True, reason="it shifts tokens of its layouts"),
    )
    patches = (
        Patch(
            target="megatron.core.transformer.multi_token_prediction:roll_tensor",
            new="mindspeed_cp.modules.predictions:over_ranks",
            kind="wrap",
            reason="the model and its prediction layers call this function by name; it knows one layout only",
            versions="megatron-core>=0.16,<0.17",
        ),
    )
    docs = "mindspeed_cp:docs/context-parallel.md"
    deterministic = True
    affects_checkpoint = False
    verify = PREDICTION_PROOFS

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Where a sequence is split and further tokens are predicted."""
        split = getattr(args, "context_parallel_size", 1) > 1
        return split and bool(getattr(args, "mtp_num_layers", None))

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Show recomputed layers which tokens they have."""
        model = yield
        from mindspeed_cp.modules.predictions import recompute_described

        recompute_described(session, model, self.name)
        return model
