"""Losses that layers add to the gradient, and the layouts on which they are those of one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mindspeed_testing.dense_model import DenseOptions, DenseStep, dense_step
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.numbered_batches import PROBES, numbered_step
from mindspeed_testing.training import SideRequest, train_rank

STEPS = 2
_PLAIN = (
    "--num-layers 2 --hidden-size 32 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type none --untie-embeddings-and-output-weights"
)
_EXPERTS = (
    f"{_PLAIN} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-num-groups 2 "
    "--moe-router-group-topk 2 --moe-token-dispatcher-type alltoall"
)
_NONE = "--moe-router-load-balancing-type none"


@dataclass(frozen=True)
class Losses:
    """A model with losses of layers: its flags and its definition."""

    flags: str
    options: DenseOptions


def _balance(kind: str) -> Losses:
    flags = f"{_EXPERTS} --moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 0.5"
    return Losses(flags, DenseOptions(balance={kind: 0.5}))


_SEVERAL = (
    "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.3 0.2 0.1"
)
LOSSES = {
    "aux": _balance("aux_loss"),
    "seq": _balance("seq_aux_loss"),
    "global": _balance("global_aux_loss"),
    "z": Losses(f"{_EXPERTS} {_NONE} --moe-z-loss-coeff 0.5", DenseOptions(z=0.5)),
    "device": Losses(
        f"{_EXPERTS} {_NONE} --moe-device-level-aux-loss-coeff 0.5", DenseOptions(device=0.5, devices=2)
    ),
    "communication": Losses(
        f"{_EXPERTS} {_NONE} --moe-comm-aux-loss-coeff 0.5", DenseOptions(communication=0.5, devices=2)
    ),
    "predictions": Losses(
        f"{_PLAIN} --mtp-num-layers 2 --mtp-loss-scaling-factor 2",
        DenseOptions(predictions=2, prediction_weight=2.0),
    ),
    "all": Losses(
        f"{_EXPERTS} {_SEVERAL} --moe-z-loss-coeff 0.2 --moe-device-level-aux-loss-coeff 0.4 "
        "--moe-comm-aux-loss-coeff 0.3 --mtp-num-layers 1",
        DenseOptions(
            predictions=1,
            balance={"aux_loss": 0.3, "seq_aux_loss": 0.2, "global_aux_loss": 0.1},
            z=0.2,
            device=0.4,
            communication=0.3,
            devices=2,
        ),
    ),
}

_TP2, _CP2 = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2 --use-flash-attn",
)
_PP2, _EP2 = "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"


@dataclass(frozen=True)
class Layout:
    """Ranks, flags, samples of a micro-batch and data-parallel ranks."""

    ranks: int
    flags: str = ""
    micro: int = 1
    data: int = 1


LAYOUTS = {
    "micro-batches of 1": Layout(1),
    "of 2": Layout(1, micro=2),
    "of 4": Layout(1, micro=4),
    "tp 2, sp": Layout(2, _TP2, 2),
    "cp 2": Layout(2, _CP2, 2),
    "dp 2": Layout(2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 1, 2),
    "dp 2, of 2": Layout(2, "", 2, 2),
    "ep 2": Layout(2, _EP2, 1, 2),
    "pp 2": Layout(2, _PP2),
    "tp 2, sp, cp 2": Layout(4, f"{_TP2} {_CP2}", 2),
    "tp 2, sp, dp 2": Layout(4, _TP2, 1, 2),
    "cp 2, pp 2": Layout(4, f"{_CP2} {_PP2}", 2),
    "zb-h1": Layout(2, f"{_PP2} --pipeline-schedule zb-h1"),
}


@dataclass(frozen=True)
class Case:
    """A cell of the matrix."""

    losses: str
    layout: str
    mask: str
    per_token: bool

    def __str__(self) -> str:
        return f"{self.losses}, {self.layout}, {self.mask}, {'per token' if self.per_token else 'means'}"

    @property
    def flags(self) -> list[str]:
        layout = LAYOUTS[self.layout]
        flags = f"{LOSSES[self.losses].flags} {layout.flags} --micro-batch-size {layout.micro} --clip-grad 0"
        return [*flags.split(), *(("--calculate-per-token-loss",) if self.per_token else ())]


def train(cases, initial):
    """Train cases of as many ranks one after the other: norms and losses of each step."""
    found = []
    for case in cases:
        request = SideRequest(
            training_flags(case.flags, STEPS + 1),
            STEPS,
            initial.get(case.losses),
            gradients=False,
            probes=PROBES[case.mask],
            platform="cpu",
        )
        record = train_rank(request)
        found.append((record.grad_norms, record.losses, record.initial, record.parameters))
    return found


def defined(case, parameters, step=0) -> tuple[float, DenseStep]:
    """The norm of all gradients and the losses of a step, by definition."""
    layout = LAYOUTS[case.layout]
    leaves = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    batches = numbered_step(
        step, case.mask, batch=4, micro=layout.micro, ranks=layout.data, length=32, vocabulary=128
    )
    batches = [replace(batch, mask=batch.mask.double()) for batch in batches]
    found = dense_step(leaves, batches, replace(LOSSES[case.losses].options, per_token=case.per_token))
    gradients = torch.autograd.grad(found.total, list(leaves.values()), allow_unused=True)
    squares = [gradient.square().sum() for gradient in gradients if gradient is not None]
    return float(torch.stack(squares).sum().sqrt()), found
