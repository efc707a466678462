"""The plan of a launch, made of the records of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_tune.extrapolate import Whole, whole
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.kinds import Kind, kinds_of
from mindspeed_tune.layout import RANKS_PER_NODE
from mindspeed_tune.memory_plan import MemoryPlan, memory_plan
from mindspeed_tune.nearest_fit import nearest_fit
from mindspeed_tune.order_check import OrderCheck, check_order
from mindspeed_tune.quantities import size
from mindspeed_tune.record import Answer, Group, RankRecord
from mindspeed_tune.step_plan import StepPlan, step_plan
from mindspeed_tune.traffic import Compared, compare


@dataclass(frozen=True)
class KindPlan:
    """One kind of ranks.

    Attributes:
        kind: which ranks.
        record: of its representative.
        step: its whole step.
        memory: of each of its pipeline stages, in order.
        forms: closed forms of communication beside what was counted.
    """

    kind: Kind
    record: RankRecord
    step: Whole
    memory: tuple[MemoryPlan, ...]
    forms: tuple[Compared, ...]

    @property
    def fullest(self) -> MemoryPlan:
        """Return the memory of its fullest stage."""
        return max(self.memory, key=lambda one: one.needed)


@dataclass(frozen=True)
class GroupPlan:
    """A process group of the launch, as one of its ranks sees it.

    Attributes:
        group: name and ranks.
        of_rank: the rank whose group it is.
        crosses_nodes: its ranks are on several nodes.
        calls: of a step.
        bytes: inputs of them.
        operations: calls and bytes by operation and dtype.
    """

    group: Group
    of_rank: int
    crosses_nodes: bool
    calls: float
    bytes: float
    operations: dict[str, tuple[float, float]]

    @property
    def used(self) -> bool:
        """Return whether anything is communicated in it."""
        return self.calls > 0


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that is known about a launch before it starts.

    Attributes:
        command: the training command.
        kinds: of ranks, by pipeline stage.
        groups: of the representatives, in order of creation; one for every group of a name and ranks.
        order: the outcome of the order check.
        step: the time of a step.
        hardware: None where it was not given.
        devices: ranks of a node.
        incomplete: features that are not exactly counted, with the reason.
        answers: numbers that runs read from tensors without values.
        records: of all ranks that were run.
        differing: ranks whose memory differs from that of their kind's representative, with the bytes.
    """

    command: tuple[str, ...]
    kinds: tuple[KindPlan, ...]
    groups: tuple[GroupPlan, ...]
    order: OrderCheck
    step: StepPlan
    hardware: Hardware | None
    devices: int
    incomplete: dict[str, str]
    answers: tuple[Answer, ...]
    records: tuple[RankRecord, ...]
    differing: dict[int, float]

    @property
    def problems(self) -> list[str]:
        """Return what is wrong with the launch, a paragraph each: why the exit status is 1."""
        found = [self._shortage(kind) for kind in self.kinds if not kind.fullest.fits]
        orders = (*map(str, self.order.differences), *self.order.waiting)
        return found + [f"order of calls: {problem}" for problem in orders]

    @property
    def ok(self) -> bool:
        """Return whether every kind fits and all orders agree."""
        return not self.problems

    @property
    def fullest(self) -> KindPlan:
        """Return the kind that needs most."""
        return max(self.kinds, key=lambda kind: kind.fullest.needed)

    def stages(self) -> list[MemoryPlan]:
        """Return the memory of every pipeline stage, in order."""
        return sorted((one for kind in self.kinds for one in kind.memory), key=lambda one: one.stage)

    def _shortage(self, kind: KindPlan) -> str:
        memory = kind.fullest
        assert self.hardware is not None
        assert memory.capacity is not None
        assert memory.headroom is not None
        text = (
            f"{kind.kind.name}: {size(memory.needed)} do not fit into the {size(memory.capacity)} of "
            f"{self.hardware.name}: {size(-memory.headroom)} are missing on {kind.kind.count:,} "
            f"rank{'s' if kind.kind.count > 1 else ''}"
        )
        nearest, smallest = nearest_fit(kind.record, memory, self.devices)
        if nearest is not None:
            return (
                f"{text}; the nearest layout that fits, estimated at {size(nearest.needed)} on "
                f"{nearest.world_size:,} ranks: {nearest.flags}"
            )
        return (
            f"{text}; no layout of {smallest.world_size:,} ranks fits: the smallest needs an estimated "
            f"{size(smallest.needed)} ({smallest.flags})"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the plan for a JSON file."""
        layout = self.records[0].layout
        return {
            "ok": self.ok,
            "problems": self.problems,
            "command": list(self.command),
            "layout": {**layout.as_json(), "dp": layout.dp, "expert_dp": layout.expert_dp},
            "microbatches": self.records[0].microbatches,
            "features": list(self.records[0].features),
            "incomplete": self.incomplete,
            "hardware": None if self.hardware is None else asdict(self.hardware),
            "kinds": [_kind_json(kind) for kind in self.kinds],
            "groups": [_group_json(one) for one in self.groups],
            "order_check": {
                "pairs": self.order.pairs,
                "calls": self.order.compared,
                "unchecked_groups": list(self.order.unchecked),
                "differences": [asdict(one) for one in self.order.differences],
                "waiting": list(self.order.waiting),
            },
            "step": {
                "seconds": self.step.seconds,
                "bubble": self.step.timeline.bubble,
                "mfu": self.step.mfu,
                "tokens": self.step.tokens,
                "model_flops": self.step.model_flops,
                "compute_seconds": self.step.compute,
                "communication_seconds": self.step.communication,
                "gradient_seconds": self.step.gradients,
                "update_seconds": self.step.update,
            },
            "answers": [asdict(answer) for answer in self.answers],
            "ranks_run": [record.rank for record in self.records],
            "differing_ranks": self.differing,
            "cost": {
                "cpu_seconds": sum(record.cost.get("cpu_seconds", 0.0) for record in self.records),
                "peak_bytes": max(record.cost.get("peak_bytes", 0.0) for record in self.records),
            },
        }


def make_plan(
    command: Sequence[str],
    records: Iterable[RankRecord],
    hardware: Hardware | None = None,
    ranks_per_node: int | None = None,
) -> LaunchPlan:
    """Make the plan of a launch.

    Args:
        command: the training command.
        records: of the ranks that were run, the representative of every kind among them.
        hardware: of the cluster.
        ranks_per_node: by default those of the hardware, or 8.
    """
    ranks = tuple(sorted(records, key=lambda record: record.rank))
    by_rank = {record.rank: record for record in ranks}
    layout, stages = ranks[0].layout, ranks[0].stages
    devices = ranks_per_node or (hardware.devices if hardware is not None else RANKS_PER_NODE)
    kinds: list[KindPlan] = []
    per_stage: dict[int, tuple[RankRecord, Whole]] = {}
    for kind in kinds_of(layout, stages):
        record = by_rank.get(kind.representative) or _of_kind(ranks, kind)
        if record is None:
            continue
        steps = {stage: whole(record, stage) for stage in kind.stages}
        used = len({group for group, *_ in steps[kind.stages[0]].traffic})
        memory = [memory_plan(record, steps[stage], stage, hardware, used) for stage in kind.stages]
        step = steps[record.stage]
        kinds.append(KindPlan(kind, record, step, tuple(memory), tuple(compare(record, step.traffic))))
        per_stage |= dict.fromkeys(kind.stages, (record, step))
    known = [per_stage.get(stage, next(iter(per_stage.values()))) for stage in range(layout.pp)]
    return LaunchPlan(
        command=tuple(command),
        kinds=tuple(kinds),
        groups=tuple(_groups(kinds, devices)),
        order=check_order(ranks),
        step=step_plan([record for record, _ in known], [step for _, step in known], hardware),
        hardware=hardware,
        devices=devices,
        incomplete={name: reason for record in ranks for name, reason in record.incomplete.items()},
        answers=_answers(ranks),
        records=ranks,
        differing=_differing(kinds, ranks),
    )


def _of_kind(records: Sequence[RankRecord], kind: Kind) -> RankRecord | None:
    return next((record for record in records if record.stage in kind.stages), None)


def _groups(kinds: Sequence[KindPlan], devices: int) -> list[GroupPlan]:
    found: dict[tuple[str, Any], GroupPlan] = {}
    for kind in kinds:
        for index, group in enumerate(kind.record.groups):
            operations: dict[str, tuple[float, float]] = {}
            for (number, operation, dtype, _), (calls, given) in kind.step.traffic.items():
                if number == index:
                    name = f"{operation} {dtype}"
                    before = operations.get(name, (0.0, 0.0))
                    operations[name] = (before[0] + calls, before[1] + given)
            key = (group.name, group.ranks)
            if key in found and found[key].used:
                continue
            found[key] = GroupPlan(
                group,
                kind.record.rank,
                group.ranks.crosses(devices),
                sum(calls for calls, _ in operations.values()),
                sum(given for _, given in operations.values()),
                operations,
            )
    return list(found.values())


def _answers(records: Sequence[RankRecord]) -> tuple[Answer, ...]:
    """Return the answers of all ranks, each place and value once, with its most frequent count."""
    found: dict[tuple[str, int, str], Answer] = {}
    for record in records:
        for answer in record.answers:
            key = (answer.file, answer.line, answer.value)
            if key not in found or found[key].count < answer.count:
                found[key] = answer
    return tuple(found[key] for key in sorted(found))


def _differing(kinds: Sequence[KindPlan], records: Sequence[RankRecord]) -> dict[int, float]:
    """Return ranks that keep other bytes than their kind: where a division has a remainder."""
    found: dict[int, float] = {}
    for record in records:
        for kind in kinds:
            if record.stage in kind.kind.stages and record.rank != kind.record.rank:
                difference = sum(record.static.values()) - sum(kind.record.static.values())
                if difference:
                    found[record.rank] = difference
    return found


def _kind_json(kind: KindPlan) -> dict[str, Any]:
    return {
        "name": kind.kind.name,
        "stages": list(kind.kind.stages),
        "ranks": kind.kind.ranks.as_json(),
        "count": kind.kind.count,
        "representative": kind.kind.representative,
        "exact": kind.step.exact,
        "host_bytes": kind.record.host_bytes,
        "memory": [
            {
                **{name: value for name, value in asdict(one).items() if name != "largest"},
                "needed": one.needed,
                "headroom": one.headroom,
                "fits": one.fits,
                "largest": [asdict(tensor) for tensor in one.largest],
            }
            for one in kind.memory
        ],
        "closed_forms": [
            {
                **asdict(one.expected),
                "counted_calls": one.calls,
                "counted_bytes": one.bytes,
                "difference": one.difference,
            }
            for one in kind.forms
        ],
    }


def _group_json(one: GroupPlan) -> dict[str, Any]:
    return {
        "name": one.group.name,
        "of_rank": one.of_rank,
        "ranks": one.group.ranks.as_json(),
        "shown": str(one.group.ranks),
        "size": one.group.ranks.size,
        "crosses_nodes": one.crosses_nodes,
        "used": one.used,
        "calls": one.calls,
        "bytes": one.bytes,
        "operations": {
            name: {"calls": calls, "bytes": given} for name, (calls, given) in one.operations.items()
        },
    }
