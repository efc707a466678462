"""Stages around the command line, and the one before anything heavy exists in the process.

Flags are declared as data and need no stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import Done, hookspec

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.resolver.plan import Plan
    from mindspeed_core.session import Session

__all__ = ["prepare_process", "validate_arguments", "validate_arguments_early"]


@hookspec
def validate_arguments_early(session: Session, args: Namespace, plan: Plan) -> Namespace | Any:
    """Change arguments before the host validates them.

    Called once per session, when the plan is known. Fill in defaults here that the host would reject or
    overwrite; ``session.provenance`` tells values the user gave from defaults.

    Args:
        args: the parsed arguments.

    Returns:
        The arguments the host validates.
    """


@hookspec
def validate_arguments(session: Session, args: Namespace, plan: Plan) -> Namespace | Any:
    """Validate the arguments and derive what follows from them.

    The host's default checks sizes against each other and adds the derived attributes
    (``data_parallel_size``, ``padded_vocab_size``, ``params_dtype``); wrappers see both.

    Args:
        args: the arguments as parsed, with the changes of `validate_arguments_early`.

    Raises:
        mindspeed_core.errors.ArgumentError: a flag is wrong; the message names it, its value and the way out.
    """


@hookspec
def prepare_process(session: Session, args: Namespace) -> Done | Any:
    """Prepare the process before the distributed backend starts and before the host imports megatron.

    Environment variables are set with ``session.setenv(name, value)``, which restores them at close.
    megatron modules may already be imported when a session opens inside somebody else's program.
    """
