"""Saving and loading a run, with the state of features in it: interceptions and defaults."""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import CheckpointError
from mindspeed_core.feature import hookimpl
from mindspeed_core.hooks import DONE, Done
from mindspeed_core.hosts.megatron_lm import pretrain_call
from mindspeed_core.hosts.standalone.checkpoint.content import feature_parts
from mindspeed_core.resolver.plan_diff import compare_plans
from mindspeed_core.run import LoadInfo, Run, SaveInfo

if TYPE_CHECKING:
    from mindspeed_core.hosts.megatron_lm.pretrain_call import Running
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")

FACTS, STATES = "mindspeed", "features"
"""Keys in Megatron-LM's state: what was active, as JSON, and the state of each feature."""
_STRICT = "--strict-plan-resume"


def around_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_checkpoint``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **named: Any) -> Any:
        now = pretrain_call.find()
        if now is None or now.session is None or now.run is None:
            return original(*args, **named)
        given = signature.bind(*args, **named).arguments
        run = now.run
        run.optimizer, run.scheduler = given["optimizer"], given["opt_param_scheduler"]
        now.saved, now.restored = {}, {}
        with now.calling("load_checkpoint", lambda: original(*args, **named)) as call:
            info: LoadInfo = now.session.call("load_checkpoint", run=run)
        if info.path is not None:
            now.session.call("after_load_checkpoint", run=run)
        return call.result if call.made else (info.iteration, 0)

    return load_checkpoint


@hookimpl(trylast=True)
def load_checkpoint(session: Session, run: Run) -> LoadInfo:
    """Megatron-LM's loader; features get their state back when theirs was in the file."""
    now = pretrain_call.current()
    iteration, _ = now.pending("load_checkpoint")()
    if now.restored:
        session.collect("restore_checkpoint_state", run=run, state=now.restored)
    args = run.args
    loaded = bool(iteration) or bool(now.saved) or bool(now.restored)
    return LoadInfo(
        Path(args.load) if loaded and args.load else None,
        iteration,
        args.consumed_train_samples,
        args.consumed_valid_samples,
    )


def around_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """``save_checkpoint``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **named: Any) -> Any:
        now = pretrain_call.find()
        if now is None or now.session is None or now.run is None:
            return original(*args, **named)
        given = signature.bind(*args, **named).arguments
        session, run = now.session, now.present()
        run.iteration = given["iteration"]
        run.optimizer, run.scheduler = given["optimizer"], given["opt_param_scheduler"]
        session.call("before_save_checkpoint", run=run)
        try:
            with now.calling("save_checkpoint", lambda: original(*args, **named)) as call:
                session.call("save_checkpoint", run=run, reason=_reason(run))
        finally:
            session.call("after_load_checkpoint", run=run)
        return call.result

    return save_checkpoint


def _reason(run: Run) -> str:
    args = run.args
    if args.save_interval and run.iteration % args.save_interval == 0:
        return "interval"
    return "end" if run.iteration >= (args.train_iters or 0) else "exit"


@hookimpl(trylast=True)
def save_checkpoint(run: Run) -> SaveInfo:
    """Megatron-LM's own save; with ``--async-save`` it goes on in the background."""
    pretrain_call.current().pending("save_checkpoint")()
    return SaveInfo(Path(run.args.save or "."), run.iteration)


@hookimpl(trylast=True)
def before_save_checkpoint() -> Done:
    """Megatron-LM's own state is canonical already."""
    return DONE


@hookimpl(trylast=True)
def after_load_checkpoint() -> Done:
    """Megatron-LM trains with the canonical state."""
    return DONE


def around_generate_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """``generate_state_dict``: the state of features beside Megatron-LM's, to save or to fill."""

    @functools.wraps(original)
    def generate_state_dict(args: Any, *rest: Any, **named: Any) -> Any:
        state = original(args, *rest, **named)
        now = pretrain_call.find()
        if now is None or now.session is None or now.run is None:
            return state
        session = now.session
        parts = feature_parts(now.present())
        if not parts:
            return state
        if args.ckpt_format != "torch_dist":
            raise CheckpointError(
                f"--ckpt-format {args.ckpt_format}: the state of {', '.join(parts)} goes into torch_dist "
                "checkpoints only; use --ckpt-format torch_dist"
            )
        loading = bool((named.get("optim_sd_kwargs") or {}).get("is_loading"))
        if loading:
            parts = _saved_parts(now, parts)
        else:
            plan = session.plan.as_dict()
            plan.pop("arguments")
            state[FACTS] = json.dumps({"features": sorted(parts), "plan": plan}, sort_keys=True)
        if parts:
            state[STATES] = parts
        return state

    return generate_state_dict


def _saved_parts(now: Running, parts: Mapping[str, Any]) -> dict[str, Any]:
    """What of the features' state is in the file, after what was active then was compared with now."""
    facts = now.saved
    session = now.opened()
    strictness = session.args.strict_plan_resume
    change = compare_plans(
        facts.get("plan", {}),
        session.plan.as_dict(),
        {name: bool(record.cls.affects_checkpoint) for name, record in session.registry.features.items()},
    )
    if change.breaking and strictness == "error" and not session.args.finetune:
        raise CheckpointError(
            f"{session.args.load}: the checkpoint needs other features: {'; '.join(change.breaking)}. "
            f"{_STRICT} warn loads it all the same"
        )
    if strictness != "off" and (change.breaking or change.harmless):
        what = "; ".join((*change.breaking, *change.harmless))
        logger.warning("%s: the plan changed since it was written: %s", session.args.load, what)
    return {name: part for name, part in parts.items() if name in facts.get("features", ())}


def around_load_base_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_load_base_checkpoint``: what comes out of the file."""

    @functools.wraps(original)
    def load_base(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        now = pretrain_call.find()
        state = result[0]
        if now is not None and isinstance(state, dict):
            if FACTS in state:
                now.saved = json.loads(state[FACTS])
            if not named.get("rank0"):
                now.restored = state.get(STATES) or {}
        return result

    return load_base
