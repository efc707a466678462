"""Values of ``--optimizer`` and ``--lr-decay-style`` that features bring.

A feature adopts the flag with a choice of its own. megatron-core knows nothing of it: it is asked for a value
that stands in, and the feature changes what comes of that. That one does is checked here, for every host.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError, CheckpointError, SessionError

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature
    from mindspeed_core.session import Session

STAND_INS = {"--optimizer": ("optimizer", "adam"), "--lr-decay-style": ("lr_decay_style", "constant")}
"""By flag: the argument, and the value that stands in for one that a feature brings."""
_KNOWN = {
    "--optimizer": ("adam", "sgd"),
    "--lr-decay-style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
}


@dataclass
class StandIns:
    """Objects built in place of something that a feature brings.

    Attributes:
        optimizers: the inner optimizers.
    """

    optimizers: list[Any] = field(default_factory=list)


def bringing(session: Session, option: str) -> list[str]:
    """Return the active features that bring the value of a flag, none where it is megatron-core's own.

    Raises:
        ArgumentError: a feature that brings it is installed, but not active.
    """
    value = getattr(session.args, STAND_INS[option][0], None)
    if value is None or value in _KNOWN[option]:
        return []
    installed = [record.cls for record in session.registry.features.values()]
    names = [cls.name for cls in installed if _declares(session, cls, option, value)]
    active = [name for name in names if name in session.plan.names]
    if names and not active:
        raise ArgumentError(
            option,
            value,
            f"it belongs to {', '.join(names)}, which is not active",
            "the plan says why (--plan-only); " + _own(option),
        )
    return active


def unknown(session: Session, option: str) -> ArgumentError:
    """Return the error of a value that nobody here knows."""
    value = getattr(session.args, STAND_INS[option][0])
    return ArgumentError(option, value, "no installed feature brings it", _own(option))


def _own(option: str) -> str:
    return f"without a feature: {', '.join(_KNOWN[option])}"


def _declares(session: Session, cls: type[Feature], option: str, value: Any) -> bool:
    for flag in cls.flags:
        if option in flag.options:
            contributed = session.registry.extension_names(flag.choices_from) if flag.choices_from else ()
            if value in flag.choices or value in contributed:
                return True
    return False


def stands_in(session: Session, optimizer: Any) -> None:
    """Remember an optimizer whose inner optimizers a feature is to replace."""
    session.state(StandIns).optimizers += _inner(optimizer)


def check_optimizer(session: Session, optimizer: Any) -> None:
    """Check that what stood in for the optimizer of a feature is gone.

    Raises:
        SessionError: the feature has left it in place.
    """
    built = session.state(StandIns).optimizers
    if any(one is other for one in _inner(optimizer) for other in built):
        names = ", ".join(bringing(session, "--optimizer"))
        raise SessionError(
            f"--optimizer {session.args.optimizer}: {names} brings it, but leaves megatron-core's Adam in "
            "place; a wrapper of build_optimizer calls mindspeed_core.put_inside"
        )
    built.clear()


def check_schedule(session: Session, scheduler: Any) -> None:
    """Check that what stood in for the schedule of a feature is gone.

    Raises:
        SessionError: the feature has left it in place.
    """
    names = bringing(session, "--lr-decay-style")
    if names and getattr(scheduler, "lr_decay_style", "") == STAND_INS["--lr-decay-style"][1]:
        raise SessionError(
            f"--lr-decay-style {session.args.lr_decay_style}: {', '.join(names)} brings it, but leaves the "
            "learning rate constant; a wrapper of build_scheduler calls mindspeed_core.follow_schedule"
        )


def check_saved_style(args: Namespace, scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Check that the schedule of a checkpoint, where it is to be followed, is known here.

    Raises:
        CheckpointError: a feature that is not active brings it.
    """
    style = saved.get("lr_decay_style")
    own = (*_KNOWN["--lr-decay-style"], getattr(scheduler, "lr_decay_style", None))
    if style is not None and style not in own and args.use_checkpoint_opt_param_scheduler:
        raise CheckpointError(
            f"--use-checkpoint-opt-param-scheduler: the checkpoint's schedule is {style!r}, which a feature "
            f"brings; give --lr-decay-style {style}, or take the schedule from the flags with "
            "--override-opt-param-scheduler"
        )


def _inner(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]
