"""The declarations of what Gemma's layers and embedding do otherwise: gated tanh-GELU, a scaled embedding."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Resume, Scenario, hookimpl

_OTHERS = ("swiglu", "quick_geglu", "squared_relu")
_FLAG, _SCALE = "--geglu", "--scale-embedding"
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")


def _proofs(*flags: str) -> tuple[Scenario, ...]:
    """Return scenarios that compare layouts with one process."""
    alone: dict[str, Any] = {
        "baseline": flags,
        "baseline_world_size": 1,
        "world_size": 2,
        "same_feature": True,
    }
    return (
        Scenario("tp2-sp", flags=(*flags, *_TP2), **alone),
        Scenario("pp2", flags=(*flags, *_PP2), **alone),
        Scenario("resume-tp2", flags=flags, resume=Resume(flags=(*flags, *_TP2), world_size=2)),
    )


class GatedGelu(Feature):
    """MLPs whose gate is the tanh form of GELU."""

    name = "gated-gelu"
    family = "models"
    summary = "Gate MLPs by GELU in its tanh form (Gemma)"
    flags = (Flag(_FLAG, changes_training=True, help="Gated tanh-GELU activation in the MLP."),)
    docs = "mindspeed_models:docs/gated-gelu.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = True
    verify = _proofs(_FLAG)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse another activation."""
        given = [f"--{name.replace('_', '-')}" for name in _OTHERS if getattr(args, name, False)]
        return [f"{_FLAG}: {given[0]} is another activation; leave one of the two out"] if given else []

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return the activation."""
        return {"activation_func": "gelu_tanh", "gated_linear_unit": True}

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Set the activation."""
        config = yield
        from mindspeed_models.heads.gemma import gelu_tanh

        config.gated_linear_unit, config.activation_func = True, gelu_tanh
        # megatron-core fuses other activations only.
        config.bias_activation_fusion = False
        return config


class ScaledEmbedding(Feature):
    """The output of the embedding times the root of the hidden size."""

    name = "scaled-embedding"
    family = "models"
    summary = "Multiply the embedding by the root of the hidden size (Gemma)"
    flags = (
        Flag(_SCALE, changes_training=True, help="Multiply the embedding by the root of the hidden size."),
    )
    conflicts = (
        Conflict(
            flag="--mtp-num-layers",
            reason="predictions of further tokens have an embedding of their own elsewhere; drop one of "
            "the two",
        ),
    )
    docs = "mindspeed_models:docs/scaled-embedding.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = True
    verify = _proofs(_SCALE)

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return that the embedding is scaled."""
        return {"embedding_scale": "root of the hidden size"}

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Scale the embeddings of built chunks."""
        chunks = yield
        from mindspeed_megatron.unwrap import chunks_of
        from mindspeed_models.heads.gemma import scale_embeddings

        scale_embeddings(session, chunks_of(chunks), self.name)
        return chunks
