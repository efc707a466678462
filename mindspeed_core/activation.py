"""From flags to a session, for programs and for frameworks that train inside their own process.

Nothing here reads ``sys.argv``, prints, seeds or starts anything: the caller says what it wants and gets a
session, opened or not.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.host import LIBRARY_HOST, HostDeclaration
from mindspeed_core.discovery.parts import part_if_installed
from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.flags.flag_set import FlagSet, ParsedArguments, known_flags
from mindspeed_core.platforms.selection import check_dry_run_flags, choose_platform, requested_platform
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import Plan, PlanError, Problem
from mindspeed_core.resolver.resolve import resolve

if TYPE_CHECKING:
    from mindspeed_core.flags.notes import FlagNote
    from mindspeed_core.session import Session

Flags = Mapping[str, Any] | Sequence[str] | Namespace


def parse_flags(flags: Flags, flag_set: FlagSet, configs: Sequence[object] = ()) -> ParsedArguments:
    """Read flags in any of the forms `activate` takes.

    Args:
        flags: a command line, a dictionary, or somebody's namespace.
        flag_set: the flags that exist.
        configs: megatron-core's configuration objects; they say what no flag says. A dictionary or command
            line that contradicts them is wrong; a namespace is not, since the configurations were made from
            it later on.
    """
    if isinstance(flags, Namespace):
        parsed = _as_they_are(flag_set.parse_namespace(flags), flag_set, flags)
        return _with_configs(parsed, flag_set, configs, contradictions=False)
    if isinstance(flags, Mapping):
        return _with_configs(flag_set.parse_mapping(flags), flag_set, configs, contradictions=True)
    if isinstance(flags, (str, bytes)):
        raise TypeError("flags is one string; pass a list of arguments, shlex.split(text) for instance")
    return _with_configs(flag_set.parse(flags), flag_set, configs, contradictions=True)


def _with_configs(
    parsed: ParsedArguments, flag_set: FlagSet, configs: Sequence[object], *, contradictions: bool
) -> ParsedArguments:
    """Fill in what the configurations say where no flag does."""
    if not configs:
        return parsed
    from mindspeed_core.discovery.parts import part

    filled: ParsedArguments = part("arguments_with_configs")(
        parsed, flag_set, configs, contradictions=contradictions
    )
    return filled


def _as_they_are(parsed: ParsedArguments, flag_set: FlagSet, namespace: Namespace) -> ParsedArguments:
    """Take over what a framework's own arguments say in its own types (a dtype, a path, an enumeration).

    In a library session nothing is built from them: that the host's flag could not be typed so is no mistake.
    """
    if flag_set.host != LIBRARY_HOST:
        return parsed
    args, provenance, problems = Namespace(**vars(parsed.args)), dict(parsed.provenance), []
    for problem in parsed.problems:
        if problem.flag not in flag_set or not flag_set[problem.flag].owner.startswith("host "):
            problems.append(problem)
            continue
        flag = flag_set[problem.flag].flag
        setattr(args, flag.dest, getattr(namespace, flag.dest))
        provenance[flag.dest] = f"flag {flag.name}"
    return replace(parsed, args=args, provenance=provenance, problems=tuple(problems))


def plan_for(
    flags: Flags,
    *,
    host: str = LIBRARY_HOST,
    platform: str | None = None,
    mode: str = "train",
    registry: Registry | None = None,
    configs: Sequence[object] = (),
) -> tuple[Plan, ParsedArguments]:
    """Parse and resolve, reporting what is wrong with the flags and with the plan together.

    Args:
        flags: a command line, a dictionary, or somebody's namespace.
        host: name of the host.
        platform: name of the platform; by default what ``--platform`` says.
        mode: ``train`` or ``inference``.
        registry: what is installed; read from the environment by default.
        configs: configuration objects that say what no flag says.

    Returns:
        The plan, and the arguments with ``platform`` resolved to a name; its provenance is the reason.

    Raises:
        PlanError: carries every problem.
    """
    registry = registry or Registry.discover()
    parsed = parse_flags(flags, known_flags(registry, host), configs)
    problems = list(parsed.problems)
    completed: tuple[FlagNote, ...] = ()
    try:
        completed = registry.complete_arguments(host, parsed, mode)
    except ArgumentError as error:
        problems.append(Problem("E-ARGUMENT", error.reason, error.remedy, flag=error.flag))
    try:
        name, why = choose_platform(platform or requested_platform(parsed.args), registry)
        check_dry_run_flags(registry.platform(name), parsed.args)
    except UserError as error:
        reason, remedy = (
            (error.wrong, error.remedy)
            if isinstance(error, ArgumentError)
            else (str(error), "use --platform auto")
        )
        flag = error.flag if isinstance(error, ArgumentError) else "--platform"
        problems.append(Problem("E-PLATFORM", reason, remedy, flag=flag))
        raise PlanError(problems) from error
    parsed.args.platform = name
    parsed = replace(parsed, provenance={**parsed.provenance, "platform": why})
    try:
        plan = resolve(
            registry,
            parsed.args,
            provenance=parsed.provenance,
            platform=name,
            host=host,
            mode=mode,
            left_out=parsed.left_out,
        )
    except PlanError as error:
        raise PlanError([*problems, *error.problems]) from None
    if problems:
        raise PlanError(problems)
    stood_down = registry.stand_downs(host, parsed.args, plan)
    return replace(plan, flag_notes=(*parsed.flag_notes, *completed, *stood_down)), parsed


def prepare(
    flags: Flags,
    *,
    host: str = LIBRARY_HOST,
    platform: str | None = None,
    mode: str = "train",
    registry: Registry | None = None,
    configs: Sequence[object] = (),
    extra_plugins: Sequence[object] = (),
) -> Any:
    """Plan a session without opening it.

    Args:
        flags: a command line (``["--use-flash-attn"]``); a dictionary from flag names, with or without
            dashes, to values (an unknown name is an error); or a namespace, of which only our attributes are
            read.
        host: name of the host: ``library`` for a training loop of your own, whose functions the session then
            has (`mindspeed_megatron.hosts.library.session.LibrarySession`); ``standalone`` for the one
            of mindspeed-train.
        platform: name of the platform; by default what ``--platform`` says, which is ``auto``.
        mode: ``train`` or ``inference``.
        registry: what is installed; read from the environment by default.
        configs: megatron-core's configuration objects (of the model, the optimizer, of data parallelism).
            They say what no flag says: a feature that needs ``--normalization RMSNorm`` finds it there.
        extra_plugins: further objects with hook implementations, outermost.

    Returns:
        A `Session`; a `LibrarySession`, which has the functions for your loop, for the host ``library``.

    Raises:
        PlanError: the flags cannot be read or resolved; carries every problem.
        mindspeed_core.registry.RegistryError: host or platform is not installed or cannot be loaded.
    """
    registry = registry or Registry.discover()
    plan, parsed = plan_for(
        flags, host=host, platform=platform, mode=mode, registry=registry, configs=configs
    )
    return assemble(
        registry, plan, parsed.args, parsed.provenance, host=registry.host(host), extra_plugins=extra_plugins
    )


def assemble(
    registry: Registry,
    plan: Plan,
    args: Namespace,
    provenance: Mapping[str, str],
    *,
    host: HostDeclaration,
    extra_plugins: Sequence[object] = (),
) -> Session:
    """Put the session of a plan together without opening it.

    Args:
        registry: what is installed.
        plan: the resolver's result.
        args: the arguments it was made from.
        provenance: where each argument's value came from.
        host: the host's declaration, which names the session's class.
        extra_plugins: further objects with hook implementations, outermost.

    Raises:
        mindspeed_core.errors.UserError: the run uses something that the installed megatron-core, of a version
            that is unknown here, has otherwise; or ``--strict-versions`` refuses that version.
    """
    check_version = part_if_installed("check_version")
    if check_version is not None:
        check_version(registry, plan, args, host)
    kind: type[Session] = load_object(host.session or "mindspeed_core.session:Session")
    return kind(
        plan,
        args,
        platform=registry.platform(plan.platform)(),
        registry=registry,
        host=host,
        features=[registry.features[feature].cls for feature in plan.names],
        provenance=provenance,
        extra_plugins=extra_plugins,
    )


def activate(
    flags: Flags,
    *,
    host: str = LIBRARY_HOST,
    platform: str | None = None,
    mode: str = "train",
    registry: Registry | None = None,
    configs: Sequence[object] = (),
    extra_plugins: Sequence[object] = (),
) -> Any:
    """Plan a session and open it; arguments and result are those of `prepare`.

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
        configs=configs,
        extra_plugins=extra_plugins,
    )
    return session.open()
