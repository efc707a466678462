"""The declaration of predictions of further tokens where a batch has a description. No torch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Feature, Patch, Proofs, Requirement, hookimpl
from mindspeed_cp.features.context_parallel import ContextParallel
from mindspeed_cp.features.documents import PackedDocuments


class SplitPredictions(Feature):
    """Multi-token prediction over sequences that are split over ranks, or whose documents are apart."""

    name = "context-parallel-predictions"
    family = "cp"
    summary = "Train multi-token prediction on split sequences and packed documents"
    level = 2
    requires = (
        Requirement(
            any_of=("context-parallel", "packed-documents"), reason="it moves the tokens that these describe"
        ),
    )
    patches = (
        Patch(
            target="megatron.core.transformer.multi_token_prediction:roll_tensor",
            new="mindspeed_cp.modules.predictions:over_ranks",
            kind="wrap",
            reason="the model and its prediction layers call this function by name; it knows one layout only",
            versions="megatron-core>=0.16,<0.20",
        ),
    )
    docs = "mindspeed_cp:docs/context-parallel-predictions.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_cp.features.model_proofs:PREDICTION_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether further tokens are predicted of split sequences, or of documents that are apart."""
        described = ContextParallel.enabled(args) or PackedDocuments.enabled(args)
        return described and bool(getattr(args, "mtp_num_layers", None))

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Show recomputed layers which tokens they have."""
        model = yield
        from mindspeed_cp.modules.predictions import recompute_described

        recompute_described(session, model, self.name)
        return model
