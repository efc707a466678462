"""Training flags on the command line of a sub-command, and the plan they make.

`plan`, `patches` and `graph` share this: everything after ``--`` is what a training would be started with.
No torch, no megatron: planning is free.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mindspeed_core.plan import Plan, PlanError, Problem

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

UNPROCESSED_FLAGS = {"ignore_unknown_options": True}
"""Context settings of a command that takes training flags, also where the user forgot the ``--``."""


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from.

    Attributes:
        plan: what would run.
        args: the parsed arguments.
        provenance: where each value came from.
        platform_reason: one sentence: why this platform.
    """

    plan: Plan
    args: Namespace
    provenance: Mapping[str, str]
    platform_reason: str


def host_option(function: F) -> F:
    """Add ``--host``."""
    return click.option(
        "--host", default="standalone", show_default=True, help="Whose training loop is meant."
    )(function)


def platform_option(function: F) -> F:
    """Add ``--platform``; the flag of the same name after ``--`` wins."""
    return click.option("--platform", default=None, help="cpu, cuda, npu, or auto (the default).")(function)


def training_flags(function: F) -> F:
    """Add the rest of the command line: the flags of a training."""
    return click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS...]")(function)


def make_plan(registry: Registry, flags: Sequence[str], *, host: str, platform: str | None = None) -> Planned:
    """Parse training flags and resolve them.

    Args:
        registry: what is installed.
        flags: the command line of a training.
        host: whose flags they are.
        platform: chosen outside the flags, None for theirs.

    Raises:
        PlanError: with every problem of parsing and of resolving.
        UserError: host or platform cannot be used.
    """
    from mindspeed_core.flags import flag_set
    from mindspeed_core.platforms.selection import choose_platform
    from mindspeed_core.resolver import resolve

    parsed = flag_set(registry, host).parse(list(flags))
    requested = getattr(parsed.args, "platform", "auto")
    if platform is not None and requested == "auto":
        requested = parsed.args.platform = platform
    chosen, why = choose_platform(requested, registry)
    problems: list[Problem] = list(parsed.problems)
    try:
        plan = resolve(
            registry, parsed.args, provenance=parsed.provenance, platform=chosen, host=host, mode="train"
        )
    except PlanError as error:
        raise PlanError([*problems, *(p for p in error.problems if p not in problems)]) from error
    if problems:
        raise PlanError(problems)
    return Planned(plan, parsed.args, parsed.provenance, why)
