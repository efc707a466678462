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
        help="device to run on; auto takes the best one that is available",
    ),
    Flag(
        "--fake-process-group",
        help="plan the launch without device or peers, by --platform fake, fake-cuda or fake-npu",
    ),
    Flag(
        "--fake-world-size",
        type=int,
        metavar="N",
        help="ranks of the world of a dry run; by default the launcher's WORLD_SIZE, or 1",
    ),
    Flag(
        "--fake-rank",
        type=int,
        metavar="R",
        help="the rank that a dry run is; by default the launcher's RANK, or 0",
    ),
    Flag(
        "--plan-skew",
        type=float,
        metavar="F",
        help="in a dry run, the factor by which the experts of this rank get more tokens than the average",
    ),
    Flag(
        "--optimization-level",
        type=int,
        default=2,
        choices=(0, 1, 2),
        help="0: features that change nothing else, 1: also affinity features, 2: all that are asked for",
    ),
    Flag("--plan-only", help="print what would be active and stop"),
    Flag("--explain", help="say of each flag that changes nothing here, or is read as another, why"),
    Flag(IGNORE_UNKNOWN, help="pass over flags that nobody knows, as Megatron-LM's scripts can"),
    Flag(
        "--no-cross-rank-check",
        help="do not compare versions, sources and arguments of all ranks when a run starts",
    ),
    Flag(
        "--strict-plan-resume",
        type=str,
        default="error",
        choices=("error", "warn", "off"),
        help="what to do when a checkpoint was written with other features than are active now",
    ),
    Flag(
        "--allow-other-model",
        type=str,
        nargs="+",
        metavar="FIELD",
        help="load a checkpoint although these fields of its model differ and make it compute something else",
    ),
)
