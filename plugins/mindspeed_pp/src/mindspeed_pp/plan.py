"""From arguments to a schedule: which rule, how many chunks, which placement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_pp.choice import Times, shortest
from mindspeed_pp.lint import lint
from mindspeed_pp.placement import Placement
from mindspeed_pp.registry import Context, Rule, rule_named
from mindspeed_pp.schedule import Schedule, read_schedule
from mindspeed_pp.simulator import Costs
from mindspeed_pp.transforms import greedy_weights, waves

FLAG, FILE_FLAG = "--pipeline-schedule", "--pipeline-schedule-file"
TIMES_FLAG, WEIGHTS_FLAG, LIMIT_FLAG = "--pipeline-times", "--pipeline-w-placement", "--pipeline-memory-limit"
AUTO, GREEDY, WAVES = "auto", "greedy", "waves"


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
        options: of the rule.
    """

    rule: Rule
    ranks: int
    chunks: int
    times: Times = (1.0, 1.0, 1.0)
    moves_weights: bool = False
    limit: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        """Return where stages live."""
        return self.rule.place(self.ranks, self.chunks)

    def schedule(self, microbatches: int) -> Schedule:
        """Return the schedule of a step; where the batch is too small for it, one that goes with any.

        Raises:
            UserError: it cannot run.
        """
        if self.refusal(microbatches):
            return waves(WAVES, self.placement, microbatches)
        context = Context(self.ranks, self.chunks, microbatches, self.times, self.options)
        found = self.rule.schedule(context)
        if self.moves_weights:
            lint(found)
            found = greedy_weights(found, Costs(*self.times), self.limit)
        return found

    def refusal(self, microbatches: int | None) -> str:
        """Return why the rule does not go with a number of micro-batches, or an empty string."""
        return self.rule.refusal(self.ranks, self.chunks, microbatches)


def asked_rule(args: Any) -> Rule | None:
    """Return the rule that the arguments ask for; None where they ask for none.

    Raises:
        UserError: there is none of this name, or its file cannot be read.
    """
    name, file = getattr(args, "pipeline_schedule", None), getattr(args, "pipeline_schedule_file", None)
    if file:
        return _rule_of_file(str(file))
    if name != AUTO:
        return rule_named(name) if name else None
    ranks = getattr(args, "pipeline_model_parallel_size", 1) or 1
    layers = getattr(args, "num_layers", None)
    splits = getattr(args, "transformer_impl", None) in (None, "local")
    name = shortest(ranks, said_chunks(args), layers, None, times_of(args), splits)
    return rule_named(name)


@lru_cache(maxsize=8)
def _rule_of_file(path: str) -> Rule:
    schedule = read_schedule(Path(path))
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
        UserError: they are not three numbers above 0.
    """
    given = getattr(args, "pipeline_times", None)
    if not given:
        return 1.0, 1.0, 1.0
    if len(given) != 3 or min(given) <= 0:
        shown = " ".join(f"{value:g}" for value in given)
        raise UserError(
            f"{TIMES_FLAG} {shown}: give three times above 0, of forward, input gradient, weight gradient"
        )
    forward, backward, weight = given
    return float(forward), float(backward), float(weight)


def said_chunks(args: Any) -> int | None:
    """Return the chunks of each rank that flags say; None where none does."""
    derived = getattr(args, "virtual_pipeline_model_parallel_size", None)
    stages = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    per_chunk = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    ranks = getattr(args, "pipeline_model_parallel_size", 1) or 1
    layers = getattr(args, "num_layers", None)
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if derived or stages:
        return int(derived or stages)
    rows = getattr(args, "pipeline_num_transformer_layers", None)
    if isinstance(rows, str):
        # Checked by whoever reads it; here only the columns of its first row count.
        first = re.match(r"\s*\[\s*\[([^\]]*)\]", rows)
        return len(first[1].split(",")) if first else None
    if isinstance(layout, str) and layout:
        return max(1, _stages_of_layout(layout) // ranks)
    if per_chunk and layers:
        return max(1, int(layers) // ranks // int(per_chunk))
    return None


def _stages_of_layout(layout: str) -> int:
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text).count("|") + 1


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
        chunks=said_chunks(args) or rule.chunks or 1,
        times=times_of(args),
        moves_weights=rule.splits and getattr(args, "pipeline_w_placement", None) == GREEDY,
        limit=getattr(args, "pipeline_memory_limit", None),
    )
