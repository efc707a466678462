"""A step of any pipeline, data-parallel size and micro-batch size, composed of dry runs of a small pipeline.

Tensor, context and expert parallelism, recomputation and features decide what a layer keeps, computes and
sends; they make a cell, which is run once. What a pipeline of more stages or chunks, more data parallelism,
another number or size of micro-batches changes follows by arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_megatron.instruments.call_order import POINT_TO_POINT
from mindspeed_tune.estimate import COMPOSED, Estimate
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.layout import Layout
from mindspeed_tune.other_layout import Along, along, placed
from mindspeed_tune.pipeline_target import MADE_OF, WHOLE, Target
from mindspeed_tune.pipeline_time import pipeline_seconds
from mindspeed_tune.record import Group, RankRecord
from mindspeed_tune.roofline import communication_seconds, seconds
from mindspeed_tune.schedules import BACKWARD, FORWARD, in_flight
from mindspeed_tune.small_pipeline import (
    FIRST,
    LAST,
    LAYERS,
    MIDDLE,
    SHARDED,
    STATIC,
    NotComposable,
    Part,
    between,
    work_between,
)
from mindspeed_tune.step_plan import UPDATE_BYTES, is_gather


@dataclass
class Cell:
    """Dry runs of the small pipeline.

    Attributes:
        parts: its stages, by micro-batch size.
    """

    parts: Mapping[int, tuple[Part, ...]]
    _groups: dict[tuple[int, int], Along] = field(default_factory=dict)
    _durations: dict[Any, tuple[float, float]] = field(default_factory=dict)
    _known: dict[Any, float] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Mapping[int, Sequence[RankRecord]]) -> Cell:
        """Return the cell of records of all stages, by micro-batch size.

        Raises:
            NotComposable: other pipelines do not follow from them.
        """
        return cls({size: tuple(map(Part.of, stages)) for size, stages in sorted(records.items())})

    def estimate(self, target: Target, hardware: Hardware) -> Estimate:
        """Return the numbers of a step.

        Raises:
            NotComposable: they do not follow from the dry runs.
        """
        layout = target.layout
        stages = [(stage, target.kind(stage)) for stage in range(layout.pp)]
        durations = [self._of_stage(target, stage, hardware) for stage in range(layout.pp)]
        taken = [{step: total for step, (total, _) in one.items()} for one in durations]
        pipeline = pipeline_seconds(
            layout.pp, layout.vpp, target.microbatches, taken, self._transfer(target, hardware)
        )
        exposed = max(self._exchange(target, kind, stage, hardware, "gradients") for stage, kind in stages)
        updates = (
            self._exchange(target, kind, stage, hardware, "update")
            + self._gathers(target, kind, stage, hardware, taken[stage])
            + self._update(target, kind, hardware)
            for stage, kind in stages
        )
        if target.overlap:
            window = max(sum(t for (d, _), t in one.items() if d == BACKWARD) for one in taken)
            exposed = max(0.0, exposed - window)
        update = max(updates)
        busy = [target.microbatches * sum(one.values()) for one in taken]
        busiest = max(range(layout.pp), key=busy.__getitem__)
        communication = target.microbatches * sum(wait for _, wait in durations[busiest].values())
        total = pipeline + exposed + update
        memory = [
            self._memory(target, stage, hardware)
            for stage in sorted({0, min(1, layout.pp - 1), layout.pp - 1})
        ]
        flags, sizes = self._record(MIDDLE).flags, target
        peak = hardware.flops.get(str(flags.get("params_dtype")), hardware.flops["bfloat16"])
        mfu = sizes.model_flops / (total * layout.world_size * peak) if sizes.model_flops else None
        _, exact, categories = max(memory, key=lambda one: one[1])
        return Estimate(
            seconds=total,
            compute=busy[busiest] - communication,
            communication=communication,
            waiting=pipeline - busy[busiest],
            gradients=exposed,
            update=update,
            bubble=1.0 - sum(busy) / (pipeline * layout.pp) if pipeline else 0.0,
            exact=exact,
            needed=max(needed for needed, _, _ in memory),
            categories=categories,
            mfu=mfu,
            source=COMPOSED,
            incomplete=tuple(self._record(MIDDLE).incomplete),
        )

    def _record(self, kind: int) -> RankRecord:
        return next(iter(self.parts.values()))[kind].record

    def _of_stage(
        self, target: Target, stage: int, hardware: Hardware
    ) -> dict[tuple[str, int], tuple[float, float]]:
        """Return the seconds of a pass by direction and chunk, and those of communication among them."""
        return {
            (direction, chunk): self._pass(target, kind, direction, hardware)
            for chunk, kind in enumerate(target.chunks(stage))
            for direction in (FORWARD, BACKWARD)
        }

    def _pass(self, target: Target, kind: int, direction: str, hardware: Hardware) -> tuple[float, float]:
        layers = target.layers // (target.layout.pp * target.layout.vpp)
        microbatches = min(target.microbatches, 64)
        crossing = tuple(target.layout.sizes().items())
        key = (kind, direction, layers, microbatches, target.micro_batch_size, crossing, hardware.path)
        if key not in self._durations:
            total = wait = 0.0
            for part, sign in MADE_OF[kind]:
                size = target.micro_batch_size
                computed = self._computed(part, direction, layers, microbatches, size, hardware)
                sent = self._sent(target, part, direction, layers, microbatches, hardware)
                total, wait = total + sign * (computed + sent), wait + sign * sent
            self._durations[key] = (total, wait)
        return self._durations[key]

    def _computed(
        self, part: int, direction: str, layers: int, microbatches: int, size: int, hardware: Hardware
    ) -> float:
        """Return the seconds of the operators of one pass."""
        key = (part, direction, layers, microbatches, size, hardware.path)
        if key not in self._known:
            self._known[key] = self._operators(part, direction, layers, microbatches, size, hardware)
        return self._known[key]

    def _operators(
        self, part: int, direction: str, layers: int, microbatches: int, size: int, hardware: Hardware
    ) -> float:
        sizes = tuple(self.parts)
        works = {one: self.parts[one][part].work(direction, layers, microbatches) for one in sizes}
        if size not in sizes and len(sizes) > 1:
            low, high = sizes[0], sizes[-1]
            with suppress(NotComposable):
                work = work_between(works[low], works[high], (size - low) / (high - low))
                return seconds(work, hardware)
        return between(sizes, size, lambda one: seconds(works[one], hardware))

    def _sent(
        self, target: Target, part: int, direction: str, layers: int, microbatches: int, hardware: Hardware
    ) -> float:
        """Return the seconds of the collectives of one pass."""

        def of(size: int) -> float:
            found = self.parts[size][part]
            return sum(
                communication_seconds(
                    operation, self._group(target, found.record, group, target.layout), calls, given, hardware
                )
                for (group, operation, _, phase), (calls, given) in found.traffic(
                    layers, microbatches
                ).items()
                if phase == direction and operation not in POINT_TO_POINT
            )

        return between(tuple(self.parts), target.micro_batch_size, of)

    def _transfer(self, target: Target, hardware: Hardware) -> float:
        """Return the seconds of one message between pipeline stages."""
        if target.layout.pp == 1:
            return 0.0

        def of(size: int) -> float:
            found = self.parts[size][MIDDLE]
            times = []
            for (group, operation, _, _), (calls, given) in found.traffic(1, 1).items():
                if operation in POINT_TO_POINT and calls:
                    ranks = self._group(target, found.record, group, target.layout).ranks
                    crosses = ranks.crosses(hardware.devices)
                    times.append(hardware.latency(crosses) + given / calls / hardware.bandwidth(crosses))
            return max(times, default=0.0)

        return between(tuple(self.parts), target.micro_batch_size, of)

    def _message(self, target: Target) -> float:
        """Return the bytes of one message between pipeline stages."""

        def of(size: int) -> float:
            sent = self.parts[size][MIDDLE].traffic(1, 1).items()
            one = (
                given / calls for (_, name, _, _), (calls, given) in sent if name in POINT_TO_POINT and calls
            )
            return max(one, default=0.0)

        return between(tuple(self.parts), target.micro_batch_size, of)

    def _gathers(
        self,
        target: Target,
        kind: int,
        stage: int,
        hardware: Hardware,
        taken: Mapping[tuple[str, int], float],
    ) -> float:
        """Return the seconds of the gather of parameters that forward passes do not hide."""
        found = self._exchange(target, kind, stage, hardware, "update", gathers=True)
        hidden = sum(t for (d, _), t in taken.items() if d == FORWARD) if target.overlap_gather else 0.0
        return max(0.0, found - hidden)

    def _exchange(
        self, target: Target, kind: int, stage: int, hardware: Hardware, wanted: str, *, gathers: bool = False
    ) -> float:
        """Return the seconds of what is exchanged once a step; gathers of parameters are asked for alone."""
        key = (target.layout, target.layers, kind, stage, wanted, gathers, hardware.path)
        if key not in self._known:
            self._known[key] = self._exchanged(target, kind, stage, hardware, wanted, gathers)
        return self._known[key]

    def _exchanged(
        self, target: Target, kind: int, stage: int, hardware: Hardware, wanted: str, gathers: bool
    ) -> float:
        total = 0.0
        for part, sign in MADE_OF[kind]:
            found = next(iter(self.parts.values()))[part]
            record = found.record
            for (group, operation, _, phase), (calls, given) in found.once().items():
                if phase != wanted or is_gather(operation, phase) != gathers:
                    continue
                way = self._along(record, group)
                placed_group = self._group(target, record, group, target.layout, stage)
                if way.sharded:
                    kind_of = "expert" if way.expert and found.elements("expert") else "dense"
                    scale = self._elements(target, kind, kind_of) / max(1.0, found.elements(kind_of))
                    if kind == WHOLE and (part, sign) != MADE_OF[WHOLE][0]:
                        continue  # all elements of the stage are counted with the first part
                    if operation.startswith("all_gather"):
                        scale *= record.groups[group].ranks.size / max(1, placed_group.ranks.size)
                    given *= scale
                    sign_here = 1
                else:
                    sign_here = sign
                total += sign_here * communication_seconds(operation, placed_group, calls, given, hardware)
        return max(0.0, total)

    def _update(self, target: Target, kind: int, hardware: Hardware) -> float:
        shard = self._static(target, kind)["optimizer state"] / 8
        return hardware.update_seconds(UPDATE_BYTES * shard)

    def _elements(self, target: Target, kind: int, of: str) -> float:
        """Return the dense or expert elements of a stage."""
        parts = next(iter(self.parts.values()))
        per_layer = parts[MIDDLE].elements(of) / LAYERS
        found = per_layer * target.layers / target.layout.pp
        embedding = parts[FIRST].elements(of) - parts[MIDDLE].elements(of)
        head = parts[LAST].elements(of) - parts[MIDDLE].elements(of)
        if kind in (FIRST, WHOLE):
            found += embedding
        if kind in (LAST, WHOLE):
            found += head
        return found - (min(embedding, head) if kind == WHOLE and self._tied() else 0.0)

    def _tied(self) -> bool:
        return not self._record(MIDDLE).flags.get("untie_embeddings_and_output_weights")

    def _static(self, target: Target, kind: int) -> dict[str, float]:
        """Return the bytes of parameters, gradients and optimizer state of a stage."""
        parts = next(iter(self.parts.values()))
        found = {}
        for category in STATIC:
            values = [part.static(category) for part in parts]
            if category in SHARDED:
                unit = values[MIDDLE] / max(1.0, self._shard(parts[MIDDLE].record, parts[MIDDLE].elements))
                found[category] = unit * self._shard_of_stage(target, kind)
                continue
            total = values[MIDDLE] / LAYERS * target.layers / target.layout.pp
            embedding, head = values[FIRST] - values[MIDDLE], values[LAST] - values[MIDDLE]
            total += embedding if kind in (FIRST, WHOLE) else 0.0
            total += head if kind in (LAST, WHOLE) else 0.0
            if kind == WHOLE and self._tied():
                total -= min(embedding, head)
            found[category] = total
        return found

    def _shard(self, record: RankRecord, elements: Any) -> float:
        """Return the elements whose optimizer state a rank of the small pipeline keeps."""
        layout = record.layout
        return self._sharded(elements("dense"), elements("expert"), layout, record)

    def _shard_of_stage(self, target: Target, kind: int) -> float:
        dense, expert = (self._elements(target, kind, of) for of in ("dense", "expert"))
        return self._sharded(dense, expert, target.layout, self._record(MIDDLE))

    def _sharded(self, dense: float, expert: float, layout: Layout, record: RankRecord) -> float:
        if not record.flags.get("use_distributed_optimizer"):
            return dense + expert
        return dense / layout.optimizer_shards + expert / layout.expert_dp

    def _memory(
        self, target: Target, stage: int, hardware: Hardware
    ) -> tuple[float, float, dict[str, float]]:
        """Return the bytes that a device of a stage must have, those of tensors, and these by category."""
        layout, kind = target.layout, target.kind(stage)
        static = self._static(target, kind)
        alive = in_flight(layout, stage, target.microbatches)
        layers = target.layers // (layout.pp * layout.vpp)
        moving: dict[str, float] = {}
        middle = self._moving(target, MIDDLE, layers, alive)
        if layout.vpp == 1:
            for part, sign in MADE_OF[kind]:
                for name, size in self._moving(target, part, layers, alive).items():
                    moving[name] = moving.get(name, 0.0) + sign * size
        else:
            moving = middle
            if kind != MIDDLE:
                # One of the chunks has the embedding or the head.
                own = -(-alive // layout.vpp)
                with_it = self._moving(target, kind, layers, own)
                without = self._moving(target, MIDDLE, layers, own)
                moving = {
                    name: size + with_it.get(name, 0.0) - without.get(name, 0.0)
                    for name, size in moving.items()
                }
            # The interleaved schedule keeps what a chunk has sent until its backward pass.
            moving["activations"] = moving.get("activations", 0.0) + alive * self._message(target)
        schedule = {**{name: size for name, size in static.items() if size}, **moving}
        parts = next(iter(self.parts.values()))
        middle_part = parts[MIDDLE]
        grown = self._shard_of_stage(target, kind) / max(
            1.0, self._shard(middle_part.record, middle_part.elements)
        )
        update = {**static, "other": middle_part.updating * grown}
        categories = max((schedule, update), key=lambda one: sum(one.values()))
        exact = sum(categories.values())
        # The allocator's rounding and the groups in use are those of the nearest stage that was run.
        like = parts[LAST if kind == WHOLE else kind].record
        used = hardware.per_group * self._used_groups(like, layout)
        return exact * like.cost.get("reserved_ratio", 1.0) + hardware.context + used, exact, categories

    def _used_groups(self, record: RankRecord, layout: Layout) -> int:
        """Return how many groups of a rank communicate in another layout."""
        calls = (*(call for run in record.runs[:1] for call in run.calls), *record.update.calls)
        used = {call.group for call in calls}
        if layout.pp == 1:
            used = {group for group in used if not self._between_stages(record, group)}
        return len(used)

    def _between_stages(self, record: RankRecord, group: int) -> bool:
        way = self._along(record, group)
        return way.ends or way.dimensions == ("pp",)

    def _moving(self, target: Target, part: int, layers: int, alive: int) -> dict[str, float]:
        sizes = tuple(self.parts)
        found = {size: self.parts[size][part].activations(layers, alive) for size in sizes}
        names = dict.fromkeys(name for one in found.values() for name in one)

        def of(name: str) -> float:
            return between(sizes, target.micro_batch_size, lambda size: found[size].get(name, 0.0))

        return {name: of(name) for name in names}

    def _along(self, record: RankRecord, group: int) -> Along:
        key = (record.rank, group)
        if key not in self._groups:
            self._groups[key] = along(record, record.groups[group])
        return self._groups[key]

    def _group(
        self, target: Target, record: RankRecord, group: int, layout: Layout, stage: int | None = None
    ) -> Group:
        """Return a group of the small pipeline as the same stage of the target has it."""
        way, given = self._along(record, group), record.groups[group]
        if stage is None:
            stage = min(record.stage, layout.pp - 1)
        return replace(given, ranks=placed(way, record, given, layout, layout.rank({"pp": stage})))


__all__ = ["Cell", "NotComposable", "Target"]
