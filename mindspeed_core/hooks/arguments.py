"""Stages around the command line. Flags are declared as data and need no stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import hookspec

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.resolver.plan import Plan
    from mindspeed_core.session import Session

__all__ = ["validate_arguments", "validate_arguments_early"]


@hookspec
def validate_arguments_early(session: Session, args: Namespace, plan: Plan) -> Namespace | Any:
    """Change arguments before the host validates them.

    Called once per session, when the plan is known. The place to fill in defaults that the host would reject
    or overwrite. Values the user gave can be told from defaults through ``session.provenance``.

    Args:
        session: the open session.
        args: the parsed arguments.
        plan: what is active and why.

    Returns:
        The arguments the host validates.
    """


@hookspec
def validate_arguments(session: Session, args: Namespace, plan: Plan) -> Namespace | Any:
    """Validate the arguments and derive what follows from them.

    The host's default checks sizes against each other and adds the derived attributes
    (``data_parallel_size``, ``padded_vocab_size``, ``params_dtype``); wrappers see both.

    Args:
        session: the open session.
        args: the arguments as parsed, with the changes of `validate_arguments_early`.
        plan: what is active and why.

    Raises:
        mindspeed_core.errors.ArgumentError: a flag is wrong; the message names it, its value and the way out.
    """
