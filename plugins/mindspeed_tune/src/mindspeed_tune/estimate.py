"""Numbers of one candidate layout that a ranking needs, whether composed or planned directly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mindspeed_tune.launch_plan import LaunchPlan

COMPOSED, PLANNED = "composed", "planned"


@dataclass(frozen=True)
class Estimate:
    """A step of a candidate.

    Attributes:
        seconds: of the step; the terms below sum up to it.
        compute: seconds of operators in the passes of the busiest stage.
        communication: seconds of collectives in its passes.
        waiting: seconds in which it waits for other stages.
        gradients: seconds of the exchange of gradients that nothing hides.
        update: seconds of the update.
        bubble: share of all stages' time in which they wait.
        exact: bytes of tensors at the peak of the rank that has most.
        needed: bytes that the device must have that needs most.
        categories: bytes of that peak by category.
        mfu: share of the devices' peak; None where the operations of the model are not known.
        source: ``composed`` of dry runs of a smaller pipeline, or ``planned`` by its own.
        problems: why it cannot run, by its own plan: it does not fit, or its ranks would wait for each other.
        incomplete: features whose part is not, or not exactly, counted.
    """

    seconds: float
    compute: float
    communication: float
    waiting: float
    gradients: float
    update: float
    bubble: float
    exact: float
    needed: float
    categories: Mapping[str, float]
    mfu: float | None
    source: str = COMPOSED
    problems: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = field(default=())

    @property
    def terms(self) -> dict[str, float]:
        """Return the seconds of the step by where they go."""
        return {
            "compute": self.compute,
            "communication": self.communication,
            "pipeline bubble": self.waiting,
            "gradients": self.gradients,
            "update": self.update,
        }

    def fits(self, capacity: float) -> bool:
        """Return whether a device of so many bytes is enough."""
        return self.needed <= capacity

    def as_json(self) -> dict[str, Any]:
        """Return the numbers for a JSON file."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Estimate:
        """Return the numbers that `as_json` wrote."""
        tuples = {name: tuple(fields[name]) for name in ("problems", "incomplete")}
        return cls(**{**fields, **tuples})


def estimate_of(plan: LaunchPlan) -> Estimate:
    """Return the numbers of a candidate's own plan, which was made with a hardware file."""
    # With little in it, groups and rounding may make another device the one that needs most.
    step, memory = plan.step, max(plan.stages(), key=lambda one: one.exact)
    assert step.seconds is not None
    return Estimate(
        seconds=step.seconds,
        compute=step.compute,
        communication=step.communication,
        waiting=step.timeline.seconds - step.compute - step.communication,
        gradients=step.gradients,
        update=step.update,
        bubble=step.timeline.bubble,
        exact=memory.exact,
        needed=plan.fullest.fullest.needed,
        categories=dict(memory.categories),
        mfu=step.mfu,
        source=PLANNED,
        problems=tuple(plan.problems),
        incomplete=tuple(plan.incomplete),
    )
