"""Opening and closing the session of one training: when its arguments are complete, and when it ends."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed_core.activation import assemble
from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import PROJECT
from mindspeed_core.platforms.selection import check_dry_run_flags, choose_platform, requested_platform
from mindspeed_core.resolver.resolve import resolve
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_megatron.environment import restore_attention_choice, set_device_connections
from mindspeed_megatron.flag_notes import lines
from mindspeed_megatron.hosts.megatron_lm import HOST, NAME
from mindspeed_megatron.hosts.megatron_lm.dry_run import accounts, shorten
from mindspeed_megatron.hosts.megatron_lm.needed_patches import needed
from mindspeed_megatron.hosts.megatron_lm.without_te import TE_AND_APEX, apply_defaults, installed

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry
    from mindspeed_core.runtime.patches import AppliedPatch
    from mindspeed_core.session import Session
    from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall

logger = logging.getLogger("mindspeed_core")


def open_session(
    now: PretrainCall,
    args: Any,
    validate: Callable[[Any], Any],
    registry: Registry,
    extra_plugins: Sequence[object],
    entries: Sequence[AppliedPatch],
) -> Any:
    """Make the plan, open the session, and let features and Megatron-LM validate the arguments.

    ``entries`` are the patches that are there from the import of the adaptor on, for the summary.

    Raises:
        PlanError: the flags cannot be resolved; carries every problem.
        SystemExit: ``--plan-only``.
    """
    session, changed = _prepare(now, args, registry, extra_plugins)
    shortened, now.left_alone = shorten(session.platform, args)
    now.before_opening()
    session.open()
    now.session = session
    now.generator.shared = session.platform.device_type == "cpu"
    _print_summary(session, changed, entries)
    for sentence in shortened:
        _print(sentence)
    set_device_connections(session, args)
    restore_attention_choice(session)
    given = session.call("validate_arguments_early", args=args, plan=session.plan)
    with now.calling("validate_arguments", validate):
        validated = session.call("validate_arguments", args=given, plan=session.plan)
    if validated is not args:
        # Megatron-LM goes on with the object that it passed.
        vars(args).update(vars(validated))
    now.script_opened()
    return args


def _prepare(
    now: PretrainCall, args: Any, registry: Registry, extra_plugins: Sequence[object]
) -> tuple[Session, list[str]]:
    """Return the session for these arguments, not opened, and the flags set for what is not installed."""
    line = now.command_line
    assert line is not None
    assert line.parsed is not None
    name, why = choose_platform(requested_platform(args), registry)
    args.platform = name
    platform = registry.platform(name)
    check_dry_run_flags(platform, args)
    changed = apply_defaults(args, line.provenance, platform)
    provenance = {**line.provenance, "platform": why}
    plan = resolve(
        registry, args, provenance=provenance, platform=name, host=NAME, left_out=line.parsed.left_out
    )
    plan = replace(plan, flag_notes=line.parsed.flag_notes)
    features = [registry.features[feature].cls for feature in plan.names]
    # A dry run is followed at stages too.
    now.stages = _stages_of((*features, *extra_plugins, platform))
    rows = needed(
        now.stages,
        platform.kinds(),
        args,
        any_feature=bool(features or extra_plugins),
        without_te=not installed(TE_AND_APEX),
        handed=now.handed,
    )
    if args.plan_only:
        if _is_first_rank():
            from mindspeed_core.terminal.plan_text import print_plan
            from mindspeed_core.terminal.training_flags import Planned

            print_plan(Planned(plan, args, provenance))
        raise SystemExit(0)
    host = replace(HOST, patches=tuple(row.patch() for row in rows))
    return assemble(registry, plan, args, provenance, host=host, extra_plugins=extra_plugins), changed


def close_session(now: PretrainCall, failed: bool) -> None:
    """End the run and take back everything that the session changed.

    A run that has failed cannot wait for other ranks.
    """
    if not now.has_session or not now.session.is_open:
        return
    session = now.session
    try:
        if now.has_run:
            if not failed and now.wants("finish_run"):
                now.run.complete_parameters()
            session.call("finish_run", run=now.run)
            for sentence in accounts(now.run, now.left_alone) if not failed else ():
                _print(sentence)
    except Exception:
        # What went wrong in the run matters more than what goes wrong while tidying up after it.
        if not failed:
            raise
        logger.exception("finish_run failed")
    finally:
        _let_go_of_graphs(now, failed)
        if not failed:
            _wait_for_other_ranks()
        session.close()


def _let_go_of_graphs(now: PretrainCall, failed: bool) -> None:
    """Let go of what the last step holds, which would keep the model alive."""
    if not now.has_run:
        return
    from mindspeed_megatron.kept_graphs import let_go_of_graphs
    from mindspeed_megatron.output_checkpoint import forget_checkpoints

    let_go_of_graphs(now.run.model)
    if failed:
        forget_checkpoints()


def _wait_for_other_ranks() -> None:
    import torch.distributed as dist

    # Groups of features are destroyed next; a rank must not leave one that others still use.
    if dist.is_initialized():
        dist.barrier()


def _stages_of(plugins: Iterable[object]) -> frozenset[str]:
    marker = PROJECT + "_impl"
    return frozenset(
        name for plugin in plugins for name in dir(plugin) if hasattr(getattr(plugin, name, None), marker)
    )


def refuse_at_once(args: Any, kinds: Collection[str], *, again: bool = False) -> None:
    """Refuse what Megatron-LM starts before it validates its arguments.

    Args:
        args: as they were read, not validated.
        kinds: of the platform in use.
        again: ``pretrain`` alone would be called again by a restart, without the reading of arguments.

    Raises:
        ArgumentError: a flag cannot work on this platform or in these scripts, or names a URL as a folder.
    """
    if again and getattr(args, "inprocess_restart", False):
        raise ArgumentError(
            "--inprocess-restart",
            None,
            "scripts of core_v0.18 and later read their arguments outside of what is started again, so that "
            "no feature would be active after a fault",
            "leave it out and let the launcher start the processes again",
        )
    if "cpu" in kinds and getattr(args, "use_persistent_ckpt_worker", False):
        raise ArgumentError(
            "--use-persistent-ckpt-worker",
            None,
            "its process has no session, and cuda calls fail there",
            "leave it out with --platform cpu",
        )
    for name in ("save", "load", "pretrained_checkpoint"):
        protocol, is_url, _ = str(getattr(args, name, None) or "").partition("://")
        if is_url and protocol != "msc":
            raise ArgumentError(
                f"--{name.replace('_', '-')}",
                f"{protocol}://",
                "Megatron-LM saves and loads in its scripts, and would make a folder of that name",
                "name a folder or an msc:// URL here, or use mindspeed-train",
            )


def _print_summary(session: Session, changed: Sequence[str], entries: Sequence[AppliedPatch]) -> None:
    """Print on rank 0 what is active and what was changed for it."""
    if not _is_first_rank():
        return
    plan = session.plan
    _print(session.provenance["platform"])
    _print(f"features: {', '.join(plan.names) or 'none'}")
    for held in plan.held_back:
        _print(f"held back: {held.name}: {held.reason}")
    for note in plan.notes:
        _print(f"note: {note}")
    for line in lines(plan.flag_notes, explain=getattr(session.args, "explain", False)):
        _print(line)
    if changed:
        _print(f"not given and not installed, so set: {' '.join(changed)}")
    applied = [patch for patch in session.ledger.listing() if patch.kind != "setting"]
    own = [patch for patch in applied if patch.owner == NAME and not patch.target.startswith("torch.")]
    counts = Counter(patch.owner for patch in applied if patch not in own)
    owners = ", ".join(f"{count} for {owner}" for owner, count in sorted(counts.items()))
    _print(
        f"{len(entries) + len(own)} functions of Megatron-LM are intercepted, {len(applied) - len(own)} "
        f"further symbols are changed ({owners or 'none'})"
    )
    for patch in (*entries, *own):
        _print(f"  {patch.target}: {patch.reason}")


def _print(text: str) -> None:
    emit(f"mindspeed: {text}")


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
