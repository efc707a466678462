"""What proves context parallelism with other models and attention flags: the same model, split and whole."""

from __future__ import annotations

from mindspeed_core.feature import Scenario
from mindspeed_cp.algorithms import ADAPTIVE_ALGO, GATHER_ALGO, HYBRID_ALGO, RING_ALGO, ULYSSES_ALGO
from mindspeed_cp.features.proofs import MODEL, split_flags

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


def _same(
    name: str, world: int, split: tuple[str, ...], model: tuple[str, ...], whole: tuple[str, ...] = ()
) -> Scenario:
    """The model with its sequence split on ``world`` processes, and whole with ``whole`` besides."""
    return Scenario(
        name,
        flags=(*model, *split),
        baseline=(*model, *whole),
        world_size=world,
        baseline_world_size=world // int(split[1]),
        tolerance=2e-5,
    )


def _positions(kind: str) -> tuple[str, ...]:
    return ("--adam-eps", "1e-3", "--position-embedding-type", kind)


MODEL_PROOFS = (
    _same("fused", 2, _RING, (*MODEL, _FLASH, *_FUSED)),
    _same("band", 2, _FETCHED, (*MODEL, *_BAND)),
    _same("alibi-ring", 2, _RING, _ALIBI),
    _same("alibi-ulysses-tp2", 4, _HEADS, (*_ALIBI, *_TP2)),
    _same("alibi-hybrid", 4, _HYBRID, _ALIBI),
    _same("latent-ring", 2, _RING, _LATENT),
    _same("latent-ulysses-tp2-sp", 4, _HEADS, (*_LATENT, *_TP2, "--sequence-parallel")),
    _same("latent-yarn-fetched", 2, _FETCHED, (*_LATENT, "--rope-type", "yarn")),
    _same("off-by-one-fetched", 2, _FETCHED, (*MODEL, "--softmax-type", "off-by-one")),
    _same("learnable-ulysses-tp2", 4, _HEADS, (*MODEL, *_TP2, "--softmax-type", "learnable")),
    _same("experts", 2, _RING, (*MODEL, *_EXPERTS, *_LOGITS)),
    _same("experts-ep2", 4, _HEADS, (*MODEL, *_EXPERTS, "--expert-model-parallel-size", "2")),
    _same("experts-per-token", 2, _RING, (*MODEL, *_EXPERTS, *_LOGITS, "--calculate-per-token-loss")),
    _same("interleaved", 4, _RING, (*MODEL, *_VPP2)),
    _same("uneven-loss", 2, _RING, (*MODEL, *_UNEVEN)),
    _same("uneven-loss-per-token", 2, _RING, (*MODEL, *_UNEVEN, "--calculate-per-token-loss")),
    _same("learned-positions", 2, split_flags(2, ADAPTIVE_ALGO), _positions("learned_absolute")),
    _same("no-positions", 2, _RING, _positions("none")),
    _same("fused-documents", 2, (*_FETCHED, _FLASH), (*MODEL, *_DOCUMENTS), _DENSE),
    _same("recomputed-attention", 2, _RING, (*MODEL, *_SELECTIVE)),
)
PREDICTION_PROOFS = (
    _same("ring", 2, _RING, (*MODEL, *_PREDICTIONS, *_UNEVEN)),
    _same("latent-experts-pp2", 4, _FETCHED, (*_LATENT, *_EXPERTS, *_PREDICTIONS, *_PP2)),
    _same(
        "balanced-learned-positions",
        2,
        split_flags(2, ADAPTIVE_ALGO),
        (*_PREDICTIONS, *_positions("learned_absolute")),
    ),
    _same("ulysses-pp2", 4, _HEADS, (*MODEL, *_PREDICTIONS, *_PP2)),
    _same("per-token", 2, _RING, (*MODEL, *_PREDICTIONS, *_UNEVEN, "--calculate-per-token-loss")),
    _same("experts-recompute", 2, _RING, (*MODEL, *_PREDICTIONS, *_EXPERTS, *_FULL)),
    Scenario(
        "documents-whole",
        flags=(*MODEL, *_PREDICTIONS, *_DOCUMENTS),
        baseline=(*MODEL, *_PREDICTIONS, *_DOCUMENTS, *_DENSE),
        tolerance=2e-5,
    ),
)
