"""Flags of fault tolerance: signals, bad steps, hanging ranks, lost workers, refused saves.

Data only, like `flags`. Where Megatron-LM has a flag, name and meaning are its own.
"""

from __future__ import annotations

from mindspeed_core.feature import Flag

EXIT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")

FAULT_TOLERANCE_FLAGS: tuple[Flag, ...] = (
    Flag("--exit-duration-in-mins", type=float, help="Save and end after this many minutes."),
    Flag(
        "--exit-signal",
        type=str,
        default="SIGTERM",
        choices=EXIT_SIGNALS,
        help="Signal that saves and ends the run; SIGUSR1 (of batch systems), SIGHUP (of a terminal that is "
        "closed) and Ctrl-C always do.",
    ),
    Flag(
        "--exit-signal-handler",
        dest="exit_signal_handler_asked",
        help="Accepted; saving and ending on --exit-signal is the default.",
    ),
    Flag(
        "--no-exit-signal-handler",
        inverts="exit_signal_handler",
        help="Let signals end the process at once, without saving.",
    ),
    Flag(
        "--check-weight-hash-across-dp-replicas-interval",
        type=int,
        help="Steps between comparisons of the weights of data-parallel replicas; a difference ends the run.",
    ),
    Flag(
        "--check-for-spiky-loss",
        help="Treat a loss of --loss-spike-factor times the largest of the last 100 steps as a bad step.",
    ),
    Flag("--loss-spike-factor", type=float, default=10.0, help="Factor of --check-for-spiky-loss."),
    Flag(
        "--bad-step-action",
        type=str,
        default="stop",
        choices=("stop", "skip"),
        help="Reaction to a non-finite loss or gradient, or a loss spike: stop, or skip the update.",
    ),
    Flag(
        "--bad-step-limit",
        type=int,
        default=10,
        help="With --bad-step-action skip: stop after this many skipped steps in a row.",
    ),
    Flag(
        "--hang-timeout-minutes",
        type=float,
        help=(
            "Stop when no rank made progress for this long, and name the rank waited for; 0 for "
            "never. Default: 0.8 x --distributed-timeout-minutes."
        ),
    ),
    Flag(
        "--on-save-failure",
        type=str,
        default="stop",
        choices=("stop", "continue"),
        help="Reaction to a failed save: stop, or go on; earlier checkpoints stay either way.",
    ),
    Flag("--nproc", type=int, help="Start this many worker processes on this machine, without torchrun."),
    Flag(
        "--max-restarts",
        type=int,
        default=0,
        help="With --nproc: how often lost workers are restarted from the last checkpoint.",
    ),
)
