"""One optimizer for all parameters, or one for experts beside one for the rest: what a layout makes of it.

Expert parallelism splits the optimizer in two, and with it the part of a checkpoint that is not sharded: the
groups of parameters and the number of steps. Tensors are found by their names in either form; here that part
takes the form of the run that loads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.errors import CheckpointError

IDENTIFIERS = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Keys that tell groups of parameters apart; whether they are experts is left out, see above."""
_BESIDE = ("grad_scaler", "param_state_sharding_type")


def saved_groups(state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Return the groups of parameters of a checkpoint, of one optimizer or of several."""
    parts = [state, *(state[key] for key in state if isinstance(key, int))]
    return [group for part in parts for group in _groups(part) if IDENTIFIERS[0] in group]


def matching(saved: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the saved group that holds the parameters of a group of this run.

    Raises:
        CheckpointError: there is none.
    """
    wanted = [group.get(key) for key in IDENTIFIERS]
    for candidate in saved:
        if [candidate.get(key) for key in IDENTIFIERS] == wanted:
            return candidate
    raise CheckpointError(
        f"the checkpoint has no group of parameters with {dict(zip(IDENTIFIERS, wanted))}; --no-load-optim "
        "resumes without the optimizer's state"
    )


def fitted(state: Mapping[Any, Any], own: Sequence[Any]) -> Mapping[Any, Any]:
    """Return the filled template of a run, with the part that is not sharded in the run's form.

    Args:
        state: the filled template, with the checkpoint's own form beside it.
        own: the run's optimizers.
    """
    together = any(IDENTIFIERS[0] in group for group in _groups(state))
    if together == (len(own) == 1):
        return state
    source = state if together else state[min(key for key in state if isinstance(key, int))]
    saved = saved_groups(state)
    if len(own) == 1:
        named = {key: value for key, value in state.items() if not isinstance(key, int)}
        return _completed(named, own[0], saved, source)
    return {index: _completed(state[index], inner, saved, source) for index, inner in enumerate(own)}


def _groups(part: Mapping[Any, Any]) -> Sequence[dict[str, Any]]:
    holder = part if "param_groups" in part else part.get("optimizer") or {}
    return holder.get("param_groups", ())


def _completed(
    own: Mapping[str, Any], inner: Any, saved: Sequence[Mapping[str, Any]], source: Mapping[Any, Any]
) -> dict[str, Any]:
    """Return one optimizer's tensors with groups and steps of the checkpoint."""
    result = dict(own)
    holder = result
    if "param_groups" not in result:
        holder = result["optimizer"] = dict(result.get("optimizer") or {})
    groups = inner.optimizer.param_groups
    templates = holder.get("param_groups") or [{} for _ in groups]
    holder["param_groups"] = [
        {**matching(saved, group), **template, "is_expert_parallel": group["is_expert_parallel"]}
        for group, template in zip(groups, templates)
    ]
    steps = (source if "param_groups" in source else source["optimizer"]).get("state") or {}
    if "state" in holder and "common_step" in steps:
        holder["state"] = {**holder["state"], "common_step": steps["common_step"]}
    result.update({key: source[key] for key in _BESIDE if key in source})
    return result
