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
    Flag("--loss-spike-factor", type=float, default=10.0, help="See --check-for-spiky-loss."),
    Flag(
        "--bad-step-action",
        type=str,
        default="stop",
        choices=("stop", "skip"),
        help="What a step with a loss or gradient that is not finite, or a spike, leads to: the end of the "
        "run, or no update in this step.",
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
        help="End the run when no rank made progress for this long, and name the rank that the others wait "
        "for; by default 0.8 x --distributed-timeout-minutes, 0 for never.",
    ),
    Flag(
        "--on-save-failure",
        type=str,
        default="stop",
        choices=("stop", "continue"),
        help="Whether a save that failed ends the run: the file system refused it, or a writer of "
        "--async-save was killed or hung; earlier checkpoints stay either way.",
    ),
    Flag("--nproc", type=int, help="Start this many worker processes on this machine, without torchrun."),
    Flag(
        "--max-restarts",
        type=int,
        default=0,
        help="With --nproc: start the workers again from the last checkpoint when one was lost, at most this "
        "often.",
    ),
)
