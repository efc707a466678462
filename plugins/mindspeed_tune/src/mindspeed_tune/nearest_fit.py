"""The nearest layout that fits a device, estimated from one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_tune.memory_plan import MemoryPlan
from mindspeed_tune.record import RankRecord


@dataclass(frozen=True)
class Candidate:
    """Another layout of the same model.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline size.
        cp: context-parallel size.
        full_recompute: every layer keeps its input only.
        world_size: ranks that it needs at least.
        needed: estimated bytes of the fullest rank.
    """

    tp: int
    pp: int
    cp: int
    full_recompute: bool
    world_size: int
    needed: float

    @property
    def flags(self) -> str:
        """Return the flags of the layout."""
        flags = (
            f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp} "
            f"--context-parallel-size {self.cp}"
        )
        return flags + (" --recompute-granularity full" if self.full_recompute else "")


def nearest_fit(record: RankRecord, memory: MemoryPlan, devices: int) -> tuple[Candidate | None, Candidate]:
    """Return the nearest layout that fits, and the smallest one there is.

    Parameters, gradients and main parameters scale with tensor and pipeline parallelism, activations with
    tensor and context parallelism; sharded optimizer state depends on the world alone.

    Args:
        record: of the fullest rank.
        memory: its memory.
        devices: of a node, which bounds tensor parallelism.
    """
    candidates = list(_candidates(record, memory, devices))
    smallest = min(candidates, key=lambda one: (one.needed, one.world_size))
    assert memory.capacity is not None
    fitting = [one for one in candidates if one.needed <= memory.capacity]
    nearest = min(fitting, key=lambda one: _distance(record, one), default=None)
    return nearest, smallest


def nearest_beyond(
    record: RankRecord, memory: MemoryPlan, devices: int
) -> tuple[Candidate | None, Candidate]:
    """Return the nearest layout of more ranks that fits, and the smallest one of them, as `nearest_fit` does.

    For launches of which every layout was tried on as many ranks as there are. The ranks double; the batch
    stays, so that it must still divide.
    """
    layout, batch = record.layout, int(record.sizes.get("global_batch_size", 0))
    found: list[Candidate] = []
    for world in (layout.world_size * 2**power for power in range(1, _DOUBLINGS + 1)):
        for one in _candidates(record, memory, devices, world):
            replicas = world // (one.tp * one.pp * one.cp)
            if one.world_size == world and not (batch and batch % replicas):
                found.append(one)
        fitting = [one for one in found if one.needed <= (memory.capacity or 0.0)]
        if fitting:
            return min(fitting, key=lambda one: _distance(record, one)), fitting[0]
    smallest = min(
        found or _candidates(record, memory, devices), key=lambda one: (one.needed, one.world_size)
    )
    return None, smallest


_DOUBLINGS = 6
"""Times that the ranks are doubled in search of a layout that fits."""


def _candidates(record: RankRecord, memory: MemoryPlan, devices: int, least: int = 0) -> Iterator[Candidate]:
    layout = record.layout
    layers = sum(sum(stage.layers.values()) for stage in record.stages)
    heads = int(record.sizes.get("num_attention_heads", layout.tp))
    recomputed = record.flags.get("recompute_granularity") == "full"
    for tp in _doubled(layout.tp, min(devices, heads)):
        for pp in _doubled(layout.pp, layers):
            for cp in _doubled(layout.cp, 64):
                for full in sorted({recomputed, True}):
                    world = max(layout.world_size, tp * pp * cp, least)
                    if world % (tp * pp * cp):
                        continue
                    needed = _needed(record, memory, tp, pp, cp, full, world)
                    yield Candidate(tp, pp, cp, full, world, needed)


def _needed(
    record: RankRecord, memory: MemoryPlan, tp: int, pp: int, cp: int, full: bool, world: int
) -> float:
    layout, found = record.layout, memory.categories
    split = (tp * pp) / (layout.tp * layout.pp)
    sharded = world / layout.world_size if record.flags.get("use_distributed_optimizer") else split
    activations = _of(found, "activations", "other") * (layout.tp * layout.cp) / (tp * cp)
    if full and record.flags.get("recompute_granularity") != "full":
        # The inputs of layers, and one layer while it runs again.
        layers = max(1, sum(record.stages[record.stage].layers.values()))
        activations *= 0.06 + 0.94 / (layers * max(1, min(record.microbatches, layout.pp)))
    state = _of(found, "main parameters", "optimizer state") / sharded
    rest = (memory.exact - _of(found, *_ESTIMATED)) / split
    exact = rest + state + activations
    return exact * (memory.reserved / memory.exact if memory.exact else 1.0) + memory.outside


_ESTIMATED = ("main parameters", "optimizer state", "activations", "other")


def _of(categories: Mapping[str, float], *names: str) -> float:
    return sum(categories.get(name, 0.0) for name in names)


def _doubled(size: int, limit: int) -> Iterator[int]:
    yield size
    while size * 2 <= limit:
        size *= 2
        yield size


def _distance(record: RankRecord, one: Candidate) -> tuple[int, int, float]:
    layout = record.layout
    changed = (one.tp != layout.tp) + (one.pp != layout.pp) + (one.cp != layout.cp)
    changed += one.full_recompute != (record.flags.get("recompute_granularity") == "full")
    return (one.world_size, changed, one.tp * one.pp * one.cp)
