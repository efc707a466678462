"""Check of a checkpoint's plan against that of the run that resumes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_core.errors import CheckpointError

if TYPE_CHECKING:
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")


@dataclass(frozen=True)
class PlanChange:
    """Differences of a run's plan from the checkpoint's.

    Attributes:
        breaking: features added or removed that change what a checkpoint holds, one phrase each.
        harmless: other differences, one phrase each; features that nobody asked for are none.
    """

    breaking: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()


def compare_plans(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    affects_checkpoint: Mapping[str, bool],
    counts_as: Mapping[str, str] | None = None,
) -> PlanChange:
    """Compare two plans as `Plan.as_dict` gives them.

    Args:
        saved: the checkpoint's plan.
        current: this run's plan.
        affects_checkpoint: whether a checkpoint needs a feature, for those that are installed; of others the
            saved plan says it, and one that says nothing is taken to affect it.
        counts_as: the feature whose checkpoints are another one's too, by name of that one.
    """
    before = _features(saved)
    now = _features(current)
    standing = counts_as or {}
    read_there = {standing.get(name, name) for name in before}
    read_here = {standing.get(name, name) for name in now}
    breaking: list[str] = []
    harmless: list[str] = []
    for name in [*before, *now]:
        if name in before and name in now:
            continue
        removed = name in before
        difference = f"{name} was {'active' if removed else 'not active'} when it was written"
        origin = before[name] if removed else now[name]
        stated = origin.get("affects_checkpoint")
        needed = affects_checkpoint.get(name, removed if stated is None else bool(stated))
        # Another feature that computes the same reads it, and writes the same.
        needed = needed and standing.get(name, name) not in (read_here if removed else read_there)
        if needed:
            installed = name in affects_checkpoint
            way = f"{origin.get('why') or 'its flag'}" if installed else f"pip install {origin.get('dist')}"
            breaking.append(f"{difference} ({'add' if removed else 'drop'} {way})")
        elif not _comes_by_itself(origin):
            harmless.append(difference)
    common_before = [name for name in before if name in now]
    common_now = [name for name in now if name in before]
    if common_before != common_now:
        harmless.append(f"order of features: {' '.join(common_before)} then, {' '.join(common_now)} now")
    for name in common_now:
        then, today = before[name].get("version"), now[name].get("version")
        if then != today:
            harmless.append(f"{name}: version {then} then, {today} now")
    old_slots, new_slots = dict(saved.get("slots") or {}), dict(current.get("slots") or {})
    changed = [
        slot for slot in sorted(old_slots.keys() & new_slots.keys()) if old_slots[slot] != new_slots[slot]
    ]
    harmless += [f"slot {slot}: {old_slots[slot]} then, {new_slots[slot]} now" for slot in changed]
    return PlanChange(tuple(breaking), tuple(harmless))


def plan_change(session: Session, saved: Mapping[str, Any]) -> PlanChange:
    """Compare a checkpoint's plan, as `Plan.as_dict` gives it, with the session's."""
    records = session.registry.features
    affects = {name: bool(record.cls.affects_checkpoint) for name, record in records.items()}
    counts_as = {
        name: record.cls.checkpoint_as for name, record in records.items() if record.cls.checkpoint_as
    }
    return compare_plans(saved, session.plan.as_dict(), affects, counts_as)


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


def _comes_by_itself(feature: Mapping[str, Any]) -> bool:
    """Return whether nobody asked for a feature: it is active with some sizes and not with others."""
    why = str(feature.get("why") or "")
    return why == "default" or why.startswith("implied by ")


def _features(plan: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = plan.get("features") or ()
    return {str(feature["name"]): feature for feature in found}
