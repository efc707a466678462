"""Saving and loading a run, with the state of features in it: interceptions and defaults."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError, CheckpointError, UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.run import LoadInfo, Run, SaveInfo
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_megatron.feature_state import feature_parts
from mindspeed_megatron.hosts.megatron_lm import pretrain_call
from mindspeed_megatron.hosts.megatron_lm.model import begin_run
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall, arguments_of, intercepts
from mindspeed_megatron.model_comparison import check_model
from mindspeed_megatron.model_record import (
    KEY,
    describe_run,
    from_arguments,
    read_record,
    softmax_size,
)
from mindspeed_megatron.model_state import LoadedWeights, check_loaded, check_saved, select
from mindspeed_megatron.plan_resume import check_plan
from mindspeed_megatron.saved_schedule import group_values, settle_groups
from mindspeed_megatron.tracker import TRACKER
from mindspeed_megatron.unwrap import chunks_of, unwrap
from mindspeed_megatron.vocabulary import settle_vocabulary

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_WITH_RECORD = ("torch", "torch_dist")
"""Formats whose state holds plain values beside tensors."""
FACTS, STATES = "mindspeed", "features"
"""Keys in Megatron-LM's state: what was active, as JSON, and the state of each feature."""


@intercepts()
def around_load_checkpoint(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``load_checkpoint``."""
    bound = arguments_of(original, args, named)
    model = next(iter(bound.arguments.values()))
    chunks = chunks_of(model)
    if not now.has_run:
        # Megatron-LM validates without an optimizer.
        begin_run(now, chunks)
    if {id(unwrap(chunk)) for chunk in chunks} != {id(unwrap(chunk)) for chunk in now.run.model}:
        # A teacher or a reference, which the script has beside the model that it trains.
        now.model_compared = True
        return original(*bound.args, **bound.kwargs)
    run = now.run
    if now.wants("model_state"):
        # Weights that a feature leaves out are not in what is loaded; `check_loaded` looks for them.
        bound.arguments["strict"] = False
    if now.source is not None:
        return original(*bound.args, **bound.kwargs)
    given = bound.arguments
    run.optimizer, run.scheduler = given["optimizer"], given["opt_param_scheduler"]
    now.saved, now.restored, now.model_compared = {}, {}, False
    now.groups = group_values(run.optimizer)
    _check_schedule_flags(run.args)
    with now.calling("load_checkpoint", lambda: original(*bound.args, **bound.kwargs)) as call:
        info = run.loaded = _load(now, run)
    return call.result if call.made else (info.iteration, 0)


def load_for_features(now: PretrainCall, run: Run) -> None:
    """Call the stage where Megatron-LM loads nothing, since no flag names a checkpoint of the run.

    Raises:
        UserError: a feature wants to go on in the middle of a training, for which it is too late.
    """
    if now.load_called or not now.wants("load_checkpoint"):
        return
    info = _load(now, run)
    if info.iteration:
        raise UserError(
            f"a feature loaded step {info.iteration} of {info.path}, and Megatron-LM goes on with step 0; "
            "name a folder with --load, which may be empty"
        )


def _load(now: PretrainCall, run: Run) -> LoadInfo:
    session, loaded = now.session, now.session.state(LoadedWeights)
    now.load_called = True
    loaded.names.clear()
    info: LoadInfo = session.call("load_checkpoint", run=run, source=None)
    if info.path is not None or loaded.names:
        session.call("after_load_checkpoint", run=run)
    return info


@hookimpl(trylast=True)
def load_checkpoint(session: Session, run: Run, source: str | None) -> LoadInfo:
    """Let Megatron-LM load; features get their state back when theirs was in the file."""
    now = pretrain_call.current()
    if source is not None:
        return _load_source(now, run, source)
    call = now.call("load_checkpoint")
    if call is None:
        return LoadInfo(None)
    now.weights = None
    iteration, _ = call()
    if iteration and not run.args.finetune:
        _settle_schedule(now, run)
    if now.weights is not None:
        _count_loaded(now, run)
        check_loaded(run, now.weights, f"--load {run.args.load}")
    args = run.args
    if now.restored and not args.finetune:
        session.collect("restore_checkpoint_state", run=run, state=now.restored)
    loaded = bool(iteration) or bool(now.saved) or bool(now.restored)
    kept = now.saved.get("features", ()) if args.finetune else ()
    if kept:
        _say(run, f"--finetune: the state of {', '.join(kept)} in {args.load} is not loaded")
    return LoadInfo(
        _folder(args) or (Path(args.load) if loaded and args.load else None),
        iteration,
        args.consumed_train_samples,
        args.consumed_valid_samples,
    )


def _check_schedule_flags(args: Any) -> None:
    if (
        getattr(args, "no_load_optim", False)
        and getattr(args, "use_checkpoint_opt_param_scheduler", False)
        and not args.finetune
    ):
        raise ArgumentError(
            "--use-checkpoint-opt-param-scheduler",
            None,
            "Megatron-LM loads no schedule with --no-load-optim, so the learning rate starts anew",
            "drop one of the two",
        )


def _settle_schedule(now: PretrainCall, run: Run) -> None:
    """Bring groups of parameters and schedule together after a load, or say that both start anew."""
    where = f"--load {run.args.load}"
    if getattr(run.args, "no_load_optim", False):
        _say(
            run,
            f"--no-load-optim: the schedule of {where} is not loaded either; the learning rate starts anew",
        )
        return
    for note in settle_groups(run.optimizer, run.scheduler, now.groups, where):
        _say(run, note)


def _say(run: Run, text: str) -> None:
    if run.dist.rank == 0:
        emit(f"mindspeed: {text}")


def _folder(args: Any) -> Path | None:
    """Return the folder that was loaded; step 0 of a finetuning says nothing of that."""
    named = (args.load, getattr(args, "pretrained_checkpoint", None))
    return next((Path(folder) for folder in named if folder and (Path(folder) / TRACKER).is_file()), None)


def _load_source(now: PretrainCall, run: Run, source: str) -> LoadInfo:
    """Let Megatron-LM load the weights alone of another checkpoint, with arguments that say so meanwhile."""
    if not (Path(source) / TRACKER).is_file():
        raise CheckpointError(f"{source}: has no {TRACKER}; name the folder that a training saved into")
    arguments = vars(run.args)
    before = dict(arguments)
    arguments.update(load=source, finetune=True, no_load_optim=True, no_load_rng=True)
    arguments.update(pretrained_checkpoint=None, ckpt_step=None)
    now.source, now.weights, now.model_compared = source, None, False
    try:
        load = import_module("megatron.training.checkpointing").load_checkpoint
        load(run.model, run.optimizer, run.scheduler)
        _count_loaded(now, run)
    finally:
        now.source, now.model_compared = None, False
        arguments.clear()
        arguments.update(before)
    return LoadInfo(Path(source))


def _count_loaded(now: PretrainCall, run: Run) -> None:
    loaded = run.session.state(LoadedWeights)
    for key, part in (now.weights.chosen if now.weights is not None else {}).items():
        loaded.add(key, set(part))


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
    session, run = now.session, now.sync_run()
    is_loading = bool((named.get("optim_sd_kwargs") or {}).get("is_loading"))
    if now.wants("model_state"):
        _choose_weights(now, args, state, named, is_loading)
    if now.source is not None or (is_loading and args.finetune):
        # Weights alone, as Megatron-LM loads with --finetune.
        return state
    parts = feature_parts(run)
    if not is_loading and args.ckpt_format in _WITH_RECORD:
        state[STATES] = {KEY: describe_run(run).as_dict()}
    if not parts:
        return state
    if args.ckpt_format != "torch_dist":
        raise CheckpointError(
            f"--ckpt-format {args.ckpt_format}: the state of {', '.join(parts)} goes into torch_dist "
            "checkpoints only; use --ckpt-format torch_dist"
        )
    if is_loading:
        check_plan(session, now.saved.get("plan", {}), str(_folder(args) or args.load))
        parts = {name: part for name, part in parts.items() if name in now.saved.get("features", ())}
    else:
        plan = session.plan.as_dict()
        plan.pop("arguments")
        state[FACTS] = json.dumps({"features": sorted(parts), "plan": plan}, sort_keys=True)
    if parts:
        state[STATES] = {**state.get(STATES, {}), **parts}
    return state


def _choose_weights(
    now: PretrainCall, args: Any, state: dict[str, Any], named: dict[str, Any], is_loading: bool
) -> None:
    """Put the weights that features choose into Megatron-LM's state, in place of all of them."""
    run = now.run
    features = [name for name in now.session.implementations("model_state") if not name.startswith("host ")]
    if args.ckpt_format != "torch_dist":
        raise CheckpointError(
            f"--ckpt-format {args.ckpt_format}: {', '.join(features)} chooses the weights of torch_dist "
            "checkpoints only; use --ckpt-format torch_dist"
        )
    metadata = (named.get("model_sd_kwargs") or {}).get("metadata") or {}
    now.weights = select(run, metadata, now.source)
    if not is_loading:
        message = ""
        try:
            check_saved(run, now.weights)
        except CheckpointError as error:
            message = str(error)
        found = next(filter(None, all_gather_values(message)), "")
        if found:
            raise CheckpointError(found)
    state.update(now.weights.chosen)


@intercepts()
def around_load_base_checkpoint(
    now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Intercept ``_load_base_checkpoint``: what comes out of the file."""
    result = original(*args, **named)
    state = result[0]
    if isinstance(state, dict):
        if FACTS in state and now.source is None:
            now.saved = json.loads(state[FACTS])
        if not named.get("rank0") and now.source is None:
            now.restored = {name: part for name, part in (state.get(STATES) or {}).items() if name != KEY}
        if now.has_run and not now.model_compared:
            now.model_compared = True
            _compare_model(now, state)
    return result


def _compare_model(now: PretrainCall, state: Mapping[str, Any]) -> None:
    """Compare the model that a checkpoint was written with, before its weights are loaded."""
    run, args = now.run, now.run.args
    where = now.source or str(_folder(args) or args.load)
    description = describe_run(run)
    saved = read_record((state.get(STATES) or {}).get(KEY), where)
    if saved is None:
        saved = from_arguments(vars(state.get("args") or Namespace()), description)
    resumes = run.optimizer is not None and not args.finetune and now.source is None
    notes = check_model(
        now.session, saved, description, where, resumes=resumes, with_facts=now.source is None
    )
    rows = getattr(args, "padded_vocab_size", None)
    notes += settle_vocabulary(
        now.session, run.model, saved=softmax_size(saved), rows=rows, ids=None, where=where
    )
    for note in notes:
        _say(run, note)
