"""Actions of a rank in a schedule, on one pipeline stage and one micro-batch, and their text form."""

from __future__ import annotations

import re
from typing import NamedTuple

from mindspeed_core.errors import UserError

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = "F", "B", "W", "A"
RECOMPUTE, OVERLAPPED, REDUCE, GATHER = "R", "O", "D", "G"
SWAP_OUT, SWAP_IN, NAMED = "SO", "SI", "X:"
COMPUTING = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD, RECOMPUTE)

_TEXT = re.compile(r"(SO|SI|[FBWARDG])(\d+)(?:\.(\d+))?\Z")
_NAMED_TEXT = re.compile(r"(X:[A-Za-z][\w-]*)@(\d+)\.(\d+)\Z")


class Action(NamedTuple):
    """One item of a rank's list.

    Attributes:
        op: ``F`` forward; ``B`` gradient of the input; ``W`` gradient of the weights; ``A`` both at once;
            ``R`` forward again, whose ``F`` keeps nothing; ``O`` a forward beside a backward pass; ``D``
            reduce the gradients of the stage's weights; ``G`` gather the parameters of the stage; ``SO`` let
            what is kept of the micro-batch go to the host, ``SI`` bring it back; ``X:name`` a function of
            another package.
        stage: global pipeline stage, 0 holds the embedding.
        microbatch: index within the step; 0 for ``D`` and ``G``, which concern all of them.
        parts: of ``O``: the forward pass, then the backward pass.
    """

    op: str
    stage: int
    microbatch: int
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        """Return the text form: ``F0.3`` is stage 0 and micro-batch 3, ``(F0.4|A3.1)`` two at once."""
        if self.op == OVERLAPPED:
            return f"({'|'.join(map(str, self.parts))})"
        if self.op in (REDUCE, GATHER):
            return f"{self.op}{self.stage}"
        if self.op.startswith(NAMED):
            return f"{self.op}@{self.stage}.{self.microbatch}"
        return f"{self.op}{self.stage}.{self.microbatch}"

    def flat(self) -> tuple[Action, ...]:
        """Return the actions that this one consists of."""
        return self.parts or (self,)


def F(stage: int, microbatch: int) -> Action:
    """Return a forward pass."""
    return Action(FORWARD, stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    """Return a backward pass to the input alone."""
    return Action(INPUT_GRADIENT, stage, microbatch)


def W(stage: int, microbatch: int) -> Action:
    """Return the gradient of the weights, after its ``B``."""
    return Action(WEIGHT_GRADIENT, stage, microbatch)


def A(stage: int, microbatch: int) -> Action:
    """Return a whole backward pass."""
    return Action(BACKWARD, stage, microbatch)


def R(stage: int, microbatch: int) -> Action:
    """Return a forward pass that is computed again for its backward pass."""
    return Action(RECOMPUTE, stage, microbatch)


def O(forward: Action, backward: Action) -> Action:  # noqa: E743
    """Return a forward pass beside a backward pass."""
    return Action(OVERLAPPED, forward.stage, forward.microbatch, (forward, backward))


def D(stage: int) -> Action:
    """Return the start of the reduction of a stage's gradients."""
    return Action(REDUCE, stage, 0)


def G(stage: int) -> Action:
    """Return the gathering of a stage's parameters."""
    return Action(GATHER, stage, 0)


def SO(stage: int, microbatch: int) -> Action:
    """Return the way to the host: of activations before backward, of operands between ``B`` and ``W``."""
    return Action(SWAP_OUT, stage, microbatch)


def SI(stage: int, microbatch: int) -> Action:
    """Return the way back, some actions before what needs it."""
    return Action(SWAP_IN, stage, microbatch)


def X(name: str, stage: int, microbatch: int) -> Action:
    """Return the call of a function of another package."""
    return Action(NAMED + name, stage, microbatch)


def parse_action(text: str) -> Action:
    """Read the text form of one action.

    Raises:
        UserError: it is none.
    """
    if text.startswith("(") and text.endswith(")"):
        parts = tuple(parse_action(part) for part in text[1:-1].split("|"))
        if len(parts) != 2 or parts[0].op != FORWARD or parts[1].op not in (BACKWARD, INPUT_GRADIENT):
            raise UserError(f"{text}: two at once are a forward and a backward pass, as (F0.4|A3.1)")
        return O(*parts)
    named = _NAMED_TEXT.match(text)
    if named is not None:
        return Action(named[1], int(named[2]), int(named[3]))
    match = _TEXT.match(text)
    if match is None or (match[3] is None) != (match[1] in (REDUCE, GATHER)):
        raise UserError(f"{text!r}: an action is a letter, a stage and a micro-batch, as F0.3, or D0 and G0")
    return Action(match[1], int(match[2]), int(match[3] or 0))
