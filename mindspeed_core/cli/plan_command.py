"""``mindspeed-features plan``: what training flags would switch on, or everything that is wrong with them.

The same registry, flags and resolver that a training uses, without torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from mindspeed_core.errors import UserError
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.terminal.errors import EXIT_PROBLEMS, traceback_wanted
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import print_message
from mindspeed_core.terminal.plan_text import chosen_by_presets, print_plan
from mindspeed_core.terminal.training_flags import (
    UNPROCESSED_FLAGS,
    Planned,
    host_option,
    make_plan,
    platform_option,
    training_flags,
)


@click.command(
    "plan", short_help="Say what a command line would switch on.", context_settings=UNPROCESSED_FLAGS
)
@host_option
@platform_option
@click.option("--all", "everything", is_flag=True, help="Also packages, order and patches.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@training_flags
@click.pass_context
def command(
    context: click.Context,
    host: str,
    platform: str | None,
    everything: bool,
    as_json: bool,
    flags: tuple[str, ...],
) -> None:
    """Say what a training with these FLAGS would switch on, in which order and why.

    Exit status 1 with every problem (flag, reason, remedy) when the flags do not go together.

    \b
    mindspeed-features plan -- --num-layers 4 --context-parallel-size 2
    """
    from mindspeed_core.registry import Registry

    try:
        planned = make_plan(Registry.discover(), flags, host=host, platform=platform)
    except PlanError as error:
        if traceback_wanted():
            raise
        if as_json:
            emit(json.dumps({"ok": False, "problems": [_problem(p) for p in error.problems]}, indent=2))
        else:
            print_message(str(error), sys.stdout)
        context.exit(EXIT_PROBLEMS)
    except UserError as error:
        if not as_json:
            raise
        emit(json.dumps({"ok": False, "problems": [{"code": "E-USAGE", "reason": str(error)}]}, indent=2))
        context.exit(EXIT_PROBLEMS)
    if as_json:
        emit(json.dumps(_as_json(planned), indent=2, default=str))
    else:
        print_plan(planned, everything=everything)


def _problem(problem: Any) -> dict[str, str]:
    return {name: getattr(problem, name) for name in ("code", "feature", "flag", "value", "reason", "remedy")}


def _as_json(planned: Planned) -> dict[str, Any]:
    return {
        "ok": True,
        **planned.plan.as_dict(),
        "unread": [asdict(flag) for flag in planned.plan.unread],
        "notes": [str(note) for note in planned.plan.notes],
        "flag_notes": [asdict(note) for note in planned.plan.flag_notes],
        "stated_order": list(planned.plan.stated_order),
        "platform_reason": planned.provenance["platform"],
        "presets": chosen_by_presets(planned),
    }
