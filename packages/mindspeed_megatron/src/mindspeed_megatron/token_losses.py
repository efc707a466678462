"""The stage between output layer and loss: what megatron-core computes inside a model is handed to features.

Every language model of megatron-core (GPT, Mamba, BERT, T5) turns logits into per-token losses in one method,
in a forward pass as in a schedule plan, for its own predictions as for those of further tokens. That method
of the built instance calls the stage where a feature takes part in it; otherwise nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import hookimpl
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.prediction_losses import reweighed, unweighed

if TYPE_CHECKING:
    import torch.distributed as dist

    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

STAGE = "compute_token_losses"
_METHOD = "compute_language_model_loss"
_LAST_PART = "_postprocess"

Plain = Callable[[Tensor, Tensor], Tensor]
"""From labels ``[b, s]`` and logits ``[s, b, v / tp]`` to losses ``[b, s]``."""


@dataclass
class _Passing:
    """Count the models and calls that pass the stage in one session.

    Attributes:
        models: how many models of this rank hand it their logits.
        calls: how often it was called.
        plain: the computation that the stage stands in for at the moment.
        features: who takes part in the stage; None until somebody asks.
    """

    models: int = 0
    calls: int = 0
    plain: Plain | None = None
    features: list[str] | None = None


@hookimpl(trylast=True)
def compute_token_losses(session: Session, logits: Tensor, labels: Tensor, model_chunk: Any) -> Tensor:
    """Compute the model's own loss: cross entropy over the vocabulary of all tensor-parallel ranks."""
    plain = session.state(_Passing).plain or _plain(model_chunk)
    # megatron-core writes the softmax into float32 logits, TransformerEngine the gradient into any.
    return plain(labels, logits.clone())


def through_stage(run: Run, model: Any, plain: Plain, labels: Tensor, logits: Tensor, head: int) -> Tensor:
    """Return the losses ``[b, s]`` that the stage makes of logits.

    Args:
        run: the run.
        model: the language model, without wrappers.
        plain: the computation that the stage stands in for.
        labels: ``[b, s]``.
        logits: ``[s, b, v / tp]``.
        head: 0, or which prediction of a further token this is.
    """
    passing = run.session.state(_Passing)
    passing.calls += 1
    outer, passing.plain = passing.plain, plain
    try:
        losses: Tensor = run.session.call(
            STAGE, run=run, logits=logits, labels=labels, model_chunk=model, head=head
        )
    finally:
        passing.plain = outer
    if losses.shape != labels.shape:
        raise SessionError(
            f"stage {STAGE}: the losses have the shape {tuple(losses.shape)}, the labels "
            f"{tuple(labels.shape)}; return one loss for each label"
        )
    return losses


def pass_token_losses(run: Run, model: Sequence[Any], group: dist.ProcessGroup | None = None) -> None:
    """Let the models in these chunks hand their logits to the stage, if a feature takes part in it.

    Collective over the group in that case.

    Args:
        run: the run.
        model: chunks, wrapped or not.
        group: the ranks that hold the model together; by default all.

    Raises:
        SessionError: no rank has a model that the stage could reach.
    """
    session = run.session
    names = _features(session)
    if not names:
        return
    found = [module for chunk in model for module in chunk.modules() if _has_losses(module)]
    for module in found:
        _attach(run, module)
    session.state(_Passing).models += len(found)
    if not any(all_gather_values(len(found), group)):
        raise SessionError(
            f"{', '.join(names)}: needs the logits, and no model here is a LanguageModule of megatron-core, "
            "which would hand them over; derive the model from it, or drop the flag"
        )


def check_passed(run: Run, *, at_loss: bool = False) -> None:
    """Refuse a loss to train on that was computed without the stage although a feature takes part in it.

    Args:
        run: the run.
        at_loss: called where the loss is known, so a model with logits is on this rank.

    Raises:
        SessionError: the model did not hand over its logits, which became a loss elsewhere.
    """
    passing = run.session.state(_Passing)
    if passing.calls or not run.context.training or not (at_loss or passing.models):
        return
    if passing.features is None:
        passing.features = _features(run.session)
    if passing.features:
        raise SessionError(
            f"{', '.join(passing.features)}: needs the logits on their way to the loss, but no model handed "
            "them over: it was called without labels, or a loop of your own did not pass it through "
            "session.model. Call it with labels=, pass logits through session.token_losses, or drop the flag"
        )


def _features(session: Session) -> list[str]:
    """Return who takes part in the stage, apart from the host."""
    return session.implementations(STAGE)[:-1]


def _has_losses(module: Any) -> bool:
    return isinstance(module, LanguageModule) and bool(getattr(module, "post_process", True))


def _plain(model: Any) -> Plain:
    """Return the model's own computation, whether or not its method calls the stage."""
    method = getattr(model, _METHOD)
    plain = getattr(method, "plain", None)
    return MethodType(plain, model) if plain is not None else method


def _attach(run: Run, model: LanguageModule) -> None:
    """Make the model's method call the stage, and count the predictions of one forward pass."""
    own = vars(model).get(_METHOD)
    # The stage stands inside of what weighs predictions, since who fills it need not call the rest.
    plain: Any = unweighed(own)
    if plain is None:
        plain = getattr(type(model), _METHOD) if own is None else (lambda _, *given: own(*given))
    further = getattr(model.config, "mtp_num_layers", None) or 0
    begun = [0]

    def losses(self: LanguageModule, labels: Tensor, logits: Tensor) -> Tensor:
        begun[0] += 1
        # Predictions of further tokens come first.
        head = begun[0] if begun[0] <= further else 0
        return through_stage(run, self, MethodType(plain, self), labels, logits, head)

    losses.plain = plain  # type: ignore[attr-defined]
    changes: dict[str, Any] = {_METHOD: reweighed(own, losses)}
    if further:
        last_part = getattr(type(model), _LAST_PART)

        def from_the_first(self: LanguageModule, *positional: Any, **named: Any) -> Any:
            begun[0] = 0
            return last_part(self, *positional, **named)

        changes[_LAST_PART] = from_the_first
    for name, function in changes.items():
        # Bound to the model, so that a copy of it calls its own.
        run.session.instances.set(STAGE, model, name, MethodType(function, model))
