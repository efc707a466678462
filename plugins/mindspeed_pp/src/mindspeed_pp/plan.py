"""From arguments to a schedule: which rule, how many chunks, which placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_pp.asked import (
    AUTO,
    FILE_FLAG,
    GREEDY,
    ORDERS_FLAG,
    PAIRED_FLAG,
    PROFILE_FLAG,
    TIMES_FLAG,
    TIMES_FROM_FLAG,
    WAVES,
    asked_for,
    recompute_flag,
    said_chunks,
)
from mindspeed_pp.lint import lint
from mindspeed_pp.microbatch_list import rule_of_orders, sizes_of
from mindspeed_pp.placement import Placement
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context, Rule
from mindspeed_pp.schedule import Schedule, parse_schedule, schedule_text
from mindspeed_pp.schedules.chimera import DECOUPLED, chimera
from mindspeed_pp.schedules.dual_pipe_v import DETACHED

if TYPE_CHECKING:
    from mindspeed_pp.simulator import Costs
    from mindspeed_pp.stage_times import Measured, Times


@dataclass(frozen=True)
class Plan:
    """The schedule of a run, for any number of micro-batches.

    Attributes:
        rule: of the schedule.
        ranks: pipeline ranks.
        chunks: of each rank.
        times: of ``F``, ``B`` and ``W`` of a rank's share.
        moves_weights: weight gradients go where ranks would wait, by ``times``.
        limit: most micro-batches alive on a rank.
        measured: times of a real run, in place of ``times``.
        recomputes: forward passes are computed again right before their backward pass.
        swaps_operands: operands of weight gradients that come late wait on the host.
        options: of the rule.
        sizes: samples of each micro-batch; empty where all are alike.
    """

    rule: Rule
    ranks: int
    chunks: int
    times: Times = (1.0, 1.0, 1.0)
    moves_weights: bool = False
    limit: float | None = None
    recomputes: bool = False
    swaps_operands: bool = False
    measured: Measured | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()

    @property
    def placement(self) -> Placement:
        """Return where stages live."""
        return self.rule.place(self.ranks, self.chunks)

    def schedule(self, microbatches: int) -> Schedule:
        """Return the schedule of a step; where the batch is too small for it, one that goes with any.

        Raises:
            UserError: it cannot run.
        """
        from mindspeed_pp.transforms import greedy_weights, recomputed, swapped_operands, waves

        if self.refusal(microbatches):
            return waves(WAVES, self.placement, microbatches)
        context = Context(self.ranks, self.chunks, microbatches, self.times, self.options)
        found = self.rule.schedule(context)
        if self.recomputes:
            found = recomputed(found)
        if self.swaps_operands:
            found = swapped_operands(found)
        if self.moves_weights:
            lint(found)
            found = greedy_weights(found, self.costs, self.limit)
        return found

    def count(self, microbatches: int | None) -> int | None:
        """Return the micro-batches of a step of training that has ``microbatches`` of equal size."""
        return len(self.sizes) or microbatches

    @property
    def costs(self) -> Costs:
        """Return what the parts of a step cost, as far as it is known."""
        from mindspeed_pp.simulator import Costs

        if self.measured is None:
            return Costs(*self.times)
        stages = self.measured.of_stages(self.placement)
        return Costs(*self.times, stages=stages, message=self.measured.message)

    def refusal(self, microbatches: int | None) -> str:
        """Return why the rule does not go with a number of micro-batches, or an empty string."""
        return self.rule.refusal(self.ranks, self.chunks, microbatches)


def asked_rule(args: Any) -> Rule | None:
    """Return the rule that the arguments ask for; None where they ask for none.

    Raises:
        UserError: there is none of this name, its file cannot be read, or two flags name one.
    """
    asked = asked_for(args)
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} both say the order of the pipeline; keep one of the two")
    for name in asked.values():
        if name == FILE_FLAG:
            path = str(args.pipeline_schedule_file)
            return _rule_of_text(schedule_text(Path(path)), path)
        if name == ORDERS_FLAG:
            return rule_of_orders(args.pp_schedule_list, args.pipeline_model_parallel_size or 1)
        rule = rule_named(_chosen(args) if name == AUTO else name)
        if rule is chimera and getattr(args, "chimera_decouple_bw", False):
            return replace(rule, splits=True)
        return rule
    return None


def _chosen(args: Any) -> str:
    ranks = getattr(args, "pipeline_model_parallel_size", 1) or 1
    layers = getattr(args, "num_layers", None)
    splits = getattr(args, "transformer_impl", None) in (None, "local")
    from mindspeed_pp.choice import shortest

    chunks, times = said_chunks(args), times_of(args)
    return shortest(ranks, chunks, layers, None, times, splits, measured_times(args))


@lru_cache(maxsize=8)
def _rule_of_text(text: str, path: str) -> Rule:
    schedule = parse_schedule(text, path)
    lint(schedule)
    return Rule(
        name=schedule.name,
        build=lambda context: schedule.orders,
        chunks=schedule.placement.stages // schedule.placement.size,
        splits=schedule.splits,
        place=lambda ranks, chunks: schedule.placement,
        exactly=schedule.microbatches,
        summary=f"of {path}",
    )


def times_of(args: Any) -> Times:
    """Return the times of ``F``, ``B`` and ``W`` that the arguments say, all alike without.

    Raises:
        UserError: they are not three numbers above 0, or their file cannot be read.
    """
    given = getattr(args, "pipeline_times", None)
    measured = measured_times(args)
    if measured is not None:
        return measured.of_rank(getattr(args, "pipeline_model_parallel_size", 1) or 1)
    if not given:
        return 1.0, 1.0, 1.0
    if len(given) != 3 or min(given) <= 0:
        shown = " ".join(f"{value:g}" for value in given)
        raise UserError(
            f"{TIMES_FLAG} {shown}: give three times above 0, of forward, input gradient, weight gradient"
        )
    forward, backward, weight = given
    return float(forward), float(backward), float(weight)


def measured_times(args: Any) -> Measured | None:
    """Return the times of the file that the arguments name; None where they name none.

    Raises:
        UserError: it cannot be read, is of another model, or times are given too.
    """
    path = getattr(args, "pipeline_times_from", None)
    if not path:
        return None
    if getattr(args, "pipeline_times", None):
        raise UserError(f"{TIMES_FROM_FLAG} and {TIMES_FLAG} both say times; keep one of the two")
    from mindspeed_pp.stage_times import read_times

    measured = read_times(str(path))
    layers = getattr(args, "num_layers", None)
    if measured.layers is not None and layers and measured.layers != layers:
        raise UserError(
            f"{TIMES_FROM_FLAG} {path}: it is of a model of {measured.layers} layers, and --num-layers is "
            f"{layers}; measure this one with {PROFILE_FLAG}"
        )
    return measured


def planned(args: Any) -> Plan | None:
    """Return the plan of the arguments; None where they ask for no schedule of this package.

    Raises:
        UserError: they cannot be followed.
    """
    rule = asked_rule(args)
    if rule is None:
        return None
    return Plan(
        rule,
        ranks=args.pipeline_model_parallel_size,
        chunks=copies_of(args, rule) or said_chunks(args) or rule.chunks or 1,
        times=times_of(args),
        moves_weights=rule.splits and getattr(args, "pipeline_w_placement", None) == GREEDY,
        limit=getattr(args, "pipeline_memory_limit", None),
        swaps_operands=bool(getattr(args, "use_nanopipe_swap", False)),
        measured=measured_times(args),
        recomputes=bool(recompute_flag(args)),
        options={
            DETACHED: bool(getattr(args, "dualpipev_dw_detach", False)),
            DECOUPLED: bool(getattr(args, "chimera_decouple_bw", False)),
        },
        sizes=sizes_of(args),
    )


def without_pairs(schedule: Schedule) -> str:
    """Return the refusal of a schedule that has no pairs to run side by side; empty where it has."""
    if any(action.parts for order in schedule.orders for action in order):
        return ""
    return (
        f"{PAIRED_FLAG} with pipeline schedule {schedule.name}: it has no forward pass beside a backward "
        "pass; use --schedules-method dualpipev, or drop one of the two"
    )


def copies_of(args: Any, rule: Rule) -> int:
    """Return how often the ranks hold the model, 0 for a schedule that holds it once."""
    if rule.name != chimera.name:
        return 0
    said = getattr(args, "virtual_data_parallel_size", None)
    return 2 if said is None else int(said)
