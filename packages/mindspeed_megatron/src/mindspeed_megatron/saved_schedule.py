"""The schedule of a checkpoint and that of the flags, where the checkpoint keeps one value in two places.

megatron-core's scheduler saves its bounds and compares them when it is loaded. Each group of parameters has
bounds of its own in the optimizer's state, beside the constants of the update rule (betas, epsilon,
momentum); they come back with that state, uncompared, and win over what the scheduler decided. Here both obey
one rule, that of the scheduler: ``--override-opt-param-scheduler`` takes the flags,
``--use-checkpoint-opt-param-scheduler`` the checkpoint, and without either they must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.instruments.kept_state import inner_optimizers

Values = dict[str, Any]

_PROGRESS = ("params", "step", "lr", "weight_decay", "is_decoupled_lr")
"""Entries of a group that move while training, or only find it again."""
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Entries that choose between ways to compute the same update: always the run's own."""
_BOUNDS = ("max_lr", "min_lr")
_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "eps": "--adam-eps",
    "momentum": "--sgd-momentum",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "lr_decay_style": "--lr-decay-style",
    "wd_incr_style": "--weight-decay-incr-style",
    "lr_warmup_steps": "the warm-up (--lr-warmup-iters x --global-batch-size)",
    "lr_decay_steps": "the decay (--lr-decay-iters or --train-iters x --global-batch-size)",
    "wd_incr_steps": "the change of the weight decay (--train-iters x --global-batch-size)",
}
_SAMPLES = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
_OLDER_NAMES = {
    "max_lr": ("start_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps"),
    "lr_decay_style": ("decay_style",),
}
"""Names that Megatron-LM gave what its schedulers saved, before the present ones."""
_WAY_OUT = (
    "--override-opt-param-scheduler takes the flags, --use-checkpoint-opt-param-scheduler the checkpoint"
)


def group_values(optimizer: Any) -> tuple[Values, ...]:
    """Return the constants of each group of parameters, in order; take them before a checkpoint is loaded.

    Args:
        optimizer: of megatron-core; of anything without groups nothing is returned.
    """
    groups = getattr(optimizer, "param_groups", None) or ()
    progress = {*_PROGRESS, *_counts(optimizer)}
    return tuple({name: value for name, value in group.items() if name not in progress} for group in groups)


def check_schedule(scheduler: Any, saved: Mapping[str, Any], where: str) -> None:
    """Compare the schedule that a checkpoint holds, where neither of the two flags decides.

    Args:
        scheduler: megatron-core's ``OptimizerParamScheduler``, before it loads ``saved``.
        saved: what one saved; lengths are counted in samples.
        where: the checkpoint.

    Raises:
        CheckpointError: names every value that differs, with both.
    """
    if _takes_flags(scheduler) or _takes_checkpoint(scheduler):
        return
    differing = list(_schedule_differences(scheduler, saved))
    if differing:
        raise CheckpointError(
            f"{where}: the schedule differs from the flags: {'; '.join(differing)}; {_WAY_OUT}"
        )


def settle_groups(
    optimizer: Any, scheduler: Any, own: Sequence[Values], where: str, *, loaded: bool = True
) -> list[str]:
    """Let the groups of parameters obey the rule of the scheduler, after both were loaded.

    Args:
        optimizer: the optimizer.
        scheduler: megatron-core's, as it is after its load; with another one nothing is done.
        own: what `group_values` returned before the optimizer was loaded.
        where: the checkpoint.
        loaded: the optimizer's state was loaded, and with it the values of its groups.

    Returns:
        What a user should know.

    Raises:
        CheckpointError: values of a group differ, and neither flag decides.
    """
    groups = getattr(optimizer, "param_groups", None) or ()
    if not hasattr(scheduler, "override_opt_param_scheduler") or len(groups) != len(own):
        return []
    notes: list[str] = []
    differing: list[str] = []
    for group, own_group in zip(groups, own):
        group.update(
            {name: own_group[name] for name in _IMPLEMENTATION if name in own_group and name in group}
        )
        if loaded:
            differing += _group_differences(group, own_group)
            if _takes_flags(scheduler):
                group.update({name: value for name, value in own_group.items() if name in group})
        elif _takes_checkpoint(scheduler) and not _is_decoupled(group):
            group.update({name: getattr(scheduler, name) for name in _BOUNDS if name in group})
    differing = list(dict.fromkeys(differing))
    if differing and not _takes_flags(scheduler) and not _takes_checkpoint(scheduler):
        raise CheckpointError(
            f"{where}: groups of parameters differ from the flags: {'; '.join(differing)}; {_WAY_OUT}"
        )
    if differing:
        source = "flags" if _takes_flags(scheduler) else "checkpoint"
        notes.append(f"{where}: taken from the {source}: {'; '.join(differing)}")
    # The scheduler has set the rates before it had all of its values, and by those of the loaded groups.
    scheduler.step(0)
    return notes


def _counts(optimizer: Any) -> set[str]:
    """Return what update rules count in groups of parameters, beside steps."""
    return {name for inner in inner_optimizers(optimizer) for name in getattr(inner, "counts", ())}


def _takes_flags(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "override_opt_param_scheduler", False))


def _takes_checkpoint(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "use_checkpoint_opt_param_scheduler", False))


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    """Return whether a group has the rates of ``--decoupled-lr``, as megatron-core 0.15 or 0.16 marks it."""
    return bool(group.get("is_decoupled_lr")) or not group.get("default_config", True)


def _schedule_differences(scheduler: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    for name in _FLAGS:
        if not hasattr(scheduler, name):
            continue
        found = [saved[key] for key in (*_OLDER_NAMES.get(name, ()), name) if key in saved]
        now = getattr(scheduler, name)
        if found and found[0] != now:
            unit = " samples" if name in _SAMPLES else ""
            yield _difference(_FLAGS[name], f"{found[0]}{unit}", f"{now}{unit}")


def _group_differences(group: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for name, value in own.items():
        if name in _IMPLEMENTATION or name not in group or _same(group[name], value):
            continue
        if name == "betas" and len(value) == len(group[name]):
            for index, (saved, now) in enumerate(zip(group[name], value), start=1):
                if saved != now:
                    yield _difference(f"--adam-beta{index}", saved, now)
            continue
        decoupled = name in _BOUNDS and _is_decoupled(group)
        flag = _FLAGS.get(name, name)
        yield _difference(flag.replace("--", "--decoupled-", 1) if decoupled else flag, group[name], value)


def _difference(flag: str, saved: Any, now: Any) -> str:
    return f"{flag} {saved} (checkpoint) / {now} (this run)"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return bool(one == other)
