"""The flags that belong to the core itself, whatever the host."""

from __future__ import annotations

from mindspeed_core.feature import Flag

CORE_OWNER = "mindspeed-core"

IGNORE_UNKNOWN = "--ignore-unknown-args"

CORE_FLAGS: tuple[Flag, ...] = (
    Flag(
        "--platform",
        type=str,
        default="auto",
        choices=("auto",),
        help="Device to run on; auto takes the best available one.",
    ),
    Flag(
        "--fake-process-group",
        help="Dry-run the launch without devices or peers, on --platform fake, fake-cuda or fake-npu.",
    ),
    Flag(
        "--fake-world-size",
        type=int,
        metavar="N",
        help="World size of a dry run; by default the launcher's WORLD_SIZE, or 1.",
    ),
    Flag(
        "--fake-rank",
        type=int,
        metavar="R",
        help="Rank that a dry run takes; by default the launcher's RANK, or 0.",
    ),
    Flag(
        "--plan-skew",
        type=float,
        metavar="F",
        help="In a dry run, tokens of this rank's experts over the average of all ranks.",
    ),
    Flag(
        "--optimization-level",
        type=int,
        default=2,
        choices=(0, 1, 2),
        help=("Highest level of active features: 0 basic, 1 affinity too, 2 all that are requested."),
    ),
    Flag("--plan-only", help="Print the plan and stop."),
    Flag(
        "--explain", help="Say why each flag that has no effect, or is read as another flag, is treated so."
    ),
    Flag(IGNORE_UNKNOWN, help="Ignore unknown flags, as Megatron-LM's scripts can."),
    Flag(
        "--no-cross-rank-check",
        help="Do not compare versions, sources and arguments of all ranks at the start.",
    ),
    Flag(
        "--strict-versions",
        help="Refuse a megatron-core that this release was not tested with.",
    ),
    Flag(
        "--strict-plan-resume",
        type=str,
        default="error",
        choices=("error", "warn", "off"),
        help="Reaction to a checkpoint that was written with other features than the active ones.",
    ),
    Flag(
        "--allow-other-model",
        type=str,
        nargs="+",
        metavar="FIELD",
        help="Load a checkpoint although these fields of its model differ from this run's.",
    ),
)
