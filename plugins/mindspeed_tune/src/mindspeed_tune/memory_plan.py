"""Memory of a kind of ranks: exact bytes, what an allocator takes, what is left, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_tune.extrapolate import Whole
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.record import LargeTensor, RankRecord
from mindspeed_tune.schedules import in_flight

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "main parameters",
    "optimizer state",
    "activations",
    "other",
)
"""Uses of tensors in the order of reports. Categories of a record that are not listed follow them."""
_BETWEEN_STEPS = ("main parameters", "optimizer state")


@dataclass(frozen=True)
class Advice:
    """A change that would lower the peak.

    Attributes:
        flags: to add or change.
        saves: bytes, estimated.
        why: one sentence.
        feature: whose flags they are; empty for those of megatron-core.
    """

    flags: str
    saves: float
    why: str
    feature: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a rank over a step.

    Attributes:
        stage: the pipeline stage.
        categories: bytes by category at the highest peak.
        phase: ``forward and backward`` or ``update``.
        modules: bytes of activations by module at the peak of forward and backward.
        exact: bytes of tensors at the peak.
        allocated: the same with every tensor rounded up as an allocator does.
        reserved: estimate of what the allocator takes from the device.
        expandable: likewise with expandable segments.
        outside: bytes beside the allocator: of runtime and communication buffers as the hardware's file says;
            without one what the platform that is planned declares of its communication backend.
        capacity: bytes of the device; None where no hardware is known.
        operator: during which the peak is reached.
        stack: the code that called it, innermost first.
        largest: the largest tensors at the peak.
        advice: what would help, best first.
    """

    stage: int
    categories: Mapping[str, float]
    phase: str
    modules: Mapping[str, float]
    exact: float
    allocated: float
    reserved: float
    expandable: float
    outside: float
    capacity: float | None
    operator: str
    stack: tuple[str, ...]
    largest: tuple[LargeTensor, ...]
    advice: tuple[Advice, ...]

    @property
    def needed(self) -> float:
        """Return the bytes that a device must have: the allocator's, with what is beside it."""
        return self.reserved + self.outside

    @property
    def headroom(self) -> float | None:
        """Return the bytes that are left, negative where they are missing; None without hardware."""
        return None if self.capacity is None else self.capacity - self.needed

    @property
    def fits(self) -> bool:
        """Return whether the device has enough, or is not known."""
        return self.headroom is None or self.headroom >= 0


def memory_plan(
    record: RankRecord, step: Whole, stage: int, hardware: Hardware | None, used_groups: int
) -> MemoryPlan:
    """Return the memory of the ranks of one pipeline stage.

    Args:
        record: of a rank with the contents of the stage.
        step: its whole step, with the micro-batches that the stage holds.
        stage: the pipeline stage.
        hardware: None where it is not known.
        used_groups: groups that communicate, each of which may take buffers.
    """
    schedule = _steady(record, step.peak)
    update = dict(record.update.peak.categories)
    in_update = sum(update.values()) > sum(schedule.values())
    categories = update if in_update else schedule
    exact = sum(categories.values())
    peak = record.update.peak if in_update else record.runs[0].peak
    return MemoryPlan(
        stage=stage,
        categories=_ordered(categories),
        phase="update" if in_update else "forward and backward",
        modules=dict(sorted(step.modules.items(), key=lambda item: -item[1])),
        exact=exact,
        allocated=exact * record.cost.get("allocated_ratio", 1.0),
        reserved=exact * record.cost.get("reserved_ratio", 1.0),
        expandable=exact * record.cost.get("expandable_ratio", 1.0),
        outside=record.backend.bytes + record.backend.communicators
        if hardware is None
        else hardware.context + used_groups * hardware.per_group,
        capacity=None if hardware is None else hardware.memory,
        operator=peak.operator,
        stack=peak.stack,
        largest=peak.largest,
        advice=tuple(_advice(record, categories, step.modules, stage)),
    )


def _steady(record: RankRecord, peak: Mapping[str, float]) -> dict[str, float]:
    """Return a peak of forward and backward with what the first update adds for good."""
    found = dict(peak)
    for category in _BETWEEN_STEPS:
        kept = record.update.after.get(category, 0.0)
        if kept > found.get(category, 0.0):
            found[category] = kept
    return found


def _ordered(categories: Mapping[str, float]) -> dict[str, float]:
    known = [name for name in CATEGORIES if name in categories]
    return {name: categories[name] for name in (*known, *(n for n in categories if n not in known))}


def _advice(
    record: RankRecord, categories: Mapping[str, float], modules: Mapping[str, float], stage: int
) -> list[Advice]:
    """Return what lowers the largest categories, by what the flags of this launch leave open."""
    layout, flags, sizes = record.layout, record.flags, record.sizes
    found = list(_by_features(record, modules, stage))
    shards = layout.optimizer_shards
    state = categories.get("main parameters", 0.0) + categories.get("optimizer state", 0.0)
    if not flags.get("use_distributed_optimizer") and shards > 1 and state:
        found.append(
            Advice(
                "--use-distributed-optimizer",
                state * (1 - 1 / shards),
                f"shards main parameters and moments over {shards} ranks",
            )
        )
    activations = categories.get("activations", 0.0)
    if layout.tp > 1 and not flags.get("sequence_parallel") and activations:
        found.append(
            Advice("--sequence-parallel", activations * 0.5 * (1 - 1 / layout.tp), "splits what tp repeats")
        )
    if flags.get("recompute_granularity") != "full" and activations:
        kept = _layer_inputs(record)
        if kept < activations:
            found.append(
                Advice(
                    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                    activations - kept,
                    "keeps the input of each layer only, and runs it again in backward (a third more work)",
                )
            )
    if activations and sizes.get("micro_batch_size", 1) > 1:
        b = int(sizes["micro_batch_size"])
        found.append(Advice(f"--micro-batch-size {b // 2}", activations * (1 - (b // 2) / b), "halves them"))
    if activations and layout.dp > 1:
        found.append(
            Advice(
                f"--context-parallel-size {layout.cp * 2}",
                activations / 2,
                "splits sequences over twice as many ranks, taken from data parallelism",
            )
        )
    kept_whole = sum(categories.get(name, 0.0) for name in ("parameters", "gradients"))
    if kept_whole and layout.dp > 1 and layout.pp < sum(sum(s.layers.values()) for s in record.stages):
        found.append(
            Advice(
                f"--pipeline-model-parallel-size {layout.pp * 2}",
                kept_whole / 2,
                "halves the layers of a rank; activations stay, since more micro-batches are in flight",
            )
        )
    return sorted(found, key=lambda one: -one.saves)


_WORTH_A_LINE = 0.01
"""Part of the activations that a feature must save to be named."""


def _by_features(record: RankRecord, modules: Mapping[str, float], stage: int) -> Iterator[Advice]:
    """Yield features that are not active and would keep less: of several of the same modules the best one."""
    held = in_flight(record.layout, stage, record.microbatches, record.microbatch_group) / record.layout.vpp
    best: dict[tuple[str, ...], Advice] = {}
    for relief in record.reliefs:
        now = sum(size for path, size in modules.items() if relief.concerns(path))
        saves = now - relief.kept * held
        if saves <= _WORTH_A_LINE * sum(modules.values()):
            continue
        if relief.roles not in best or saves > best[relief.roles].saves:
            part = relief.roles[0].replace("_", " ") if len(relief.roles) == 1 else "its modules"
            why = f"keeps less of {part} for backward, by its formula"
            best[relief.roles] = Advice(relief.flags, saves, why, relief.feature)
    yield from best.values()


def _layer_inputs(record: RankRecord) -> float:
    """Return the bytes of layer inputs that full recompute keeps on a rank."""
    sizes, layout = record.sizes, record.layout
    if not {"seq_length", "micro_batch_size", "hidden_size"} <= sizes.keys():
        return float("inf")
    size = 4 if record.flags.get("params_dtype") == "float32" else 2
    one = sizes["seq_length"] * sizes["micro_batch_size"] * sizes["hidden_size"] * size / layout.cp
    if record.flags.get("sequence_parallel"):
        one /= layout.tp
    layers = sum(record.stages[record.stage].layers.values())
    alive = max(run.in_flight for run in record.runs)
    full = min(record.microbatches, layout.pp - record.stage)
    return one * layers * max(alive, full)
