"""Training flags on the command line of a sub-command, and the plan they make.

`plan`, `patches` and `graph` share this: everything after ``--`` is what a training would be started with.
No torch, no megatron: planning is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from mindspeed_core.discovery.host import DEFAULT_HOST

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.registry import Registry
    from mindspeed_core.resolver.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])

UNPROCESSED_FLAGS = {"ignore_unknown_options": True}
"""Context settings of a command that takes training flags, also where the user forgot the ``--``."""


class Planned(NamedTuple):
    """A plan, the arguments it was made from and where each value came from.

    The provenance of ``platform`` is one sentence: why this one.
    """

    plan: Plan
    args: Namespace
    provenance: Mapping[str, str]


def host_option(function: F) -> F:
    """Add ``--host``."""
    return click.option(
        "--host", default=DEFAULT_HOST, show_default=True, help="Whose training loop is meant."
    )(function)


def platform_option(function: F) -> F:
    """Add ``--platform``; it wins over the flag of the same name after ``--``."""
    return click.option("--platform", default=None, help="cpu, cuda, npu, or auto (the default).")(function)


def training_flags(function: F) -> F:
    """Add the rest of the command line: the flags of a training."""
    return click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS...]")(function)


def make_plan(registry: Registry, flags: Sequence[str], *, host: str, platform: str | None = None) -> Planned:
    """Parse training flags and resolve them; ``platform`` wins over the one among the flags.

    Raises:
        PlanError: with every problem of parsing and of resolving.
        UserError: host or platform cannot be used.
    """
    from mindspeed_core.activation import plan_for

    plan, parsed = plan_for(list(flags), host=host, platform=platform, registry=registry)
    return Planned(plan, parsed.args, parsed.provenance)
