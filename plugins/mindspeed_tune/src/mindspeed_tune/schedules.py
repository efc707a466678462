"""Order of forward and backward passes on every pipeline stage: 1F1B, and interleaved.

The same rules as megatron-core's schedules; a recorded run is compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_tune.layout import Layout
from mindspeed_tune.record import Stage

Step = tuple[str, int, int]
"""``("forward" or "backward", chunk, micro-batch)``."""
FORWARD, BACKWARD = "forward", "backward"


def warmup(layout: Layout, stage: int, microbatches: int, group_size: int | None = None) -> int:
    """Return the forward passes of chunks that a stage runs before its first backward pass.

    Args:
        layout: of the launch.
        stage: the pipeline stage.
        microbatches: of a step.
        group_size: micro-batches that an interleaved chunk runs in a row; by default the pipeline size.
    """
    p, v = layout.pp, layout.vpp
    if p == 1:
        return 0
    if v == 1:
        return min(p - stage - 1, microbatches)
    return min((p - stage - 1) * 2 + (v - 1) * (group_size or p), microbatches * v)


def in_flight(layout: Layout, stage: int, microbatches: int, group_size: int | None = None) -> int:
    """Return how many forward passes of chunks are kept for their backward at the most."""
    total = microbatches * layout.vpp
    return min(total, warmup(layout, stage, microbatches, group_size) + 1)


def order(layout: Layout, stage: int, microbatches: int, group_size: int | None = None) -> list[Step]:
    """Return what a stage runs, in order."""
    table = _table(microbatches, layout.vpp, group_size or layout.pp)
    forwards = [(FORWARD, chunk, number) for number, chunk in table]
    backwards = [(BACKWARD, layout.vpp - 1 - chunk, number) for number, chunk in table]
    first = warmup(layout, stage, microbatches, group_size)
    steps = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards):
        steps += [forward, backward]
    return steps + backwards[len(forwards) - first :]


def fewest(layout: Layout, group_size: int | None = None) -> tuple[int, int]:
    """Return two numbers of micro-batches from which those of any larger step follow.

    1F1B runs 2 and 1. The interleaved schedule wants a whole group of micro-batches, and two of them show
    its full number of chunks in flight.
    """
    size = group_size or layout.pp
    return (2, 1) if layout.vpp == 1 or layout.pp == 1 else (2 * size, size)


def numbers(
    layout: Layout,
    stages: Sequence[Stage],
    stage: int,
    microbatches: int,
    group_size: int | None = None,
    *,
    all_layers: bool = False,
) -> list[int]:
    """Return the numbers of micro-batches to run, from which every number of a step follows.

    The first one is the same on all ranks, whose calls of it are compared.

    Args:
        layout: of the launch.
        stages: contents of all pipeline stages.
        stage: the pipeline stage that runs.
        microbatches: of a step.
        group_size: micro-batches that an interleaved chunk runs in a row; by default the pipeline size.
        all_layers: no passes over other numbers of layers follow, for which fewer micro-batches are cheaper.
    """
    most, least = fewest(layout, group_size)
    if layout.pp == 1 or layout.vpp == 1:
        return [microbatches] if microbatches <= most else [most, least]
    # Interleaved stages that are alike differ in what is in flight, which takes two numbers to tell.
    alike = stages.count(stages[stage]) > 1
    if microbatches < least:
        return [microbatches]
    if microbatches == least:
        return [least, most] if alike else [least]
    if microbatches == most and all_layers and not alike:
        return [most]
    return [most, least]


def _table(microbatches: int, chunks: int, group_size: int) -> list[tuple[int, int]]:
    if chunks == 1:
        return [(number, 0) for number in range(microbatches)]
    return [
        (number, chunk)
        for begin in range(0, microbatches, group_size)
        for chunk in range(chunks)
        for number in range(begin, min(begin + group_size, microbatches))
    ]
