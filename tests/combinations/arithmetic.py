"""Draws of flags that change what is learnt, with features on a layout, against one process with those flags.

Vocabularies that tensor parallelism pads are drawn for resumed runs alone, which keep their checkpoint's: in
a run that starts, ids beyond the vocabulary have a row each.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, replace
from functools import cache

import drawn
import torch

from mindspeed_core.activation import prepare
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.compare import compare_tensors
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.numbered_batches import PROBES
from mindspeed_testing.training import Checkpoint, SideResult, train_side
from mindspeed_testing.worlds import WorldError

STEPS = 2
TOLERANCE = 1e-4

_BALANCES = (
    "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.3 0.2 0.1"
)
_CAPACITY = "--moe-expert-capacity-factor 0.75"
_EVERY = (
    "--calculate-per-token-loss",
    "--softmax-type learnable",
    "--attention-output-gate",
    "--window-size 8,0",
)
ARITHMETIC = {
    "gpt": (*_EVERY[:1], *_EVERY[3:]),
    "llama": (*_EVERY, "--qk-layernorm", "--softmax-type off-by-one"),
    "latent": ("--calculate-per-token-loss", "--qk-layernorm"),
    "predictions": ("--calculate-per-token-loss", "--mtp-num-layers 2", "--mtp-loss-scaling-factor 1.5"),
    "experts": (
        *("--calculate-per-token-loss", _BALANCES, "--moe-z-loss-coeff 0.2"),
        *("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.4", "--mtp-num-layers 1"),
        "--moe-router-num-groups 2 --moe-router-group-topk 2 --moe-device-level-aux-loss-coeff 0.4",
        "--moe-router-num-groups 2 --moe-router-group-topk 2 --moe-comm-aux-loss-coeff 0.3",
        *(_CAPACITY, f"{_CAPACITY} --moe-token-drop-policy position"),
        f"{_CAPACITY} --moe-token-drop-policy position --moe-pad-expert-input-to-capacity",
        *("--moe-router-pre-softmax", "--moe-router-score-function sigmoid", "--attention-output-gate"),
    ),
}
_ODD = ("--vocab-size", "121", "--make-vocab-size-divisible-by", "1")
_OF_A_RANK = ("--moe-expert-capacity-factor", "aux_loss", "aux-loss-coeff")
"""What is counted in the tokens of a rank or micro-batch: the same on layouts that give a rank as many."""


@dataclass(frozen=True)
class Arithmetic:
    """A draw.

    Attributes:
        model: a name of `ARITHMETIC`.
        layout: a name of `drawn.LAYOUTS`.
        changes: of `ARITHMETIC`, on both sides.
        options: of `drawn.OPTIONS` and `drawn.SCHEDULES`, on the layout alone.
        mask: a name of `PROBES`.
        resumed: the layout begins with a checkpoint of one process, without its options.
        odd: the vocabulary is one that tensor parallelism does not divide; for resumed ones, which keep the
            padding of their checkpoint.
    """

    model: str
    layout: str
    changes: tuple[str, ...]
    options: tuple[str, ...] = ()
    mask: str = "whole"
    resumed: bool = False
    odd: bool = False

    @property
    def model_flags(self) -> tuple[str, ...]:
        """Return the flags of the model."""
        return (*drawn.MODELS[self.model].split(), *(_ODD if self.odd else ()))

    @property
    def reference(self) -> tuple[str, ...]:
        """Return the flags of one process."""
        return (*self.model_flags, *" ".join(self.changes).split())

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags of the layout."""
        draw = drawn.Draw(self.model, self.layout, (*self.options, *self.changes))
        return (*self.model_flags, *draw.flags)

    def __str__(self) -> str:
        draw = drawn.Draw(self.model, self.layout, (*self.options, *self.changes))
        vocabulary = ", odd vocabulary" if self.odd else ""
        return f"{draw}, {self.mask}{', resumed' if self.resumed else ''}{vocabulary}"


def drawn_arithmetic(seed: int) -> Arithmetic:
    """Return the draw of a seed."""
    source = random.Random(f"arithmetic {seed}")
    model = source.choice((*ARITHMETIC, "experts", "experts"))
    changes = tuple(source.sample(ARITHMETIC[model], min(source.randint(1, 3), len(ARITHMETIC[model]))))
    layouts = drawn._OF_EXPERTS if model == "experts" else drawn._DENSE
    if any(name in change for change in changes for name in _OF_A_RANK):
        # Ranks of data and sequence parallelism count tokens of their own.
        layouts = ("one", "pp")
    layout = source.choice(layouts)
    options = source.sample(drawn.OPTIONS, source.randint(0, 4))
    if "pp" in layout and source.random() < 0.5:
        options.append(source.choice(drawn.SCHEDULES))
    mask, resumed = source.choice(tuple(PROBES)), source.random() < 0.2
    return Arithmetic(
        model, layout, changes, tuple(options), mask, resumed, resumed and source.random() < 0.5
    )


def accepted(draw: Arithmetic) -> Arithmetic:
    """Return the draw with those changes and options, in order, that the resolver accepts together."""
    registry = Registry.discover()

    def fits(found: Arithmetic) -> bool:
        line = training_flags(found.flags, STEPS, registry)
        try:
            prepare(line, platform="cpu", registry=registry, host="standalone")
        except (PlanError, UserError):
            return False
        return True

    found = replace(draw, changes=(), options=())
    for field in ("changes", "options"):
        for value in getattr(draw, field):
            more = replace(found, **{field: (*getattr(found, field), value)})
            if fits(more):
                found = more
    return found


@cache
def alone(flags: tuple[str, ...], mask: str, folder: str | None) -> SideResult:
    """Return the training of one process, which leaves a checkpoint of its first step in a folder."""
    checkpoint = Checkpoint(folder, 1) if folder else None
    return train_side(flags, 1, STEPS, platform="cpu", probes=PROBES[mask], checkpoint=checkpoint)


def problem(draw: Arithmetic) -> str:
    """Return what a draw learns otherwise than one process; ``refused: …`` where a rank refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _problem(draw, folder if draw.resumed else None)
        except WorldError as error:
            text = str(error)
            refusals = (
                "ArgumentError",
                "UserError",
                "PlanError",
                "DataError",
                "SessionError",
                "CheckpointError",
            )
            return f"refused: {text.splitlines()[0]}" if any(name in text for name in refusals) else text


def _problem(draw: Arithmetic, folder: str | None) -> str:
    # Its state is saved in a form of its own.
    sharded = (
        ("--use-distributed-optimizer",) if folder and "--use-distributed-optimizer" in draw.flags else ()
    )
    reference = alone((*draw.reference, *sharded), draw.mask, folder)
    side = train_side(
        draw.flags,
        drawn.LAYOUTS[draw.layout][0],
        STEPS,
        initial=None if folder else reference.initial,
        platform="cpu",
        probes=PROBES[draw.mask],
        checkpoint=Checkpoint(folder, 1, load=True) if folder else None,
    )
    for step, (found, wanted) in enumerate(zip(side.gradients, reference.gradients, strict=True)):
        compared = compare_tensors(found.tensors, wanted.tensors, tolerance=TOLERANCE)
        if not compared.equal:
            return f"gradients of step {step + 1}: {compared}"
    for step, (norm, gradients) in enumerate(zip(side.grad_norms, side.gradients)):
        squares = [tensor.double().square().sum() for tensor in gradients.tensors.values()]
        whole = float(torch.stack(squares).sum().sqrt())
        if norm is not None and abs(norm - whole) > 1e-5 * whole:
            return f"norm of step {step + 1}: {norm}, not {whole}"
    for name, losses in reference.losses.items():
        for found_loss, wanted_loss in zip(side.losses[name], losses, strict=True):
            if abs(found_loss - wanted_loss) > TOLERANCE * max(abs(wanted_loss), 1.0):
                return f"{name}: {found_loss}, not {wanted_loss}"
    return ""
