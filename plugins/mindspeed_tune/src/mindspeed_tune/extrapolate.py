"""Numbers of a whole step from passes over one and two micro-batches, one and two layers of each kind.

Layers of one kind are identical, and so are micro-batches: every number of a step is linear in the layers of
each kind and in the micro-batches, and memory is linear in the layers times the micro-batches in flight. What
is built once (parameters, buffers, optimizer state) is never extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_tune.record import Call, RankRecord, Run
from mindspeed_tune.schedules import in_flight

Numbers = Mapping[str, float]
Traffic = tuple[int, str, str, str]
_ONCE = ("gradients", "update", "losses")


@dataclass(frozen=True)
class Whole:
    """A step of one rank with all its layers and micro-batches.

    Attributes:
        peak: bytes by category at the peak of forward and backward.
        modules: bytes of activations at that peak by module.
        work: operations of one pass by chunk and direction, averaged over micro-batches.
        traffic: calls and input bytes by ``group index``, operation, dtype and phase.
        exact: nothing was extrapolated.
    """

    peak: Numbers
    modules: Numbers
    work: Mapping[str, Numbers]
    traffic: Mapping[Traffic, tuple[float, float]]
    exact: bool


def whole(record: RankRecord, stage: int | None = None) -> Whole:
    """Extrapolate a rank's record to its whole step.

    Args:
        record: of the rank.
        stage: a pipeline stage with the same contents, which holds other numbers of micro-batches; by default
            the rank's own.

    Raises:
        ValueError: its passes do not determine the step.
    """
    runs = record.runs
    layers = record.stages[record.stage].layers
    place = record.stage if stage is None else stage
    full = in_flight(record.layout, place, record.microbatches, record.microbatch_group)
    alive = _Linear(runs, layers, full, lambda run: run.in_flight)
    passed = _Linear(runs, layers, record.microbatches, lambda run: run.microbatches)
    directions = sorted({name for run in runs for name in run.work})
    work = {
        name: {
            quantity: value / record.microbatches
            for quantity, value in passed.keyed([run.work.get(name, {}) for run in runs]).items()
        }
        for name in directions
    }
    # What follows the last micro-batch happens once, however many there were.
    once = _Linear(runs, layers, 1, lambda run: 1)
    traffic: dict[Traffic, tuple[float, float]] = {}
    for line, wanted in ((passed, False), (once, True)):
        added = [_added(call for call in run.calls if (call.phase in _ONCE) == wanted) for run in runs]
        calls, sizes = (
            line.keyed([{key: pair[index] for key, pair in one.items()} for one in added]) for index in (0, 1)
        )
        traffic |= {key: (calls[key], sizes[key]) for key in calls}
    for key, (count, size) in _added(record.update.calls).items():
        before = traffic.get(key, (0.0, 0.0))
        traffic[key] = (before[0] + count, before[1] + size)
    return Whole(
        peak=alive.numbers(lambda run: run.peak.categories),
        modules=alive.numbers(lambda run: run.peak.modules),
        work=work,
        traffic=traffic,
        exact=any(not run.layers and run.microbatches == record.microbatches for run in runs),
    )


class _Linear:
    """A number as a function of layers and of a count of micro-batches, from the passes that were made."""

    def __init__(
        self, runs: Sequence[Run], layers: Mapping[str, int], target: int, count: Callable[[Run], int]
    ) -> None:
        self.runs, self.layers, self.target, self.count = runs, layers, target, count
        self.base = self._base()

    def numbers(self, of: Callable[[Run], Numbers]) -> dict[str, float]:
        found: dict[str, float] = self.keyed([of(run) for run in self.runs])
        return found

    def keyed(self, values: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        """Return every number of the whole step; ``values`` has those of each pass."""
        keys = dict.fromkeys(key for numbers in values for key in numbers)
        weights = self._weights()
        return {
            key: max(0.0, sum(w * numbers.get(key, 0.0) for w, numbers in zip(weights, values) if w))
            for key in keys
        }

    def _base(self) -> int:
        """Return the index of the pass that others are compared with: fewest layers, then micro-batches."""
        return min(
            range(len(self.runs)),
            key=lambda index: (sum(self.runs[index].layers.values()), self.runs[index].microbatches),
        )

    def _weights(self) -> list[float]:
        """Return the factor of each pass in a number of the whole step.

        A number is ``a + c (e + sum(n_k l_k))`` with ``c`` micro-batches and ``n_k`` layers of kind ``k``.
        """
        weights = [0.0] * len(self.runs)
        whole_layers = self._whole_layers()
        exact = [
            index
            for index, run in enumerate(self.runs)
            if self.count(run) == self.target and (not run.layers or dict(run.layers) == self.layers)
        ]
        if exact:
            weights[exact[0]] = 1.0
            return weights
        base = self.runs[self.base]
        weights[self.base] = 1.0
        count = self.count(base)
        for kind in () if whole_layers else self.layers:
            further = self.layers[kind] - base.layers.get(kind, 0)
            if not further:
                continue
            index = self._with_another(kind)
            here = self.runs[index]
            per_layer = further / (here.layers[kind] - base.layers[kind]) * self.target / self.count(here)
            weights[index] += per_layer
            weights[self.base] -= per_layer
        steady = self._steady(base)
        if steady is not None:
            weights[steady] += 1.0
            weights[self.base] -= 1.0
        if count != self.target:
            further_run = self._with_more()
            if further_run is not None:
                share = (self.target - count) / (self.count(self.runs[further_run]) - count)
                weights[further_run] += share
                weights[self.base] -= share
        return weights

    def _steady(self, base: Run) -> int | None:
        """Return a pass over more micro-batches that keeps as many: beyond the first, more is alive."""
        for index, run in enumerate(self.runs):
            more = run.microbatches > base.microbatches and dict(run.layers) == dict(base.layers)
            if more and self.count(run) == self.count(base):
                return index
        return None

    def _whole_layers(self) -> bool:
        base = self.runs[self.base]
        return not base.layers or dict(base.layers) == self.layers

    def _with_another(self, kind: str) -> int:
        base = self.runs[self.base]
        for index, run in enumerate(self.runs):
            same = run.microbatches == base.microbatches
            others = all(run.layers.get(k) == n for k, n in base.layers.items() if k != kind)
            if same and others and run.layers.get(kind, 0) > base.layers[kind]:
                return index
        raise ValueError(f"no pass has another layer of kind {kind!r}")

    def _with_more(self) -> int | None:
        base = self.runs[self.base]
        for index, run in enumerate(self.runs):
            if dict(run.layers) == dict(base.layers) and self.count(run) != self.count(base):
                return index
        if any(run.microbatches != base.microbatches for run in self.runs):
            return None  # the count is the same for any number of micro-batches
        raise ValueError(f"no pass has another number of micro-batches than {base.microbatches}")


def _added(calls: Iterable[Call]) -> dict[Traffic, tuple[float, float]]:
    """Return how many calls there are of each kind, and their bytes."""
    found: dict[Traffic, tuple[float, float]] = {}
    for call in calls:
        key = (call.group, call.operation, call.dtype, call.phase)
        count, size = found.get(key, (0.0, 0.0))
        found[key] = (count + 1, size + call.bytes)
    return found
