"""From flags to a session, for programs and for frameworks that train inside their own process.

Nothing here reads ``sys.argv``, prints, seeds or starts anything: the caller says what it wants and gets a
session, opened or not.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_core.flags import FlagSet, ParsedArguments, flag_set
from mindspeed_core.plan import Plan, PlanError, Problem
from mindspeed_core.platforms.selection import choose_platform
from mindspeed_core.registry import Registry
from mindspeed_core.resolver import resolve

if TYPE_CHECKING:
    from mindspeed_core.session import Session

Flags = Mapping[str, Any] | Sequence[str] | Namespace


def parse_flags(flags: Flags, known: FlagSet) -> ParsedArguments:
    """Read flags in any of the forms `activate` takes."""
    if isinstance(flags, Namespace):
        return known.parse_namespace(flags)
    if isinstance(flags, Mapping):
        return known.parse_mapping(flags)
    if isinstance(flags, (str, bytes)):
        raise TypeError("flags is one string; pass a list of arguments, shlex.split(text) for instance")
    return known.parse(flags)


def plan_for(
    flags: Flags,
    *,
    host: str = "standalone",
    platform: str | None = None,
    mode: str = "train",
    registry: Registry | None = None,
) -> tuple[Plan, ParsedArguments]:
    """Parse and resolve, reporting what is wrong with the flags and with the plan together.

    Args:
        flags: a command line, a dictionary, or somebody's namespace.
        host: name of the host.
        platform: name of the platform; by default what ``--platform`` says.
        mode: ``train`` or ``inference``.
        registry: what is installed; read from the environment by default.

    Returns:
        The plan, and the arguments with ``platform`` resolved to a name; its provenance is the reason.

    Raises:
        PlanError: carries every problem.
    """
    registry = registry or Registry.discover()
    parsed = parse_flags(flags, flag_set(registry, host))
    problems = list(parsed.problems)
    try:
        asked = platform or str(getattr(parsed.args, "platform", "auto"))
        name, why = choose_platform(asked, registry)
    except UserError as error:
        problems.append(Problem("E-PLATFORM", str(error), flag="--platform"))
        raise PlanError(problems) from error
    parsed.args.platform = name
    parsed = replace(parsed, provenance={**parsed.provenance, "platform": why})
    try:
        plan = resolve(
            registry, parsed.args, provenance=parsed.provenance, platform=name, host=host, mode=mode
        )
    except PlanError as error:
        raise PlanError([*problems, *error.problems]) from None
    if problems:
        raise PlanError(problems)
    return plan, parsed


def prepare(
    flags: Flags,
    *,
    host: str = "standalone",
    platform: str | None = None,
    mode: str = "train",
    registry: Registry | None = None,
    extra_plugins: Sequence[object] = (),
) -> Session:
    """Plan a session without opening it.

    Args:
        flags: a command line (``["--use-flash-attn"]``); a dictionary from flag names, with or without
            dashes, to values (an unknown name is an error); or a namespace, of which only our attributes are
            read.
        host: name of the host.
        platform: name of the platform; by default what ``--platform`` says, which is ``auto``.
        mode: ``train`` or ``inference``.
        registry: what is installed; read from the environment by default.
        extra_plugins: further objects with hook implementations, outermost.

    Raises:
        PlanError: the flags cannot be read or resolved; carries every problem.
        mindspeed_core.registry.RegistryError: host or platform is not installed or cannot be loaded.
    """
    from mindspeed_core.session import Session

    registry = registry or Registry.discover()
    plan, parsed = plan_for(flags, host=host, platform=platform, mode=mode, registry=registry)
    return Session(
        plan,
        parsed.args,
        platform=registry.platform(plan.platform)(),
        registry=registry,
        host=registry.host(host),
        features=[registry.features[name].cls for name in plan.names],
        provenance=parsed.provenance,
        extra_plugins=extra_plugins,
    )


def activate(
    flags: Flags,
    *,
    host: str = "standalone",
    platform: str | None = None,
    mode: str = "train",
    registry: Registry | None = None,
    extra_plugins: Sequence[object] = (),
) -> Session:
    """Plan a session and open it; the arguments are those of `prepare`.

    Raises:
        PlanError: the flags cannot be read or resolved; carries every problem.
        mindspeed_core.errors.SessionError: another session is open.
    """
    session = prepare(
        flags,
        host=host,
        platform=platform,
        mode=mode,
        registry=registry,
        extra_plugins=extra_plugins,
    )
    return session.open()
