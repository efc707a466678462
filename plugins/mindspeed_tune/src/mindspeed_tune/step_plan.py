"""Step time of a launch, estimated: every stage's passes, what is exposed behind them, and the MFU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_megatron.instruments.call_order import POINT_TO_POINT
from mindspeed_megatron.instruments.operations import operations
from mindspeed_tune.extrapolate import Whole
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.record import RankRecord
from mindspeed_tune.roofline import communication_seconds, seconds
from mindspeed_tune.schedules import BACKWARD, FORWARD, order
from mindspeed_tune.timeline import Timeline, simulate

UPDATE_BYTES = 28
"""Bytes that an Adam update reads and writes per element of a shard: gradient, main parameter and two moments
in float32, and the parameter."""


@dataclass(frozen=True)
class StepPlan:
    """A step of the whole launch.

    Attributes:
        timeline: of the pipeline.
        seconds: of the step; None without hardware.
        gradients: seconds of the exchange of gradients that is not hidden behind backward passes.
        update: seconds of the update with the exchange of parameters.
        compute: seconds of operators in the passes of the busiest stage.
        communication: seconds of collectives in the passes of the busiest stage.
        tokens: tokens of a step.
        model_flops: operations of the model in a step; 0 where they are not known.
        mfu: share of the devices' peak; None without hardware or operations.
    """

    timeline: Timeline
    seconds: float | None
    gradients: float
    update: float
    compute: float
    communication: float
    tokens: float
    model_flops: float
    mfu: float | None


def step_plan(records: Sequence[RankRecord], wholes: Sequence[Whole], hardware: Hardware | None) -> StepPlan:
    """Estimate a step.

    Args:
        records: one for every pipeline stage, in order; a stage like another one has its record.
        wholes: their whole steps.
        hardware: None where it is not known: passes then last as their operations, and only the bubble means
            something.
    """
    layout, microbatches = records[0].layout, records[0].microbatches
    durations = [_durations(record, step, hardware) for record, step in zip(records, wholes)]
    transfer = 0.0 if hardware is None else _transfer(records[0], wholes[0], hardware)
    orders = [order(layout, stage, microbatches, records[0].microbatch_group) for stage in range(layout.pp)]
    timeline = simulate(orders, [total for total, _ in durations], transfer)
    tokens = records[0].sizes.get("global_batch_size", 0) * records[0].sizes.get("seq_length", 0)
    model_flops = records[0].sizes.get("model_flops", 0.0)
    if hardware is None:
        return StepPlan(timeline, None, 0.0, 0.0, 0.0, 0.0, tokens, model_flops, None)
    exposed = [_exchange(record, step, hardware, "gradients") for record, step in zip(records, wholes)]
    updates = [
        _exchange(record, step, hardware, "update")
        + _gathers(record, step, hardware, total)
        + _update(record, hardware)
        for record, step, (total, _) in zip(records, wholes, durations)
    ]
    gradients, update = max(exposed), max(updates)
    if records[0].flags.get("overlap_grad_reduce"):
        # It runs behind the last backward passes, one chunk's worth on every stage.
        window = max(sum(t for (d, _), t in total.items() if d == BACKWARD) for total, _ in durations)
        gradients = max(0.0, gradients - window)
    total_seconds = timeline.seconds + gradients + update
    busiest = max(range(len(records)), key=timeline.busy)
    communication = sum(durations[busiest][1].values()) * microbatches
    peak = hardware.flops.get(str(records[0].flags.get("params_dtype")), hardware.flops["bfloat16"])
    mfu = model_flops / (total_seconds * layout.world_size * peak) if model_flops else None
    return StepPlan(
        timeline=timeline,
        seconds=total_seconds,
        gradients=gradients,
        update=update,
        compute=timeline.busy(busiest) - communication,
        communication=communication,
        tokens=tokens,
        model_flops=model_flops,
        mfu=mfu,
    )


def _durations(
    record: RankRecord, step: Whole, hardware: Hardware | None
) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """Return the seconds of a pass by direction and chunk, and those of communication among them."""
    found: dict[tuple[str, int], float] = {}
    waits: dict[tuple[str, int], float] = {}
    for chunk in range(record.layout.vpp):
        for direction in (FORWARD, BACKWARD):
            work = step.work.get(f"{chunk} {direction}", {})
            if hardware is None:
                found[direction, chunk] = operations(work)
                continue
            wait = _passes(record, step, hardware, direction) / (record.microbatches * record.layout.vpp)
            waits[direction, chunk] = wait
            found[direction, chunk] = seconds(work, hardware) + wait
    return found, waits


def _passes(record: RankRecord, step: Whole, hardware: Hardware, direction: str) -> float:
    """Return the seconds of all collectives of one direction in a step."""
    return sum(
        communication_seconds(operation, record.groups[group], calls, size, hardware)
        for (group, operation, _, phase), (calls, size) in step.traffic.items()
        if phase == direction and operation not in POINT_TO_POINT
    )


def _exchange(
    record: RankRecord, step: Whole, hardware: Hardware, wanted: str, *, gathers: bool = False
) -> float:
    """Return the seconds of what is exchanged once a step; gathers of parameters are asked for alone."""
    return sum(
        communication_seconds(operation, record.groups[group], calls, size, hardware)
        for (group, operation, _, phase), (calls, size) in step.traffic.items()
        if phase == wanted and is_gather(operation, phase) == gathers
    )


def is_gather(operation: str, phase: str) -> bool:
    """Return whether a call gathers updated parameters."""
    return phase == "update" and operation.startswith("all_gather")


def _gathers(
    record: RankRecord, step: Whole, hardware: Hardware, total: Mapping[tuple[str, int], float]
) -> float:
    """Return the seconds of the gather of parameters that forward passes do not hide."""
    taken = _exchange(record, step, hardware, "update", gathers=True)
    if not record.flags.get("overlap_param_gather"):
        return taken
    return max(0.0, taken - sum(t for (d, _), t in total.items() if d == FORWARD))


def _transfer(record: RankRecord, step: Whole, hardware: Hardware) -> float:
    """Return the seconds of one message between pipeline stages."""
    times = [
        (
            hardware.latency(_crosses(record, group, hardware)) * calls
            + size / hardware.bandwidth(_crosses(record, group, hardware))
        )
        / calls
        for (group, operation, _, _), (calls, size) in step.traffic.items()
        if operation in POINT_TO_POINT and calls
    ]
    return max(times, default=0.0)


def _crosses(record: RankRecord, group: int, hardware: Hardware) -> bool:
    return record.groups[group].ranks.crosses(hardware.devices)


def _update(record: RankRecord, hardware: Hardware) -> float:
    """Return the seconds of the optimizer's own operators."""
    shard = _held(record.update.after, "optimizer state") / 8
    return hardware.update_seconds(UPDATE_BYTES * shard)


def _held(categories: Mapping[str, float], name: str) -> float:
    return categories.get(name, 0.0)
