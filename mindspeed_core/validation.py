"""Check the flags of a training without starting it: the resolver and the host's validation together.

For searches, launchers and tests: nothing is printed, patched or opened, and no process group is needed.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from mindspeed_core.activation import Flags, assemble, plan_for
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.flags.values import shown_value
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import Plan, PlanError, Problem, Unread


@dataclass(frozen=True)
class Checked:
    """The outcome of `check`.

    Attributes:
        plan: what would be active; None where the flags cannot be resolved.
        args: the validated arguments with everything derived from them; None where something is wrong.
        problems: what is wrong; empty when a training may start.
    """

    plan: Plan | None
    args: Namespace | None
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.problems

    @property
    def unread(self) -> tuple[Unread, ...]:
        """Return the flags that were given and have no effect; empty where there is no plan."""
        return self.plan.unread if self.plan is not None else ()


def check(
    flags: Flags,
    *,
    world_size: int = 1,
    platform: str | None = None,
    host: str = DEFAULT_HOST,
    mode: str = "train",
    registry: Registry | None = None,
) -> Checked:
    """Check flags as a training would, without opening a session.

    The resolver reports all its problems at once, the host its first one. Files that flags name are read as
    far as validation reads them: tokenizers and lists of datasets, not datasets or checkpoints.

    Args:
        flags: a command line, a dictionary, or somebody's namespace.
        world_size: ranks of the training.
        platform: name of the platform; by default what ``--platform`` says. It must be available here.
        host: ``standalone`` or ``library``; Megatron-LM's scripts validate their arguments themselves.
        mode: ``train`` or ``inference``.
        registry: what is installed; read from the environment by default. Pass it to check many.

    Raises:
        mindspeed_core.registry.RegistryError: host or platform is not installed or cannot be loaded.
        mindspeed_core.errors.SessionError: the host is Megatron-LM's, or an implementation does not fit its
            stage.
        ValueError: ``world_size`` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; a training has at least one rank")
    registry = registry or Registry.discover()
    try:
        plan, parsed = plan_for(flags, host=host, platform=platform, mode=mode, registry=registry)
    except PlanError as error:
        return Checked(None, None, error.problems)
    session = assemble(registry, plan, parsed.args, parsed.provenance, host=registry.host(host))
    try:
        return Checked(plan, session.validated(world_size=world_size))
    except UserError as error:
        return Checked(plan, None, (_problem(error),))


def _problem(error: UserError) -> Problem:
    if not isinstance(error, ArgumentError):
        return Problem("E-VALIDATION", str(error))
    shown = "" if error.value is None else shown_value(error.value)
    return Problem("E-ARGUMENT", error.reason, error.remedy, flag=error.flag, value=shown)
