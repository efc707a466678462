"""From arguments to a schedule: which rule, how many chunks, which placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_pp.placement import Placement
from mindspeed_pp.registry import Context, Rule, rule_named
from mindspeed_pp.schedule import Schedule

FLAG = "--pipeline-schedule"


@dataclass(frozen=True)
class Plan:
    """The schedule of a run, for any number of micro-batches.

    Attributes:
        rule: of the schedule.
        ranks: pipeline ranks.
        chunks: of each rank.
        times: of ``F``, ``B`` and ``W`` of a rank's share.
        options: of the rule.
    """

    rule: Rule
    ranks: int
    chunks: int
    times: tuple[float, float, float] = (1.0, 1.0, 1.0)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        """Return where stages live."""
        return self.rule.place(self.ranks, self.chunks)

    def schedule(self, microbatches: int) -> Schedule:
        """Return the schedule of a step."""
        context = Context(self.ranks, self.chunks, microbatches, self.times, self.options)
        return self.rule.schedule(context)


def asked_rule(args: Any) -> Rule | None:
    """Return the rule that the arguments ask for; None where they ask for none."""
    name = getattr(args, "pipeline_schedule", None)
    return rule_named(name) if name else None


def chunks_of(args: Any, rule: Rule) -> int:
    """Return the chunks of each rank, as far as flags say; a layout says it after validation."""
    derived = getattr(args, "virtual_pipeline_model_parallel_size", None)
    stages = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    per_chunk = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    ranks = getattr(args, "pipeline_model_parallel_size", 1) or 1
    if derived or stages:
        return int(derived or stages)
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str) and layout:
        return max(1, _stages_of_layout(layout) // ranks)
    layers = getattr(args, "num_layers", None)
    if per_chunk and layers:
        return max(1, int(layers) // ranks // int(per_chunk))
    return rule.chunks or 1


def _stages_of_layout(layout: str) -> int:
    import re

    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text).count("|") + 1


def planned(args: Any) -> Plan | None:
    """Return the plan of validated arguments; None where they ask for no schedule of this package."""
    rule = asked_rule(args)
    if rule is None:
        return None
    ranks = args.pipeline_model_parallel_size
    return Plan(rule, ranks, chunks_of(args, rule))
