"""A schedule for any sizes: a rule from sizes to the actions of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import DeclarationError
from mindspeed_pp.actions import Action
from mindspeed_pp.placement import Placement, loop
from mindspeed_pp.schedule import Schedule, made

Builder = Callable[["Context"], Iterable[Sequence[Action]]]


@dataclass(frozen=True)
class Context:
    """The sizes a schedule is made for.

    Attributes:
        p: pipeline ranks.
        v: model chunks of each rank.
        m: micro-batches of a step.
        times: time of ``F``, ``B`` and ``W`` of one rank's whole share of the layers.
        options: of the schedule, by name.
    """

    p: int
    v: int
    m: int
    times: tuple[float, float, float] = (1.0, 1.0, 1.0)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """Return the number of stages of the model."""
        return self.p * self.v


@dataclass(frozen=True)
class Rule:
    """A schedule for any sizes.

    Attributes:
        name: value of ``--pipeline-schedule``.
        build: yields the list of each rank in turn; pure, since every rank calls it for itself.
        chunks: of each rank, or None for two and more, as the user says.
        splits: whether weight gradients come apart, so that linears must allow it.
        place: where stages live.
        least: fewest micro-batches for ``p`` ranks.
        exactly: the only number of micro-batches, of a schedule that is written down.
        whole_rounds: the number of micro-batches is a multiple of ``p``.
        summary: one line.
        refuses: why ranks, chunks and micro-batches (None: not known yet) do not go, or an empty string.
    """

    name: str
    build: Builder
    chunks: int | None = 1
    splits: bool = False
    place: Callable[[int, int], Placement] = loop
    least: Callable[[int], int] = lambda p: 1
    whole_rounds: bool = False
    summary: str = ""
    exactly: int | None = None
    refuses: Callable[[int, int, int | None], str] = lambda p, v, m: ""

    def refusal(self, p: int, v: int, m: int | None) -> str:
        """Return why these sizes do not go, or an empty string; ``m`` None leaves micro-batches out."""
        refused = self.refuses(p, v, m)
        if refused:
            return refused
        if self.chunks is not None and v != self.chunks:
            return f"schedule {self.name} has {self.chunks} model chunks on each rank, not {v}"
        if self.chunks is None and v < 2:
            return (
                f"schedule {self.name} needs two or more model chunks on each rank; add "
                "--num-virtual-stages-per-pipeline-rank"
            )
        if m is not None and m < self.least(p):
            return (
                f"schedule {self.name} on {p} ranks needs at least {self.least(p)} micro-batches, the batch "
                f"has {m}; raise --global-batch-size, or use 1f1b or interleaved"
            )
        if m is not None and self.exactly not in (None, m):
            return (
                f"schedule {self.name} is written for {self.exactly} micro-batches, the batch has {m}; "
                "change --global-batch-size"
            )
        if m is not None and self.whole_rounds and m % p:
            return (
                f"schedule {self.name} needs a multiple of {p} micro-batches, the batch has {m}; change "
                "--global-batch-size"
            )
        return ""

    def schedule(self, context: Context) -> Schedule:
        """Build the schedule for given sizes.

        Raises:
            UserError: the sizes do not go, or the rule yields another number of lists than ranks.
        """
        refused = self.refusal(context.p, context.v, context.m)
        if refused:
            raise UserError(refused)
        orders = [list(order) for order in self.build(context)]
        if len(orders) != context.p:
            raise UserError(f"schedule {self.name} yields {len(orders)} lists for {context.p} ranks")
        return made(self.name, self.place(context.p, context.v), context.m, orders)


def schedule(
    name: str,
    *,
    chunks: int | None = 1,
    splits: bool = False,
    place: Callable[[int, int], Placement] = loop,
    least: Callable[[int], int] = lambda p: 1,
    whole_rounds: bool = False,
    summary: str = "",
    refuses: Callable[[int, int, int | None], str] = lambda p, v, m: "",
) -> Callable[[Builder], Rule]:
    """Make a `Rule` of a function from `Context` to the list of each rank; see there for the arguments."""

    def make(build: Builder) -> Rule:
        line = summary or (build.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        return Rule(name, build, chunks, splits, place, least, whole_rounds, line, refuses=refuses)

    return make


def check_rule(contributed: Any) -> None:
    """Refuse what is no schedule.

    Raises:
        DeclarationError: says what it is.
    """
    if not isinstance(contributed, Rule):
        raise DeclarationError(
            f"a schedule is a function with the decorator mindspeed_pp.schedule, not {contributed!r}"
        )
