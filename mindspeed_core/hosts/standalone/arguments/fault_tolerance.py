"""Checks of the fault-tolerance flags."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_core.hosts.standalone.arguments.errors import argument_error


def check_fault_tolerance(args: Namespace) -> None:
    """Refuse values that cannot work.

    Raises:
        ArgumentError: names flag, value and the way out.
    """
    if args.exit_duration_in_mins is not None and args.exit_duration_in_mins <= 0:
        raise argument_error(args, "--exit-duration-in-mins", "must be positive")
    if args.loss_spike_factor <= 1:
        raise argument_error(
            args, "--loss-spike-factor", "an ordinary loss would be a spike", "use more than 1"
        )
    if args.bad_step_limit < 1:
        raise argument_error(args, "--bad-step-limit", "must be at least 1", "or use --bad-step-action stop")
    if args.hang_timeout_minutes is not None and args.hang_timeout_minutes < 0:
        raise argument_error(args, "--hang-timeout-minutes", "must not be negative", "0 switches it off")
