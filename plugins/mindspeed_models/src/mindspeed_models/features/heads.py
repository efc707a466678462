"""Declarations of a model's ends: NormHead, norm of the embedding, z-loss; and of attention's biases."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

FAMILY = "models"
_CHUNKED = Conflict(
    feature="chunked-lm-loss",
    reason="it makes logits of the output layer's weight itself; drop --lm-loss-chunks",
)
_FURTHER = Conflict(
    flag="--mtp-num-layers",
    reason="predictions of further tokens have an embedding on another stage; drop one of the two",
)
_LATENT = Conflict(
    flag="--multi-latent-attention", reason="its linears have other names; no model with both is known"
)


class NormHead(Feature):
    """Rows of the output layer have length one."""

    name = "lm-norm-weight"
    family = FAMILY
    summary = "Normalize the rows of the output layer (NormHead of Baichuan 2)"
    flags = (
        Flag(
            "--lm-norm-weight", changes_training=True, help="Normalize the rows of the output layer's weight."
        ),
    )
    conflicts = (
        _CHUNKED,
        Conflict(
            flag="--defer-embedding-wgrad-compute",
            reason="it computes the gradient of the output layer's weight itself; drop one of the two",
        ),
        Conflict(
            flag="--pipeline-w-output-layer",
            reason="it computes the gradient of the output layer's weight itself; drop it",
        ),
    )
    docs = "mindspeed_models:docs/lm-norm-weight.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = True
    verify = Proofs("mindspeed_models.features.head_proofs:HEAD_PROOFS")

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return that logits are those of normalized rows."""
        return {"lm_norm_weight": True}

    @hookimpl(wrapper=True)
    def build_model(self, session: Session) -> Generator[None, Any, Any]:
        """Change the output layers that were built."""
        chunks = yield
        from mindspeed_megatron.unwrap import chunks_of
        from mindspeed_models.heads.normed_head import normalize_heads

        normalize_heads(session, chunks_of(chunks), self.name)
        return chunks


class EmbeddingNorm(Feature):
    """A LayerNorm behind the embedding."""

    name = "embed-layernorm"
    family = FAMILY
    summary = "Normalize the output of the embedding (Bloom)"
    flags = (Flag("--embed-layernorm", changes_training=True, help="Put a LayerNorm behind the embedding."),)
    conflicts = (_FURTHER,)
    docs = "mindspeed_models:docs/embed-layernorm.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = True
    verify = Proofs("mindspeed_models.features.head_proofs:EMBEDDING_PROOFS")

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return that there is a norm."""
        return {"embed_layernorm": True}

    @hookimpl(wrapper=True)
    def build_model(self, session: Session) -> Generator[None, Any, Any]:
        """Change the embeddings that were built."""
        chunks = yield
        from mindspeed_megatron.unwrap import chunks_of
        from mindspeed_models.heads.normed_embedding import normalize_embeddings

        normalize_embeddings(session, chunks_of(chunks), self.name)
        return chunks


class ZLoss(Feature):
    """The square of the softmax's logarithm beside the loss."""

    name = "z-loss"
    family = FAMILY
    summary = "Keep the softmax's denominator near one by a loss on its logarithm"
    flags = (
        Flag(
            "--z-loss-weight",
            type=float,
            default=0.0,
            changes_training=True,
            help="Weight of the squared logarithm of the softmax's denominator in the loss.",
        ),
    )
    conflicts = (
        Conflict(feature="chunked-lm-loss", reason="it makes no logits to read; drop --lm-loss-chunks"),
    )
    docs = "mindspeed_models:docs/z-loss.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_models.features.head_proofs:Z_LOSS_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse weights that would reward large logits."""
        if args.z_loss_weight < 0:
            return (
                f"--z-loss-weight {args.z_loss_weight:g}: below 0 logits would grow; give a number above 0",
            )
        return ()

    @hookimpl(wrapper=True)
    def compute_token_losses(
        self, session: Session, run: Run, logits: Any, head: int
    ) -> Generator[None, Any, Any]:
        """Read the logits of a micro-batch."""
        if head == 0:
            from mindspeed_models.heads.z_loss import Waiting, keep, squared_log_sums

            values = squared_log_sums(logits, run.pg.tp)
            keep(session.state(Waiting), values, training=run.context.training)
        return (yield)

    @hookimpl(wrapper=True)
    def compute_loss(self, session: Session, run: Run, batch: Any) -> Generator[None, Any, Any]:
        """Add to the loss of the micro-batch."""
        loss = yield
        from mindspeed_models.heads.z_loss import Waiting, add

        mask = None if batch is None else batch.loss_mask
        return add(session.state(Waiting), loss, mask, run.args.z_loss_weight)


class AttentionBias(Feature):
    """Biases of the linears of attention, and of no others."""

    name = "attention-bias"
    family = FAMILY
    summary = "Give the linears of attention biases, and the others none (InternLM)"
    flags = (
        Flag(
            "--row-col-parallel-linear-bias",
            changes_training=True,
            help="Biases of attention's linears, in a model without others.",
        ),
    )
    requires = (
        Requirement(
            flag="--disable-bias-linear",
            reason="without it every linear has a bias",
            remedy="add --disable-bias-linear, or drop --row-col-parallel-linear-bias",
        ),
    )
    conflicts = (_LATENT,)
    docs = "mindspeed_models:docs/attention-bias.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = True
    verify = Proofs("mindspeed_models.features.head_proofs:BIAS_PROOFS")

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return which linears have biases."""
        return {"add_qkv_bias": True, "row_col_parallel_linear_bias": True}

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Session) -> Generator[None, Any, Any]:
        """Give linears biases."""
        spec = yield
        from mindspeed_models.heads.attention_bias import place_biases

        return place_biases(session, spec, self.name)
