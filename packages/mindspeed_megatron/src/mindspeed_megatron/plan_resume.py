"""Check of a checkpoint's plan against that of the run that resumes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_core.errors import CheckpointError
from mindspeed_core.resolver.plan_diff import PlanChange, compare_plans

if TYPE_CHECKING:
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")


def plan_change(session: Session, saved: Mapping[str, Any]) -> PlanChange:
    """Compare a checkpoint's plan, as `Plan.as_dict` gives it, with the session's."""
    records = session.registry.features
    affects = {name: bool(record.cls.affects_checkpoint) for name, record in records.items()}
    return compare_plans(saved, session.plan.as_dict(), affects)


def check_plan(
    session: Session,
    saved: Mapping[str, Any],
    where: str,
    further: Sequence[str] = (),
    *,
    resumes: bool = True,
) -> None:
    """Compare the plan of a checkpoint by the rule of ``--strict-plan-resume``.

    Args:
        session: the open session. With ``--finetune`` nothing is compared.
        saved: the checkpoint's plan.
        where: the checkpoint.
        further: other differences worth a warning, one phrase each.
        resumes: a training goes on; of one that starts with these weights, only what they need is compared.

    Raises:
        CheckpointError: the checkpoint holds what only other features can read, and the rule is ``error``.
    """
    args = session.args
    if args.strict_plan_resume == "off" or args.finetune:
        return
    change = plan_change(session, saved)
    if change.breaking and args.strict_plan_resume == "error":
        raise CheckpointError(
            f"{where}: the checkpoint needs other features: {'; '.join(change.breaking)}. "
            "--strict-plan-resume warn loads it all the same"
        )
    changed = [*change.breaking, *change.harmless, *further] if resumes else [*change.breaking]
    if changed and dist.get_rank() == 0:
        logger.warning("%s: the plan changed since it was written: %s", where, "; ".join(changed))
