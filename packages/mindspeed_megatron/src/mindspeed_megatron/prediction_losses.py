"""Weight of the losses of further predictions (``--mtp-num-layers``): that of one process, on every layout.

A prediction's loss is a mean over its own tokens, which are fewer than the model's: of a micro-batch, then
over micro-batches and data-parallel ranks; with ``--calculate-per-token-loss`` of the whole step. What is
reported is the mean over the step, as of the model's own loss. megatron-core weighs it by the tokens of the
model's own loss, reports a mean over micro-batches, and divides by zero where no token of a micro-batch
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from mindspeed_megatron.step_tokens import StepTokens
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_OWNER = "losses of further predictions"
_SHIFT, _PROCESS, _METHOD = "roll_tensor", "process_mtp_loss", "compute_language_model_loss"
_AHEAD = "_mindspeed_positions_ahead"
_SCALED = "weighs_predictions"

Shift = Callable[..., tuple[Tensor, Tensor]]
Losses = Callable[[Any, Tensor, Tensor], Tensor]
"""From a model, labels ``[b, s]`` and logits ``[s, b, v / tp]`` to losses ``[b, s]``."""


class _Shifted:
    """Record that the shift of labels and masks is the session's own."""

    done: bool = False


def weigh_predictions(session: Session, model: Iterable[Any]) -> None:
    """Give the losses of further predictions in built chunks their weight. Call it once or several times.

    Args:
        session: the open session.
        model: chunks, wrapped or not.
    """
    for chunk in model:
        found = unwrap(chunk)
        config = getattr(found, "config", None)
        predicts = getattr(config, "mtp_num_layers", None) and getattr(found, "post_process", False)
        if not predicts or not isinstance(found, gpt_model.GPTModel):
            continue
        _replace_shift(session)
        if not hasattr(getattr(found, _METHOD), _SCALED):
            _scale(session, found)


def _replace_shift(session: Session) -> None:
    """Let the model divide by what a prediction's tokens are, in this session."""
    state = session.state(_Shifted)
    if state.done:
        return
    state.done = True
    counted = session.state(StepTokens)
    # From 0.17 on the losses are computed in a function of their own, which shifts for itself.
    name, changed = (_SHIFT, _counting) if hasattr(gpt_model, _SHIFT) else (_PROCESS, _with_counting_shift)
    original = getattr(gpt_model, name)
    replacement = changed(original, counted)

    def undo() -> None:
        setattr(gpt_model, name, original)
        state.done = False

    session.ledger.setting(
        f"{gpt_model.__name__}:{name}",
        lambda: setattr(gpt_model, name, replacement),
        undo,
        owner=_OWNER,
        reason="losses are divided by the sum that the shift returns, and nothing else says so",
    )


def _counting(original: Shift, counted: StepTokens) -> Shift:
    """Return a shift that counts tokens, and returns what a sum of losses is divided by beside the result."""

    def shift(
        tensor: Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Shift labels or a mask ``[b, s]``; return what the sum of losses is divided by, too."""
        moved, total = original(tensor, shifts, dims, cp_group, packed_seq_params)
        ahead = getattr(tensor, _AHEAD, 0) + 1
        setattr(moved, _AHEAD, ahead)
        ranks = 1 if cp_group is None else cp_group.size()
        counted.shift(ahead, moved, total)
        now = counted.now
        if now is None:
            return moved, torch.where(total > 0, total, 1 / ranks if total.is_floating_point() else 1)
        return moved, now.divisor / (now.micro_batches / now.copies * ranks)

    return shift


def _with_counting_shift(original: Callable[..., Tensor], counted: StepTokens) -> Callable[..., Tensor]:
    """Return ``process_mtp_loss`` with a shift that counts."""
    parameters = signature(original)

    def process(*given: Any, **named: Any) -> Tensor:
        """Attach the losses of further predictions to hidden states ``[(1 + n) * s, b, h]``."""
        arguments = parameters.bind(*given, **named).arguments
        labels, mask = arguments["labels"], arguments.get("loss_mask")
        if labels is None:
            return original(*given, **named)
        plain: Shift = multi_token_prediction.roll_tensor
        shift = _counting(plain, counted)
        tokens = labels.new_tensor(labels.numel()) if mask is None else mask.sum()

        def own(*those: Any, **options: Any) -> tuple[Tensor, Tensor]:
            moved, divisor = shift(*those, **options)
            # Losses per token are multiplied by the tokens of the mask, which the sum of them undoes.
            return moved, tokens if arguments["config"].calculate_per_token_loss else divisor

        vars(multi_token_prediction)[_SHIFT] = own
        try:
            return original(*given, **named)
        finally:
            vars(multi_token_prediction)[_SHIFT] = plain

    return process


def _scale(session: Session, model: Any) -> None:
    """Let losses of predictions weigh by their own tokens where gradients are divided by the model's."""
    own = vars(model).get(_METHOD)
    inner = getattr(type(model), _METHOD) if own is None else (lambda _, *given: own(*given))
    # Bound to the model, so that a copy of it calls its own.
    session.instances.set(_OWNER, model, _METHOD, MethodType(_scaled(session, inner), model))


def _scaled(session: Session, inner: Losses) -> Losses:
    """Return a method of models whose losses of predictions weigh by their own tokens.

    Whoever puts another computation in the place of ``inner`` weighs that again: `reweighed`.
    """
    counted = session.state(StepTokens)

    def losses(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        found: Tensor = inner(self, labels, logits)
        ahead, now = getattr(labels, _AHEAD, 0), counted.now
        if ahead:
            counted.add(ahead, found)
        if not ahead or now is None:
            return found
        return found * (now.divisor / now.further[ahead - 1].clamp(min=1))

    setattr(losses, _SCALED, lambda other: _scaled(session, other))
    losses.inner = inner  # type: ignore[attr-defined]
    if hasattr(inner, "plain"):
        losses.plain = inner.plain  # type: ignore[attr-defined]
    return losses


def unweighed(method: Any) -> Losses | None:
    """Return what a method computes before losses of predictions are weighed; None where it weighs none."""
    return method.inner if hasattr(method, _SCALED) else None


def reweighed(method: Any, other: Losses) -> Losses:
    """Return ``other`` with the weights that a method gives losses of predictions."""
    weigh = getattr(method, _SCALED, None)
    return other if weigh is None else weigh(other)
