"""Saving and loading a run, with the state of features in it: interceptions and defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import CheckpointError
from mindspeed_core.feature import hookimpl
from mindspeed_core.hosts.megatron_lm import pretrain_call
from mindspeed_core.hosts.megatron_lm.pretrain_call import PretrainCall, arguments_of, intercepts
from mindspeed_core.megatron.feature_state import feature_parts
from mindspeed_core.megatron.plan_resume import check_plan
from mindspeed_core.run import LoadInfo, Run, SaveInfo

if TYPE_CHECKING:
    from mindspeed_core.session import Session

FACTS, STATES = "mindspeed", "features"
"""Keys in Megatron-LM's state: what was active, as JSON, and the state of each feature."""


@intercepts(run=True)
def around_load_checkpoint(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``load_checkpoint``."""
    given, run = arguments_of(original, args, named).arguments, now.run
    run.optimizer, run.scheduler = given["optimizer"], given["opt_param_scheduler"]
    now.saved, now.restored = {}, {}
    with now.calling("load_checkpoint", lambda: original(*args, **named)) as call:
        info: LoadInfo = now.session.call("load_checkpoint", run=run)
    run.loaded = info
    if info.path is not None:
        now.session.call("after_load_checkpoint", run=run)
    return call.result if call.made else (info.iteration, 0)


@hookimpl(trylast=True)
def load_checkpoint(session: Session, run: Run) -> LoadInfo:
    """Let Megatron-LM load; features get their state back when theirs was in the file."""
    now = pretrain_call.current()
    iteration, _ = now.pending("load_checkpoint")()
    args = run.args
    if now.restored and not args.finetune:
        session.collect("restore_checkpoint_state", run=run, state=now.restored)
    loaded = bool(iteration) or bool(now.saved) or bool(now.restored)
    kept = now.saved.get("features", ()) if args.finetune else ()
    if kept and run.dist.rank == 0:
        text = f"--finetune: the state of {', '.join(kept)} in {args.load} is not loaded"
        print(f"mindspeed: {text}", flush=True)
    return LoadInfo(
        Path(args.load) if loaded and args.load else None,
        iteration,
        args.consumed_train_samples,
        args.consumed_valid_samples,
    )


@intercepts(run=True)
def around_save_checkpoint(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``save_checkpoint``."""
    given = arguments_of(original, args, named).arguments
    session, run = now.session, now.sync_run()
    run.iteration = given["iteration"]
    run.optimizer, run.scheduler = given["optimizer"], given["opt_param_scheduler"]
    run.complete_parameters()
    session.call("before_save_checkpoint", run=run)
    try:
        with now.calling("save_checkpoint", lambda: original(*args, **named)) as call:
            session.call("save_checkpoint", run=run, reason=_reason(run))
    finally:
        session.call("after_load_checkpoint", run=run)
    return call.result


def _reason(run: Run) -> str:
    args = run.args
    if args.save_interval and run.iteration % args.save_interval == 0:
        return "interval"
    return "end" if run.iteration >= (args.train_iters or 0) else "exit"


@hookimpl(trylast=True)
def save_checkpoint(run: Run) -> SaveInfo:
    """Let Megatron-LM save; with ``--async-save`` it goes on in the background."""
    pretrain_call.current().pending("save_checkpoint")()
    return SaveInfo(Path(run.args.save or "."), run.iteration)


@intercepts(run=True)
def around_generate_state_dict(
    now: PretrainCall, original: Callable[..., Any], args: Any, *rest: Any, **named: Any
) -> Any:
    """Intercept ``generate_state_dict``: the state of features beside Megatron-LM's, to save or to fill."""
    state = original(args, *rest, **named)
    session = now.session
    loading = bool((named.get("optim_sd_kwargs") or {}).get("is_loading"))
    if loading and args.finetune:
        # As Megatron-LM loads it: weights alone.
        return state
    parts = feature_parts(now.sync_run())
    if not parts:
        return state
    if args.ckpt_format != "torch_dist":
        raise CheckpointError(
            f"--ckpt-format {args.ckpt_format}: the state of {', '.join(parts)} goes into torch_dist "
            "checkpoints only; use --ckpt-format torch_dist"
        )
    if loading:
        check_plan(session, now.saved.get("plan", {}))
        parts = {name: part for name, part in parts.items() if name in now.saved.get("features", ())}
    else:
        plan = session.plan.as_dict()
        plan.pop("arguments")
        state[FACTS] = json.dumps({"features": sorted(parts), "plan": plan}, sort_keys=True)
    if parts:
        state[STATES] = parts
    return state


@intercepts()
def around_load_base_checkpoint(
    now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Intercept ``_load_base_checkpoint``: what comes out of the file."""
    result = original(*args, **named)
    state = result[0]
    if isinstance(state, dict):
        if FACTS in state:
            now.saved = json.loads(state[FACTS])
        if not named.get("rank0"):
            now.restored = state.get(STATES) or {}
    return result
