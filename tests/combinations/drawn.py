"""Draws of features of all families on a layout, and whether they learn what one process learns.

A draw is a layout and those of some options that the resolver accepts together. A combination is right, or a
rank refuses it with a reason.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from mindspeed_core.activation import prepare
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.compare import compare_tensors
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.training import SideResult, train_side
from mindspeed_testing.worlds import WorldError

STEPS = 2
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Of losses and gradients. A gradient that is lost, doubled or stale is far above it."""

_BATCH = "--num-layers 8 --global-batch-size 8 --clip-grad 0 --untie-embeddings-and-output-weights"
_LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
MODELS = {
    "gpt": _BATCH,
    "llama": f"{_BATCH} {_LLAMA} --group-query-attention --num-query-groups 4",
    "experts": (
        f"{_BATCH} {_LLAMA} --num-layers 4 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
        "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
        "--n-shared-experts 1"
    ),
    "latent": f"{_BATCH} {_LLAMA} --multi-latent-attention",
    "predictions": f"{_BATCH} {_LLAMA} --mtp-num-layers 1",
    "bfloat16": f"{_BATCH} {_LLAMA} --bf16",
}

_TP2, _SP, _PP2 = "--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2"
_CP2 = "--context-parallel-size 2 --use-flash-attn"
_EP2 = "--expert-model-parallel-size 2"
_OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "one": (1, ""),
    "tp": (2, f"{_TP2} {_SP}"),
    "tp without sequence parallelism": (2, _TP2),
    "pp": (2, _PP2),
    "cp": (2, _CP2),
    "dp": (2, _OVERLAPS),
    "tp pp": (4, f"{_TP2} {_SP} {_PP2}"),
    "pp dp": (4, f"{_PP2} {_OVERLAPS}"),
    "tp dp": (4, f"{_TP2} {_SP} {_OVERLAPS}"),
    "tp cp": (4, f"{_TP2} {_SP} {_CP2}"),
    "pp cp": (4, f"{_PP2} {_CP2}"),
    "cp dp": (4, f"{_CP2} {_OVERLAPS}"),
    "2d": (4, "--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2"),
    "2d pp": (4, f"{_TP2} --tp-2d --tp-x 1 --tp-y 2 {_PP2}"),
    "ep": (2, _EP2),
    "ep pp": (4, f"{_EP2} {_PP2}"),
    "ep tp": (4, f"{_EP2} {_TP2} {_SP}"),
    "ep dp": (4, f"{_EP2} {_OVERLAPS}"),
}
_OF_EXPERTS = (*(name for name in LAYOUTS if name.startswith("ep")), "one", "pp", "dp", "pp dp")
_DENSE = tuple(name for name in LAYOUTS if not name.startswith("ep"))

_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_BYTES = "--swap-min-bytes 16"
OPTIONS = (
    *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--use-flash-attn"),
    *("--use-gradient-accumulation-fusion", "--affinity-cross-entropy", "--use-fused-masked-softmax"),
    *("--use-distributed-optimizer", "--calculate-per-token-loss", _OVERLAPS),
    *("--recompute-activation-function", "--recompute-norm", _FULL, f"{_FULL} --recompute-num-layers 2"),
    *("--recompute-granularity selective", "--recompute-granularity selective --recompute-modules mlp"),
    *(f"--use-flash-attn --swap-attention {_BYTES}", f"--swap-modules input_norm,mlp {_BYTES}"),
    *(f"--swap-activation-plan decoder.layers.*.mlp {_BYTES}", "--recompute-plan decoder.layers.*.mlp"),
    *(f"--smart-swap {_BYTES}", f"{_FULL} --swap-layer-input {_BYTES}", "--compress-activation 0"),
    *("--swap-optimizer", "--virtual-optimizer 0.5", "--compress-optimizer"),
    *("--use-ascend-coc --coc-parallel-num 2", "--use-ascend-mc2", "--lm-loss-chunks 2"),
    *(f"{_FULL} --optimize-recomp-communication-level {level}" for level in (1, 2)),
    *("--unaligned-linear", "--embedding-with-masks", "--mlp-layer-fusion"),
    *("--reuse-fp32-param", "--release-fp32-grad", "--compress-dense level0"),
    *("--context-parallel-algo megatron_cp_algo", "--context-parallel-algo kvallgather_cp_algo"),
    *("--moe-alltoall-overlap-comm", "--moe-zero-memory level0", "--moe-zero-memory level1"),
    *("--moe-adaptive-recompute-activation", "--moe-permutation-async-comm", "--moe-fb-overlap"),
    *("--use-fused-moe-token-permute-and-unpermute", "--gemm-gradient-accumulation-fusion"),
)
_TWO = "--num-virtual-stages-per-pipeline-rank 2"
SCHEDULES = (
    *("--pipeline-schedule 1f1b", "--pipeline-schedule zb-h1", "--pipeline-schedule zbv"),
    "--pipeline-schedule zb-h1 --pipeline-num-transformer-layers [[3],[5]]",
    *(f"--pipeline-schedule {name} {_TWO}" for name in ("interleaved", "zbi", "nanopipe")),
    *("--schedules-method dualpipev", "--schedules-method dualpipev --dualpipev-dw-detach"),
    *(f"--use-nanopipe --use-nanopipe-swap {_TWO}", "--pipeline-schedule zb-h1 --pipeline-recompute"),
    *(_TWO, f"{_TWO} {_FULL} --recompute-in-bubble", f"{_TWO} --recompute-in-advance {_FULL}"),
)


@dataclass(frozen=True)
class Draw:
    """A combination.

    Attributes:
        model: a name of `MODELS`.
        layout: a name of `LAYOUTS`.
        options: of `OPTIONS` and `SCHEDULES`.
    """

    model: str
    layout: str
    options: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags beside those of the model, each once, the last value of a flag alone."""
        pieces: dict[str, list[str]] = {}
        name = ""
        for word in " ".join((LAYOUTS[self.layout][1], *self.options)).split():
            if word.startswith("--"):
                pieces[name := word] = [word]
            else:
                pieces[name].append(word)
        return tuple(word for piece in pieces.values() for word in piece)

    def __str__(self) -> str:
        return f"{self.model} on {self.layout}: {' '.join(self.flags)}"


def drawn(seed: int) -> Draw:
    """Return the combination of a seed."""
    source = random.Random(seed)
    model = source.choice((*MODELS, "llama", "experts"))
    layout = source.choice(_OF_EXPERTS if model == "experts" else _DENSE)
    options = source.sample(OPTIONS, source.randint(4, 9))
    if "pp" in layout and source.random() < 0.8:
        options.append(source.choice(SCHEDULES))
    return Draw(model, layout, tuple(options))


def accepted(draw: Draw) -> Draw:
    """Return the draw with those of its options, in order, that the resolver accepts together."""
    registry = Registry.discover()
    found = Draw(draw.model, draw.layout, ())
    for option in draw.options:
        more = Draw(draw.model, draw.layout, (*found.options, option))
        line = training_flags((*MODELS[draw.model].split(), *more.flags), STEPS, registry)
        try:
            prepare(line, platform="cpu", registry=registry, host="standalone")
        except (PlanError, UserError):
            continue
        found = more
    return found


@cache
def alone(model: str) -> SideResult:
    """Return the training of one process, where a mean over tokens is one over micro-batches."""
    return train_side(MODELS[model].split(), 1, STEPS, platform="cpu")


def problem(draw: Draw) -> str:
    """Return what a combination learns otherwise than one process; ``refused: …`` where a rank refuses it."""
    reference = alone(draw.model)
    tolerance = TOLERANCE["bfloat16" if draw.model == "bfloat16" else "float32"]
    ranks = LAYOUTS[draw.layout][0]
    flags = (*MODELS[draw.model].split(), *draw.flags)
    try:
        side = train_side(flags, ranks, STEPS, initial=reference.initial, platform="cpu")
    except WorldError as error:
        text = str(error)
        refusals = ("ArgumentError", "UserError", "PlanError", "DataError")
        return f"refused: {text.splitlines()[-1]}" if any(name in text for name in refusals) else text
    if len(side.gradients) != STEPS:
        return f"{len(side.gradients)} gradients of {STEPS}"
    for step, (found, wanted) in enumerate(zip(side.gradients, reference.gradients)):
        compared = compare_tensors(found.tensors, wanted.tensors, tolerance=tolerance)
        if not compared.equal:
            return f"gradients of step {step + 1}: {compared}"
    for name, losses in reference.losses.items():
        for found, wanted in zip(side.losses[name], losses, strict=True):
            if abs(found - wanted) > tolerance * abs(wanted):
                return f"{name}: {found}, not {wanted}"
    return ""
