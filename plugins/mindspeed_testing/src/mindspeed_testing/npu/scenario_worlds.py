"""Scenarios on value devices beside the CPU, many in one world.

A rank imports torch_npu and sets a device up once, however many trainings follow each other in it; that is
most of what a short training on a value device costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mindspeed_core.feature import Scenario
from mindspeed_megatron.backend_contracts.hccl import HCCL
from mindspeed_testing.canonical import CanonicalState
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.npu.value_training import (
    ValueTraining,
    assert_equal_sides,
    joined_devices,
    plain_fork_server,
    run_value_world,
    value_rank,
)
from mindspeed_testing.proof_files import flags_with_files
from mindspeed_testing.training import RankRecord, SideRequest, SideResult, joined_ranks, train_rank
from mindspeed_testing.worlds import WorldError, run_world

SECONDS_EACH = 120.0
"""Time of a training in a world, on a busy machine."""


class ScenarioWorlds:
    """Trainings of scenarios, made before they are asked for.

    A test that is parametrized with `mindspeed_testing.npu.device_scenarios` makes one for its module, and
    asks it for each scenario. A scenario whose training fails costs the world that it was in; the others are
    trained again, each in a world of its own, so that the failure is told by its own test.
    """

    def __init__(self, scenarios: Iterable[Scenario], *, soc: str = "910B") -> None:
        """Train all scenarios on the CPU and on value devices.

        Args:
            scenarios: with one layout of ranks each, and without checkpoints.
            soc: the generation of the device.
        """
        self.soc = soc
        wanted = sorted({*scenarios}, key=lambda scenario: (scenario.name, scenario.flags))
        self._cpu: dict[_Side, SideResult | WorldError] = {}
        baselines = list(dict.fromkeys(_Side.baseline(scenario) for scenario in wanted))
        for side, records in _in_worlds(baselines, self.soc):
            self._cpu[side] = records if isinstance(records, WorldError) else joined_ranks(records)
        sides = {}
        for scenario in wanted:
            cpu = self._cpu[_Side.baseline(scenario)]
            if isinstance(cpu, SideResult):
                sides[scenario] = _Side.on_device(scenario, cpu.initial)
        found = dict(_in_worlds(list(sides.values()), self.soc))
        self._devices = {scenario: found[side] for scenario, side in sides.items()}

    def assert_equals_cpu(self, scenario: Scenario, *, tolerance: float | None = None) -> ValueTraining:
        """Assert that a scenario's side on value devices equals its baseline on the CPU.

        Args:
            scenario: one of those that were trained.
            tolerance: in the place of the larger of the scenario's and the error of sums in another order.

        Raises:
            AssertionError: with a report of the worst tensors, or of a rank that HCCL would never let go on.
            WorldError: a side cannot run, or HCCL refuses one of its calls.
        """
        cpu = self._cpu[_Side.baseline(scenario)]
        if isinstance(cpu, WorldError):
            raise cpu
        records = self._devices[scenario]
        if isinstance(records, WorldError):
            raise records
        return assert_equal_sides(scenario, joined_devices(records), cpu, soc=self.soc, tolerance=tolerance)


@dataclass(frozen=True, eq=False)
class _Device:
    """A training on value devices starts from the weights of the CPU; equal only to itself."""

    initial: CanonicalState | None
    extra_parameters: tuple[str, ...]


@dataclass(frozen=True)
class _Side:
    """One training of all ranks; equal sides are trained once."""

    flags: tuple[str, ...]
    world_size: int
    steps: int
    files: tuple[str, ...]
    feature_state: bool
    optimizer_state: bool
    device: _Device | None = None

    @classmethod
    def baseline(cls, scenario: Scenario) -> _Side:
        size = scenario.baseline_world_size or scenario.world_size
        return cls(tuple(scenario.baseline), size, scenario.steps, *_common(scenario))

    @classmethod
    def on_device(cls, scenario: Scenario, initial: CanonicalState | None) -> _Side:
        device = _Device(initial, tuple(scenario.extra_parameters))
        return cls(
            tuple(scenario.flags), scenario.world_size, scenario.steps, *_common(scenario), device=device
        )

    def request(self, flags: Sequence[str], soc: str) -> SideRequest:
        common: dict[str, Any] = {
            "feature_state": self.feature_state,
            "optimizer_state": self.optimizer_state,
        }
        given = training_flags(flags, self.steps + 1)
        if self.device is None:
            return SideRequest(given, self.steps, platform="cpu", **common)
        return SideRequest(
            given,
            self.steps,
            self.device.initial,
            platform="npu",
            extra_parameters=self.device.extra_parameters,
            contracts=(HCCL[soc],) if soc in HCCL else (),
            **common,
        )


def _common(scenario: Scenario) -> tuple[tuple[str, ...], bool, bool]:
    quantities = scenario.quantities
    return tuple(scenario.files), "feature state" in quantities, "optimizer state" in quantities


def _in_worlds(sides: Sequence[_Side], soc: str) -> Iterable[tuple[_Side, Any]]:
    """Yield each side with what its ranks returned, or with the error of its world."""
    for size in sorted({side.world_size for side in sides}):
        of_size = [side for side in sides if side.world_size == size]
        try:
            yield from zip(of_size, _world(of_size, soc))
        except WorldError as error:
            if len(of_size) == 1:
                yield of_size[0], error
                continue
            for side in of_size:
                try:
                    yield side, _world([side], soc)[0]
                except WorldError as own:
                    yield side, own


def _world(sides: Sequence[_Side], soc: str) -> list[list[Any]]:
    """Train sides one after another in one world; return for each what its ranks returned."""
    with ExitStack() as stack:
        requests = [
            side.request(stack.enter_context(flags_with_files(side.flags, side.files)), soc) for side in sides
        ]
        size, timeout = sides[0].world_size, 60.0 + SECONDS_EACH * len(sides)
        if sides[0].device is None:
            stack.enter_context(plain_fork_server())
            ranks = run_world(cpu_ranks, size, requests, timeout=timeout)
        else:
            ranks = run_value_world(value_ranks, size, requests, soc, soc=soc, timeout=timeout)
    return [list(of_side) for of_side in zip(*ranks)]


def cpu_ranks(requests: Sequence[SideRequest]) -> list[RankRecord]:
    """Train one rank of several sides on the CPU."""
    return [train_rank(request) for request in requests]


def value_ranks(
    requests: Sequence[SideRequest], soc: str
) -> list[tuple[RankRecord, Counter[str], tuple[str, ...]]]:
    """Train one rank of several sides on value devices."""
    return [value_rank(request, soc) for request in requests]
