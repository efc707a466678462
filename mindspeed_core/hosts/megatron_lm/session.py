"""Opening and closing the session of one training: when its arguments are complete, and when it ends."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import PROJECT
from mindspeed_core.hosts.megatron_lm import HOST, NAME
from mindspeed_core.hosts.megatron_lm.patch_table import needed
from mindspeed_core.hosts.megatron_lm.without_te import TE_AND_APEX, apply_defaults, installed
from mindspeed_core.platforms.selection import choose_platform
from mindspeed_core.resolver.resolve import resolve
from mindspeed_core.session import Session

if TYPE_CHECKING:
    from mindspeed_core.hosts.megatron_lm.pretrain_call import Running
    from mindspeed_core.registry import Registry
    from mindspeed_core.resolver.plan import Plan

logger = logging.getLogger("mindspeed_core")
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def open_session(
    running: Running,
    args: Any,
    validate: Callable[[Any], Any],
    registry: Registry,
    extra_plugins: Sequence[object] = (),
) -> Any:
    """Make the plan, open the session, and let features and Megatron-LM validate the arguments.

    Args:
        running: the call of ``pretrain``.
        args: Megatron-LM's arguments.
        validate: its own validation.
        registry: what is installed.
        extra_plugins: further objects with hook implementations.

    Returns:
        The validated arguments.

    Raises:
        PlanError: the flags cannot be resolved; carries every problem.
        SystemExit: ``--plan-only``.
    """
    session, changed = _prepare(running, args, registry, extra_plugins)
    running.before_opening()
    session.open()
    running.session = session
    _announce(session, changed)
    _prepare_environment(session)
    _forget_attention_backend(session)
    given = session.call("validate_arguments_early", args=args, plan=session.plan)
    with running.calling("validate_arguments", validate):
        validated = session.call("validate_arguments", args=given, plan=session.plan)
    if validated is not args:
        # Megatron-LM goes on with the object that it passed.
        vars(args).update(vars(validated))
    running.script_opened()
    return args


def _prepare(
    running: Running, args: Any, registry: Registry, extra_plugins: Sequence[object]
) -> tuple[Session, list[str]]:
    """The session for these arguments, not opened, and the flags that were set for what is not installed."""
    line = running.command_line
    assert line is not None
    name, why = choose_platform(args.platform, registry)
    args.platform = name
    platform = registry.platform(name)()
    changed = apply_defaults(args, line.provenance, name, platform.backend)
    provenance = {**line.provenance, "platform": why}
    plan = resolve(registry, args, provenance=provenance, platform=name, host=NAME)
    features = [registry.features[feature].cls for feature in plan.names]
    running.stages = _stages_of((*features, *extra_plugins))
    rows = needed(
        running.stages,
        name,
        args,
        any_feature=bool(features or extra_plugins),
        without_te=not installed(TE_AND_APEX),
    )
    if args.plan_only:
        _show(plan, args, provenance, why)
        raise SystemExit(0)
    session = Session(
        plan,
        args,
        platform=platform,
        registry=registry,
        host=replace(HOST, patches=tuple(row.patch() for row in rows)),
        features=features,
        provenance=provenance,
        extra_plugins=extra_plugins,
    )
    return session, changed


def close_session(running: Running, failed: bool) -> None:
    """End the run and take back everything that the session changed.

    Args:
        running: the call of ``pretrain``.
        failed: it ends with an error, so that other ranks cannot be waited for.
    """
    session = running.session
    if session is None or not session.is_open:
        return
    try:
        if running.run is not None:
            session.call("finish_run", run=running.run)
    except Exception:
        # What went wrong in the run matters more than what goes wrong while tidying up after it.
        if not failed:
            raise
        logger.exception("finish_run failed")
    finally:
        if not failed:
            _meet()
        session.close()


def _meet() -> None:
    import torch.distributed as dist

    # Groups of features are destroyed next; a rank must not leave one that others still use.
    if dist.is_initialized():
        dist.barrier()


def _stages_of(plugins: Iterable[object]) -> frozenset[str]:
    marker = PROJECT + "_impl"
    return frozenset(
        name for plugin in plugins for name in dir(plugin) if hasattr(getattr(plugin, name, None), marker)
    )


def refuse_at_once(args: Any, platform: str) -> None:
    """Refuse what Megatron-LM starts before it validates its arguments.

    Raises:
        ArgumentError: a flag cannot work on this platform.
    """
    if platform == "cpu" and getattr(args, "use_persistent_ckpt_worker", False):
        raise ArgumentError(
            "--use-persistent-ckpt-worker",
            None,
            "its process has no session, and cuda calls fail there",
            "leave it out with --platform cpu",
        )


def _prepare_environment(session: Session) -> None:
    args = session.args
    fully_sharded = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    if (
        max(args.tensor_model_parallel_size, args.context_parallel_size) > 1
        and not fully_sharded
        and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    ):
        # One hardware queue keeps a layer's collectives ahead of the matmuls they overlap with; Megatron-LM
        # insists on it.
        session.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _forget_attention_backend(session: Session) -> None:
    """Take back, at the end, what megatron-core tells TransformerEngine; another run may choose otherwise."""
    left = [name for name in _ATTENTION if name not in os.environ]
    session.ledger.setting(
        "os.environ:NVTE_*_ATTN",
        lambda: None,
        lambda: [os.environ.pop(name, None) for name in left],
        owner=NAME,
        reason="megatron-core sets them for the backend of a model, and insists on them in the next",
    )


def _announce(session: Session, changed: Sequence[str]) -> None:
    """Say on rank 0 what is active and what was changed for it."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    plan = session.plan
    say = _say
    say(session.provenance["platform"])
    say(f"features: {', '.join(plan.names) or 'none'}")
    for held in plan.held_back:
        say(f"held back: {held.name}: {held.reason}")
    if changed:
        say(f"not given and not installed, so set: {' '.join(changed)}")
    applied = [patch for patch in session.ledger.listing() if patch.kind != "setting"]
    own = [patch for patch in applied if patch.owner == NAME and not _is_device(patch.target)]
    others = len(applied) - len(own)
    from mindspeed_core.hosts.megatron_lm.entry import entry_patches

    entries = entry_patches()
    say(
        f"{len(entries) + len(own)} functions of Megatron-LM are intercepted, {others} further symbols are "
        f"changed ({_owners(applied, own)})"
    )
    for patch in (*entries, *own):
        say(f"  {patch.target}: {patch.reason}")


def _is_device(target: str) -> bool:
    return target.startswith("torch.")


def _owners(applied: Sequence[Any], own: Sequence[Any]) -> str:
    counts: dict[str, int] = {}
    for patch in applied:
        if patch not in own:
            counts[patch.owner] = counts.get(patch.owner, 0) + 1
    return ", ".join(f"{count} for {owner}" for owner, count in sorted(counts.items())) or "none"


def _say(text: str) -> None:
    print(f"mindspeed: {text}", file=sys.stdout, flush=True)


def _show(plan: Plan, args: Any, provenance: Any, why: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        from mindspeed_core.terminal.plan import show_plan
        from mindspeed_core.terminal.training_flags import Planned

        show_plan(Planned(plan, args, provenance, why))
