"""The declarations of the vocabulary's two ends: embedding without masks, losses without whole logits."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, hookimpl
from mindspeed_tp.options import UNEVEN

_WITH_MASKS, _CHUNKS = "--embedding-with-masks", "--lm-loss-chunks"


def _sequence(session: Any, args: Any) -> Any:
    """Return the parts of a sequence that is cut unevenly; None for equal ones."""
    from mindspeed_tp.uneven.cut import Cuts

    return Cuts.of(args).sequence if UNEVEN in session.plan.names else None


class VocabularyEmbedding(Feature):
    """Rows of the embedding that other ranks hold are filled with zeros, without an assignment by a mask."""

    name = "vocab-parallel"
    family = "tp"
    summary = "Look up sharded embeddings without masked writes; always on"
    flags = (Flag(_WITH_MASKS, help="Look up embeddings as megatron-core does, with masked writes."),)
    docs = "mindspeed_tp:docs/vocab-parallel.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_tp.features.vocabulary_proofs:EMBEDDING_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether ranks share the vocabulary, unless masks are asked for."""
        shared = (getattr(args, "tensor_model_parallel_size", 1) or 1) > 1
        return shared and not getattr(args, "embedding_with_masks", False)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any, pg: Any) -> Generator[None, Any, Any]:
        """Change the embeddings that were built."""
        model = yield
        from mindspeed_tp.vocabulary import look_up_without_masks

        look_up_without_masks(session, self.name, model, pg.tp, _sequence(session, args))
        return model


class ChunkedLoss(Feature):
    """Losses of the language model without the logits of a whole sequence."""

    name = "chunked-lm-loss"
    family = "tp"
    summary = "Compute the language-model loss in chunks, without all logits at once"
    stability = "prototype"
    flags = (
        Flag(
            _CHUNKS,
            type=int,
            default=1,
            help="Chunks of the sequence whose logits exist one at a time.",
        ),
    )
    conflicts = (
        Conflict(
            flag="--cross-entropy-loss-fusion",
            reason="it takes the logits of the whole sequence; drop one of the two",
        ),
        Conflict(flag="--fp16-lm-cross-entropy", reason="losses are computed in float32; drop it"),
        Conflict(
            flag="--defer-embedding-wgrad-compute",
            reason="its weight learns with the loss; drop one of the two",
        ),
        Conflict(
            flag="--use-torch-fsdp2",
            reason="the loss reads a weight outside of its layer; drop one of the two",
        ),
        Conflict(
            flag="--use-megatron-fsdp",
            reason="the loss reads a weight outside of its layer; drop one of the two",
        ),
    )
    slots = ("lm-loss",)
    docs = "mindspeed_tp:docs/chunked-lm-loss.md"
    modes = ("train",)
    places_modules = True
    needs_open_session = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    tuning = {_CHUNKS: (1, 2, 4, 8)}
    verify = Proofs("mindspeed_tp.features.vocabulary_proofs:LOSS_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse numbers of parts that a sequence does not have."""
        from mindspeed_tp.model_sizes import ModelSizes

        chunks, positions = args.lm_loss_chunks, ModelSizes.of(args).positions
        if not 1 <= chunks <= positions or positions % chunks:
            return (
                f"{_CHUNKS} {chunks} does not divide the {positions} positions of a sequence; use a divisor",
            )
        return ()

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change output layer and loss of the models that were built."""
        model = yield
        from mindspeed_tp.loss_head import defer_logits

        defer_logits(session, model, args.lm_loss_chunks, _sequence(session, args))
        return model
