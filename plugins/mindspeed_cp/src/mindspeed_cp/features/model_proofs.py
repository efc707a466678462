"""Proofs of context parallelism with other models and attention flags: the same model, split and whole."""

from __future__ import annotations

from mindspeed_core.feature import Scenario
from mindspeed_cp.algorithms import ADAPTIVE_ALGO, GATHER_ALGO, HYBRID_ALGO, RING_ALGO, ULYSSES_ALGO
from mindspeed_cp.features.proofs import MODEL, same_model, split_flags, taken_over

_RING, _HEADS, _FETCHED = (split_flags(2, name) for name in (RING_ALGO, ULYSSES_ALGO, GATHER_ALGO))
_HYBRID = split_flags(4, HYBRID_ALGO, "--ulysses-degree-in-cp", "2")
_TP2 = ("--tensor-model-parallel-size", "2")
_PP2 = ("--pipeline-model-parallel-size", "2")
_VPP2 = (*_PP2, "--num-layers-per-virtual-pipeline-stage", "1")
_FLASH = "--use-flash-attn"
_FUSED = ("--use-fused-rotary-pos-emb", "--use-fused-rmsnorm", "--use-fused-swiglu")
_BAND = (_FLASH, "--sparse-mode", "4", "--pre-tockens", "9")
_ALIBI = ("--adam-eps", "1e-3", "--position-embedding-type", "alibi")
_LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--normalization", "RMSNorm", "--adam-eps", "1e-3"),
    *("--position-embedding-type", "rope"),
)
_EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2")
_LOGITS = ("--moe-z-loss-coeff", "1e-2")
_UNEVEN = ("--reset-position-ids", "--eod-mask-loss")
_DOCUMENTS, _DENSE = (*_UNEVEN, "--reset-attention-mask"), ("--create-attention-mask-in-dataloader",)
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
_PREDICTIONS = ("--mtp-num-layers", "2", "--num-layers", "2", "--untie-embeddings-and-output-weights")


def _positions(kind: str) -> tuple[str, ...]:
    return ("--adam-eps", "1e-3", "--position-embedding-type", kind)


def _experts_on_parts(name: str, split: tuple[str, ...], layout: tuple[str, ...]) -> Scenario:
    """Spread experts over the ranks that hold parts of one sequence, beside another layout of two ranks."""
    model = (*MODEL, *_EXPERTS, *_LOGITS, *layout)
    return Scenario(
        name,
        flags=(*model, *split, "--expert-model-parallel-size", "2"),
        baseline=model,
        world_size=4,
        baseline_world_size=2,
        tolerance=2e-5,
    )


MODEL_PROOFS = (
    same_model("fused", _RING, (*MODEL, _FLASH, *_FUSED)),
    same_model("band", _FETCHED, (*MODEL, *_BAND)),
    same_model("alibi-ring", _RING, _ALIBI),
    same_model("alibi-ulysses-tp2", _HEADS, (*_ALIBI, *_TP2), ranks=2),
    same_model("alibi-hybrid", _HYBRID, _ALIBI),
    same_model("alibi-roots", _RING, (*_ALIBI, "--alibi-fusion-attn-type", "3")),
    same_model("latent-ring", _RING, _LATENT),
    same_model("latent-ulysses-tp2-sp", _HEADS, (*_LATENT, *_TP2, "--sequence-parallel"), ranks=2),
    same_model("latent-yarn-fetched", _FETCHED, (*_LATENT, "--rope-type", "yarn")),
    same_model("off-by-one-fetched", _FETCHED, (*MODEL, "--softmax-type", "off-by-one")),
    same_model("learnable-ulysses-tp2", _HEADS, (*MODEL, *_TP2, "--softmax-type", "learnable"), ranks=2),
    same_model("experts", _RING, (*MODEL, *_EXPERTS, *_LOGITS)),
    same_model("experts-ep2", _HEADS, (*MODEL, *_EXPERTS, "--expert-model-parallel-size", "2"), ranks=2),
    _experts_on_parts("experts-ep2-tp2-sp", _RING, (*_TP2, "--sequence-parallel")),
    _experts_on_parts("experts-ep2-interleaved", _HEADS, _VPP2),
    same_model("experts-per-token", _RING, (*MODEL, *_EXPERTS, *_LOGITS, "--calculate-per-token-loss")),
    same_model("interleaved", _RING, (*MODEL, *_VPP2), ranks=2),
    same_model("uneven-loss", _RING, (*MODEL, *_UNEVEN)),
    same_model("uneven-loss-per-token", _RING, (*MODEL, *_UNEVEN, "--calculate-per-token-loss")),
    same_model(
        "interleaved-angles", _RING, (*MODEL, *_UNEVEN, "--rotary-interleaved", "--use-fused-rotary-pos-emb")
    ),
    same_model("learned-positions", split_flags(2, ADAPTIVE_ALGO), _positions("learned_absolute")),
    same_model("no-positions", _RING, _positions("none")),
    same_model("fused-documents", (*_FETCHED, _FLASH), (*MODEL, *_DOCUMENTS), _DENSE),
    same_model("recomputed-attention", _RING, (*MODEL, *_SELECTIVE)),
)
PREDICTION_PROOFS = (
    same_model("ring", _RING, (*MODEL, *_PREDICTIONS, *_UNEVEN)),
    same_model("latent-experts-pp2", _FETCHED, (*_LATENT, *_EXPERTS, *_PREDICTIONS, *_PP2), ranks=2),
    same_model(
        "balanced-learned-positions",
        split_flags(2, ADAPTIVE_ALGO),
        (*_PREDICTIONS, *_positions("learned_absolute")),
    ),
    same_model("ulysses-pp2", _HEADS, (*MODEL, *_PREDICTIONS, *_PP2), ranks=2),
    same_model("per-token", _RING, (*MODEL, *_PREDICTIONS, *_UNEVEN, "--calculate-per-token-loss")),
    same_model("experts-recompute", _RING, (*MODEL, *_PREDICTIONS, *_EXPERTS, *_FULL)),
    Scenario(
        "documents-whole",
        flags=(*MODEL, *_PREDICTIONS, *_DOCUMENTS),
        baseline=(*MODEL, *_PREDICTIONS, *_DOCUMENTS, *_DENSE),
        tolerance=2e-5,
    ),
    taken_over("resume", _RING, (*MODEL, *_PREDICTIONS), (), ranks=1, with_feature=False),
)
