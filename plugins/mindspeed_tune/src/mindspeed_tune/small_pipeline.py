"""Numbers of one layer, of the embedding and of the head, from dry runs of a small pipeline.

Three stages of three layers each tell them apart: the middle one has layers alone, the first one an embedding
besides, the last one a head. Every number of a stage is linear in its layers, its micro-batches and those in
flight; two micro-batch sizes tell what the size changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mindspeed_megatron.instruments.operations import MATRIX
from mindspeed_tune.record import Call, RankRecord, Run

STAGES, LAYERS, MICROBATCHES = 3, 3, 3
"""Stages of the small pipeline, layers of each of them, and micro-batches of a step: enough for passes
over one and two of each."""
FIRST, MIDDLE, LAST = range(STAGES)
STATIC = ("parameters", "buffers", "gradients", "main parameters", "optimizer state")
SHARDED = ("main parameters", "optimizer state")
Numbers = dict[Any, float]
Traffic = dict[tuple[int, str, str, str], tuple[float, float]]


class NotComposable(ValueError):
    """The numbers of other pipelines do not follow from these dry runs; the message says why."""


@dataclass(frozen=True)
class Part:
    """One stage of the small pipeline with one micro-batch size.

    Attributes:
        record: of its rank.
        one: the pass over one micro-batch and one layer.
        more: over two micro-batches and one layer.
        deeper: over one micro-batch and two layers.
    """

    record: RankRecord
    one: Run
    more: Run
    deeper: Run

    @classmethod
    def of(cls, record: RankRecord) -> Part:
        """Return the part of a record.

        Raises:
            NotComposable: its layers are not all of one kind, or not all of its passes were made.
        """
        if len(record.stages) != STAGES or len({kind for s in record.stages for kind in s.layers}) != 1:
            raise NotComposable("the model has layers of several kinds")
        if any(stage.predictions for stage in record.stages):
            raise NotComposable("the model predicts several tokens")
        passes = {(run.microbatches, sum(run.layers.values())): run for run in record.runs}
        try:
            return cls(record, passes[1, 1], passes[2, 1], passes[1, 2])
        except KeyError:
            raise NotComposable("its layers cannot be told apart: all of them have to run") from None

    def work(self, direction: str, layers: int, microbatches: int) -> Numbers:
        """Return the operations of a pass over so many layers, averaged over the micro-batches."""
        key = f"0 {direction}"
        return self._average([run.work.get(key, {}) for run in self._runs], layers, microbatches)

    def traffic(self, layers: int, microbatches: int) -> Traffic:
        """Return the calls and bytes of a micro-batch by group, operation, dtype and phase."""
        counts, sizes = zip(*self._counted_passes)
        calls = self._average(counts, layers, microbatches)
        bytes_ = self._average(sizes, layers, microbatches)
        return {key: (calls[key], bytes_[key]) for key in calls}

    def once(self) -> Traffic:
        """Return the calls and bytes behind the last micro-batch and of the update."""
        return self._counted_once

    @cached_property
    def _counted_passes(self) -> list[tuple[Numbers, Numbers]]:
        # Thousands of layouts ask for them.
        return [_counted(run.calls) for run in self._runs]

    @cached_property
    def _counted_once(self) -> Traffic:
        counts, sizes = _counted((*self.one.calls, *self.record.update.calls), once=True)
        return {key: (counts[key], sizes[key]) for key in counts}

    def activations(self, layers: int, in_flight: int) -> dict[str, float]:
        """Return the bytes by category at the peak that are no parameters, gradients or optimizer state."""
        one, more, deeper = (_moving(run.peak.categories) for run in self._runs)
        # The last stage keeps one micro-batch, however many there are: the second one is the steady state.
        further = in_flight - 1 if self.more.in_flight > 1 else 1
        names = dict.fromkeys((*one, *more, *deeper))
        return {
            name: max(
                0.0,
                one.get(name, 0.0)
                + further * (more.get(name, 0.0) - one.get(name, 0.0))
                + (layers - 1) * in_flight * (deeper.get(name, 0.0) - one.get(name, 0.0)),
            )
            for name in names
        }

    def static(self, category: str) -> float:
        """Return the bytes of a category that exist from the first update on."""
        held = self.one.peak.categories.get(category, 0.0)
        return max(held, self.record.update.after.get(category, 0.0)) if category in SHARDED else held

    @property
    def updating(self) -> float:
        """Return the bytes that the update takes for its own time."""
        return sum(_moving(self.record.update.peak.categories).values())

    def elements(self, kind: str) -> float:
        """Return the elements of its dense or expert parameters."""
        return self.record.sizes.get(f"{kind}_elements", 0.0)

    @property
    def _runs(self) -> tuple[Run, Run, Run]:
        return (self.one, self.more, self.deeper)

    @staticmethod
    def _average(values: Any, layers: int, microbatches: int) -> Numbers:
        one, more, deeper = values
        found = {}
        for key in dict.fromkeys((*one, *more, *deeper)):
            first = one.get(key, 0.0)
            steady = (first + (microbatches - 1) * (more.get(key, 0.0) - first)) / microbatches
            found[key] = max(0.0, steady + (layers - 1) * (deeper.get(key, 0.0) - first))
        return found


def between(sizes: tuple[int, ...], wanted: int, of: Callable[[int], float]) -> float:
    """Return a number at a micro-batch size, linear in those that were run."""
    if wanted in sizes or len(sizes) == 1:
        return of(wanted if wanted in sizes else sizes[0])
    low, high = sizes[0], sizes[-1]
    return of(low) + (wanted - low) / (high - low) * (of(high) - of(low))


def work_between(one: Mapping[str, float], other: Mapping[str, float], share: float) -> Numbers:
    """Return operations at another micro-batch size: products of other shapes, and more bytes.

    Args:
        one: at the smaller size.
        other: at the larger size.
        share: 0 at the smaller size, 1 at the larger one.

    Raises:
        NotComposable: the products of the two cannot be told apart.
    """
    found: Numbers = {}
    for key in dict.fromkeys((*one, *other)):
        if not key.startswith(MATRIX):
            first = one.get(key, 0.0)
            found[key] = max(0.0, first + share * (other.get(key, 0.0) - first))
    for low, high, count in _pairs(one, other):
        kind, dtype, *shape = low.split()
        grown = (round(int(a) + share * (int(b) - int(a))) for a, b in zip(shape, high.split()[2:]))
        name = " ".join((kind, dtype, *map(str, grown)))
        found[name] = found.get(name, 0.0) + count
    return found


def _pairs(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """Return the products at two sizes that are the same product, with how many there are.

    The size is in one of the three lengths, or in none. Different products of a shape at one size may have
    two shapes at the other.

    Raises:
        NotComposable: some product has no other.
    """
    left = {key: count for key, count in one.items() if key.startswith(MATRIX) and count}
    wanted = {key: count for key, count in other.items() if key.startswith(MATRIX) and count}
    partners = {high: [low for low in left if _same_product(low, high)] for high in wanted}
    found: list[tuple[str, str, float]] = []
    while wanted:
        # Who has the least choice chooses first.
        high = min(wanted, key=lambda key: sum(left.get(low, 0.0) > _NOTHING for low in partners[key]))
        count = wanted.pop(high)
        for low in partners[high]:
            taken = min(count, left.get(low, 0.0))
            if taken > _NOTHING:
                found.append((low, high, taken))
                left[low] -= taken
                count -= taken
        if count > _NOTHING:
            raise NotComposable("another micro-batch size runs other products")
    if any(count > _NOTHING for count in left.values()):
        raise NotComposable("another micro-batch size runs other products")
    return found


_NOTHING = 1e-6


def _same_product(low: str, high: str) -> bool:
    """Return whether two shapes differ in one length at most, which grows."""
    first, second = low.split(), high.split()
    grown = [(int(a), int(b)) for a, b in zip(first[2:], second[2:]) if a != b]
    return first[:2] == second[:2] and len(grown) <= 1 and all(b > a for a, b in grown)


def slim(record: RankRecord) -> RankRecord:
    """Return a record without what only reports of its own show: stacks, modules and largest tensors."""

    def without(call: Call) -> Call:
        return replace(call, stack=())

    runs = tuple(
        replace(
            run,
            peak=replace(run.peak, modules={}, largest=(), stack=()),
            calls=tuple(map(without, run.calls)),
            steps=(),
        )
        for run in record.runs
    )
    update = replace(
        record.update,
        peak=replace(record.update.peak, modules={}, largest=(), stack=()),
        calls=tuple(map(without, record.update.calls)),
    )
    return replace(record, runs=runs, update=update, answers=(), reliefs=())


_ONCE = ("gradients", "update", "losses")


def _counted(calls: Any, once: bool = False) -> tuple[Numbers, Numbers]:
    counts: Numbers = {}
    sizes: Numbers = {}
    for call in calls:
        if (call.phase in _ONCE) == once:
            key = (call.group, call.operation, call.dtype, call.phase)
            counts[key] = counts.get(key, 0.0) + 1
            sizes[key] = sizes.get(key, 0.0) + call.bytes
    return counts, sizes


def _moving(categories: Mapping[str, float]) -> dict[str, float]:
    return {name: size for name, size in categories.items() if name not in STATIC}
