"""Draws of what experts can be asked for, compared with their definition in plain torch.

Routers, capacities, drops, losses, masks and dispatchers on a layout; the definition
(`mindspeed_testing.dense_model`) calls neither megatron-core nor a feature.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from mindspeed_core.activation import prepare
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.compare import compare_tensors
from mindspeed_testing.dense_model import DenseOptions, dense_step
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.numbered_batches import MASKS, PROBES, numbered_step
from mindspeed_testing.training import train_side
from mindspeed_testing.worlds import WorldError

TOLERANCE = 1e-4
_MODEL = (
    "--num-layers 2 --hidden-size 32 --swiglu --disable-bias-linear --normalization RMSNorm --clip-grad 0 "
    "--position-embedding-type none --untie-embeddings-and-output-weights --num-experts 8 "
    "--moe-ffn-hidden-size 32 --moe-router-num-groups 2 --moe-router-group-topk 2"
)
_SPLIT = {
    "tp": (2, "--tensor-model-parallel-size 2 --sequence-parallel", 1),
    "cp": (2, "--context-parallel-size 2 --use-flash-attn", 1),
    "whole experts": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        1,
    ),
}
LAYOUTS = {
    "one": (1, "", 1),
    "dp": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
    "ep": (2, "--expert-model-parallel-size 2", 2),
    "pp": (2, "--pipeline-model-parallel-size 2", 1),
    **_SPLIT,
}
"""Ranks, flags, data-parallel ranks. A capacity is counted in a rank's part of a split sequence."""
FEATURES = (
    *("--moe-grouped-gemm", "--moe-grouped-gemm --moe-alltoall-overlap-comm", "--moe-permutation-async-comm"),
    *("--use-fused-moe-token-permute-and-unpermute", "--moe-grouped-gemm --moe-fb-overlap", "--moe-zerc"),
    *("--moe-grouped-gemm --moe-zero-memory level0", "--moe-grouped-gemm --moe-zero-memory level1"),
    "--moe-grouped-gemm --gemm-gradient-accumulation-fusion",
)


@dataclass(frozen=True)
class DenseDraw:
    """A draw: flags of the model, its definition, the layout with features, and the mask of its batches."""

    flags: tuple[str, ...]
    options: DenseOptions
    layout: str
    micro: int
    features: tuple[str, ...]
    mask: str

    def line(self) -> list[str]:
        """Return all flags."""
        words = f"{_MODEL} {' '.join(self.flags)} {LAYOUTS[self.layout][1]} {' '.join(self.features)}"
        return [*words.split(), "--micro-batch-size", str(self.micro)]

    def __str__(self) -> str:
        return f"{self.layout} of {self.micro}, {self.mask}: {' '.join((*self.flags, *self.features))}"


def drawn_dense(seed: int) -> DenseDraw:
    """Return the draw of a seed."""
    source = random.Random(f"dense {seed}")
    # Of eight experts; a router whose tokens choose all of them has no balance to learn.
    topk = source.choice((2, 4))
    flags = [f"--moe-router-topk {topk}"]
    routing: dict[str, object] = {}
    if source.random() < 0.3:
        flags.append("--moe-router-score-function sigmoid")
        routing["score_function"] = "sigmoid"
    elif source.random() < 0.3:
        flags.append("--moe-router-pre-softmax")
        routing["pre_softmax"] = True
    if source.random() < 0.3:
        flags.append("--moe-router-topk-scaling-factor 1.5")
        routing["scaling_factor"] = 1.5
    drops = source.random() < 0.5
    if drops:
        factor, policy = source.choice((0.5, 0.75, 1.0)), source.choice(("probs", "position"))
        flags.append(f"--moe-expert-capacity-factor {factor} --moe-token-drop-policy {policy}")
        flags += ["--moe-pad-expert-input-to-capacity"] * source.randint(0, 1)
        routing |= {"capacity_factor": factor, "policy": policy}
    kinds = source.sample(("aux_loss", "seq_aux_loss", "global_aux_loss"), source.randint(0, 3))
    balance = {kind: source.choice((0.1, 0.3)) for kind in kinds}
    named = " ".join(kinds) or "none"
    flags.append(f"--moe-router-load-balancing-type {named}")
    if kinds:
        flags.append(f"--moe-aux-loss-coeff {' '.join(map(str, balance.values()))}")
    z, device, sent = (source.choice((0.0, 0.2)) for _ in range(3))
    device, sent = (0.0, 0.0) if drops else (device, sent)
    named_losses = (("--moe-z-loss-coeff", z), ("--moe-device-level-aux-loss-coeff", device))
    flags += [
        f"{flag} {value}" for flag, value in (*named_losses, ("--moe-comm-aux-loss-coeff", sent)) if value
    ]
    per_token, predictions = source.random() < 0.6, source.randint(0, 1)
    flags += ["--calculate-per-token-loss"] * per_token + ["--mtp-num-layers 1"] * predictions
    flags.append(f"--moe-token-dispatcher-type {source.choice(('allgather', 'alltoall'))}")
    layouts = [name for name in LAYOUTS if not (drops and name in _SPLIT)]
    options = DenseOptions(
        predictions=predictions,
        per_token=per_token,
        topk=topk,
        balance=balance,
        z=z,
        devices=2,
        device=device,
        communication=sent,
        routing=routing,
    )
    features = source.sample(FEATURES, source.randint(0, 2))
    return DenseDraw(
        tuple(flags),
        options,
        source.choice(layouts),
        source.choice((1, 2)),
        tuple(features),
        source.choice(tuple(MASKS)),
    )


def accepted(draw: DenseDraw) -> DenseDraw:
    """Return the draw with those of its features, in order, that the resolver accepts."""
    registry = Registry.discover()
    kept: tuple[str, ...] = ()
    for feature in draw.features:
        more = (*kept, feature)
        found = DenseDraw(draw.flags, draw.options, draw.layout, draw.micro, more, draw.mask)
        try:
            line = training_flags(found.line(), 1, registry)
            prepare(line, platform="cpu", registry=registry, host="standalone")
        except (PlanError, UserError):
            continue
        kept = more
    return DenseDraw(draw.flags, draw.options, draw.layout, draw.micro, kept, draw.mask)


def problem(draw: DenseDraw) -> str:
    """Return what a draw learns otherwise than its definition; ``refused: …`` where a rank refuses it."""
    ranks, _, data = LAYOUTS[draw.layout]
    try:
        side = train_side(draw.line(), ranks, 1, platform="cpu", probes=PROBES[draw.mask])
    except WorldError as error:
        text = str(error)
        refusals = ("ArgumentError", "UserError", "PlanError", "DataError", "SessionError")
        return f"refused: {text.splitlines()[0]}" if any(name in text for name in refusals) else text
    leaves = {name: value.double().requires_grad_() for name, value in side.initial.tensors.items()}
    batches = numbered_step(0, draw.mask, batch=4, micro=draw.micro, ranks=data, length=32, vocabulary=128)
    step = dense_step(leaves, batches, draw.options)
    found = torch.autograd.grad(step.total, list(leaves.values()), allow_unused=True)
    wanted = {
        name: (torch.zeros_like(leaf) if gradient is None else gradient).float()
        for (name, leaf), gradient in zip(leaves.items(), found)
    }
    compared = compare_tensors(side.gradients[0].tensors, wanted, tolerance=TOLERANCE)
    if not compared.equal:
        return f"gradients: {compared}"
    for name in step.reported.keys() & side.losses.keys():
        loss, value = side.losses[name][0], step.reported[name].item()
        if abs(loss - value) > TOLERANCE * max(1.0, abs(value)):
            return f"{name}: {loss}, not {value}"
    return ""
