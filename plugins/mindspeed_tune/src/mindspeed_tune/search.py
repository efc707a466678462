"""The search: every valid layout ranked by composition, the best of them planned by dry runs of their own.

Nothing is sampled: a list of a few thousand layouts is ranked whole. What a ranking gets wrong a dry run
of the candidate itself corrects, and how far the two were apart is part of the report.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError as FlagProblems
from mindspeed_tune.candidate import PIPELINE, TENSOR, Candidate
from mindspeed_tune.cells import ASKED, CellKey, Cells, by_cell, target_of
from mindspeed_tune.compose import Cell
from mindspeed_tune.driver import KINDS, Ranks, records_of
from mindspeed_tune.estimate import Estimate, estimate_of
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import TRAIN, LaunchCommand
from mindspeed_tune.launch_plan import make_plan
from mindspeed_tune.layout import ORDER, RANKS_PER_NODE
from mindspeed_tune.layout_space import Model, layouts
from mindspeed_tune.nothing_fits import nothing_fits
from mindspeed_tune.ranked import Ranked
from mindspeed_tune.small_pipeline import NotComposable
from mindspeed_tune.space_file import Space
from mindspeed_tune.threads import waiting_threads
from mindspeed_tune.trust import Family, Trust, family_of
from mindspeed_tune.validity import Validity
from mindspeed_tune.warm_process import PlanError, WarmProcess

SHOWN = 20
"""Candidates of a report."""
_NEAR = 1.1
"""Times the fastest step: cells whose fastest member is composed to be slower are not checked."""
_NEARLY = 1.05
"""Times the memory of a device: what is composed to need more is believed not to fit."""
_PLAN, _FIRST = "plan", "first"


@dataclass
class Search:
    """A search for the layouts of one command.

    What a dry run cannot plan, but a short run measures, is in ``only_measured``.

    Attributes:
        command: the user's.
        space: what the user wants tried.
        hardware: of the cluster.
        process: that runs ranks.
        journal: that results go into.
        registry: what is installed.
        trials: candidates that get a dry run of their own.
        deadline: by the monotonic clock, after which no dry run is begun; None for no limit.
        say: tells the user how far the search is.
        strategy: chooses the candidates that should have dry runs of their own, the best first, given the
            search as far as it is; None for those that lead.
        cost: corrects an estimate, given the validated arguments and the hardware; None for no correction.
    """

    command: LaunchCommand
    space: Space
    hardware: Hardware
    process: WarmProcess
    journal: Journal
    registry: Registry
    trials: int = 30
    deadline: float | None = None
    say: Callable[[str], None] = lambda text: None
    strategy: Callable[[Search], Sequence[Candidate]] | None = None
    cost: Callable[[Estimate, Any, Hardware], Estimate] | None = None
    ranked: dict[str, Ranked] = field(default_factory=dict)
    unranked: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flags = known_flags(self.registry)
        self.validity = Validity(self.registry, self.command, self.process.platform)
        self.cells = Cells(self.command, self.flags, self.process, self.journal)
        self.per_node = self.command.ranks_per_node or self.hardware.devices or RANKS_PER_NODE
        self.command = replace(self.command, ranks_per_node=self.per_node)
        self._args: dict[str, Any] = {}
        self._cells: dict[CellKey, Cell] = {}
        self.trust = Trust()
        self.only_measured: list[Candidate] = []
        self.model_flops, self.order = 0.0, ORDER

    def run(self) -> list[Ranked]:
        """Search; return the candidates that fit and can run, fastest first.

        Raises:
            UserError: no layout is valid, or none fits.
        """
        if self.journal.get(_FIRST, "model") is None:
            self.process.begin()
        candidates = self._valid()
        self.say(f"{len(candidates)} valid layouts; {sum(r.count for r in self._refused())} refused")
        self._compose(candidates)
        self.say(f"{len(self.ranked)} layouts ranked by composition")
        self._plan_the_best()
        found = self.best()
        if not found:
            raise UserError(nothing_fits(self))
        return found

    def best(self) -> list[Ranked]:
        """Return what fits and can run, fastest first; equal ones by name.

        Composed numbers of a cell count until a dry run of a member says otherwise.
        """
        fitting = [one for one in self.ranked.values() if self._may_run(one) and self._counts(one)]
        return sorted(fitting, key=lambda one: (one.estimate.seconds, one.candidate.name))

    def frontier(self) -> list[Ranked]:
        """Return the candidates that no other one beats in both time and memory, fastest first."""
        found: list[Ranked] = []
        least = float("inf")
        for one in self.best():
            if one.estimate.needed < least:
                found.append(one)
                least = one.estimate.needed
        return found

    def given(self) -> Any:
        """Return the parsed arguments of the user's command.

        Raises:
            UserError: they cannot be read.
        """
        arguments = [*self.command.arguments]
        if self.command.kind != TRAIN:
            arguments.append("--ignore-unknown-args")
        parsed = self.flags.parse(arguments)
        if parsed.problems:
            raise FlagProblems(parsed.problems)
        return parsed.args

    def args_of(self, candidate: Candidate) -> Any:
        """Return the validated arguments of a valid candidate."""
        if candidate.name not in self._args:
            found = self.validity.args_of(candidate)
            # Thousands of candidates are kept, and a training has a thousand arguments.
            self._args[candidate.name] = found and Namespace(
                **{name: getattr(found, name, None) for name in ASKED}
            )
        return self._args[candidate.name]

    def candidates(self, world_size: int) -> list[Candidate]:
        """Return the candidates of a world whose sizes divide."""
        given = self.given()
        model = Model.of(given, self.registry)
        return list(layouts(model, given, world_size, self.per_node, self.space, self.registry))

    def compose(self, candidate: Candidate, args: Any, world_size: int) -> Estimate:
        """Return a candidate's numbers by its cell, which has been run.

        Raises:
            NotComposable: they do not follow.
        """
        cell = self._cells.get(CellKey.of(candidate))
        if cell is None:
            raise NotComposable("its small pipeline could not be run")
        target = target_of(candidate, args, world_size, self.model_flops, self.order)
        return self._corrected_by_cost(cell.estimate(target, self.hardware), args)

    def plan(self, candidate: Candidate) -> Estimate:
        """Return a candidate's numbers by its own dry run, from the journal where it has them.

        Raises:
            PlanError: it cannot be planned.
        """
        known = self.journal.get(_PLAN, candidate.name)
        if known is None:
            known = self._planned(candidate)
            self.journal.put(_PLAN, candidate.name, known)
        if "failed" in known:
            raise PlanError(known["failed"])
        return self._corrected_by_cost(Estimate.from_json(known), self.args_of(candidate))

    def _corrected_by_cost(self, estimate: Estimate, args: Any) -> Estimate:
        return estimate if self.cost is None else self.cost(estimate, args, self.hardware)

    def is_over(self) -> bool:
        """Return whether the budget is spent."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def _planned(self, candidate: Candidate) -> dict[str, Any]:
        command = candidate.command(self.command, self.flags)
        try:
            with Ranks(command, process=self.process, reliefs=False) as ranks:
                records = records_of(ranks, KINDS)
        except PlanError as error:
            return {"failed": str(error)}
        return estimate_of(make_plan(command.text, records, self.hardware, self.per_node)).as_json()

    def _valid(self) -> list[Candidate]:
        tried = self.candidates(self.command.world_size)
        if not tried:
            raise UserError(
                f"no layout divides {self.command.world_size} ranks for this model and batch: sizes "
                "must divide "
                "heads, layers and ranks, and --global-batch-size the data-parallel size times the "
                "micro-batch "
                "size; start another number of ranks, or widen --tune-space"
            )
        found = []
        for candidate in {one.name: one for one in tried}.values():
            if self.args_of(candidate) is not None:
                found.append(candidate)
        if not found:
            most = max(self._refused(), key=lambda one: one.count)
            raise UserError(
                f"none of {len(tried)} layouts may start; {most.count} of them: {most.reason} "
                f"(for instance {most.example})"
            )
        return found

    def _refused(self) -> Sequence[Any]:
        return list(self.validity.refused.values())

    def _compose(self, candidates: Sequence[Candidate]) -> None:
        cells = by_cell(candidates)
        sizes = {
            key: [self.args_of(candidate).micro_batch_size for candidate in members]
            for key, members in cells.items()
        }
        failed: dict[CellKey, str] = {}
        # One more than ranks at once: the first cells run beside what the model is asked.
        with waiting_threads(self.process.parallel + 1) as pool:
            known = pool.submit(self._learn_about_the_model, candidates)
            started: dict[CellKey, Future[Cell]] = {
                key: pool.submit(self._cell, key, sizes[key]) for key in cells
            }
            known.result()
            for key, future in started.items():
                try:
                    self._cells[key] = future.result()
                except NotComposable as error:
                    failed[key] = str(error)
        for key, members in cells.items():
            for candidate in members:
                try:
                    composed = self.compose(candidate, self.args_of(candidate), self.command.world_size)
                except NotComposable as error:
                    self.unranked[candidate.name] = failed.get(key, str(error))
                else:
                    self.ranked[candidate.name] = Ranked(candidate, composed, composed)

    def _cell(self, key: CellKey, sizes: Sequence[int]) -> Cell:
        if self.is_over():
            raise NotComposable("the budget ended before its dry runs")
        return self.cells.run(key, sizes)

    def _learn_about_the_model(self, candidates: Sequence[Candidate]) -> None:
        """Run one rank of one candidate: that the command can be planned, and what a step of it computes."""
        known = self.journal.get(_FIRST, "model")
        if known is None:
            known = self._first_record(candidates)
            self.journal.put(_FIRST, "model", known)
        self.model_flops, self.order = known["model_flops"], known["order"]
        self.notes += [f"{name}: {reason}" for name, reason in known["incomplete"].items()]

    def _first_record(self, candidates: Sequence[Candidate]) -> dict[str, Any]:
        """Return what the first candidate that can be planned says of the model: a layout may be to blame."""
        by_stages = {one.size(PIPELINE): one for one in sorted(candidates, key=lambda one: one.size(TENSOR))}
        # The fewest layers on a rank are built fastest.
        tried = [by_stages[stages] for stages in sorted(by_stages, reverse=True)]
        for candidate in tried:
            command = candidate.command(self.command, self.flags)
            try:
                with Ranks(command, process=self.process, reliefs=False) as ranks:
                    [record] = ranks.run([0])
            except PlanError:
                if candidate is tried[-1]:
                    raise
                continue
            return {
                "model_flops": record.sizes.get("model_flops", 0.0),
                "order": record.layout.order,
                "incomplete": dict(record.incomplete),
            }
        raise RuntimeError("there is no candidate")

    def _plan_the_best(self) -> None:
        """Plan the best candidates and the memory frontier, until those that lead are all planned."""
        planned: set[str] = set()
        left = 2 * self.trials
        # A plan begins with one rank: others fill the processors meanwhile.
        at_once = max(2, self.process.parallel)
        with waiting_threads(at_once) as pool:
            while left > 0 and not self.is_over():
                wanted = [one for one in (self.strategy or Search.leading)(self) if one.name not in planned]
                batch = wanted[: min(left, at_once)]
                if not batch:
                    break
                for candidate, future in [(one, pool.submit(self.plan, one)) for one in batch]:
                    planned.add(candidate.name)
                    left -= 1
                    try:
                        self.take(candidate, future.result())
                    except PlanError as error:
                        self.validity.refuse(candidate, str(error))
                        self.ranked.pop(candidate.name, None)
                        self.unranked.pop(candidate.name, None)
        self._set_aside()
        if self.is_over():
            self.notes.append("the budget ended before every leading candidate had its own dry run")

    def take(self, candidate: Candidate, estimate: Estimate) -> Ranked:
        """Take over the numbers of a candidate's own dry run, and judge its cell by them."""
        before = self.ranked.get(candidate.name)
        composed = None if before is None else before.composed
        found = self.ranked[candidate.name] = Ranked(candidate, estimate, composed)
        self.unranked.pop(candidate.name, None)
        if composed is not None:
            self.trust.note(candidate, composed, estimate)
        return found

    def leading(self) -> list[Candidate]:
        """Return the candidates that should have a dry run of their own, the best first."""
        corrected = sorted(
            (one for one in self.ranked.values() if self._may_run(one)),
            key=lambda one: (self._corrected(one), one.candidate.name),
        )
        found = [one.candidate for one in corrected[: self.trials]]
        found += [one.candidate for one in self.frontier()[: self.trials // 3]]
        found += self._unchecked()
        # Of those that nothing is known about, the ones with the least splitting first.
        rest = sorted(self.unranked, key=lambda name: (len(name), name))
        by_name = {one.name: one for one in self._unranked_candidates()}
        found += [by_name[name] for name in rest if name in by_name][: self.trials]
        return list({one.name: one for one in found}.values())

    def _unchecked(self) -> list[Candidate]:
        """Return the best member of every cell that nothing but composition has put near the front."""
        best = self.best()
        fastest = best[0].estimate.seconds if best else float("inf")
        # What is a little too large by composition may fit.
        almost = sorted(
            (one for one in self.ranked.values() if not self._may_run(one) and self._nearly_fits(one)),
            key=lambda one: (one.estimate.needed, one.candidate.name),
        )
        found: dict[Family, Candidate] = {}
        for place, one in enumerate((*best, *almost)):
            near = place < SHOWN or one.estimate.seconds <= _NEAR * fastest
            if near and not self.trust.is_checked(one.candidate):
                found.setdefault(family_of(one.candidate), one.candidate)
        return list(found.values())

    def _set_aside(self) -> None:
        """Leave candidates out of the ranking whose composed numbers do not count."""
        for name, one in list(self.ranked.items()):
            if not self._counts(one):
                self.unranked[name] = self.trust.why_not(one.candidate)
                del self.ranked[name]

    def _unranked_candidates(self) -> Iterable[Candidate]:
        for candidate in self.candidates(self.command.world_size) if self.unranked else ():
            if candidate.name in self.unranked:
                yield candidate

    def _corrected(self, one: Ranked) -> float:
        """Return the seconds of a candidate, corrected by how far its cell was off where it was planned."""
        seconds = one.estimate.seconds
        return seconds if one.planned else self.trust.corrected(one.candidate, seconds)

    def _counts(self, one: Ranked) -> bool:
        return one.planned or not self.trust.why_not(one.candidate)

    def _nearly_fits(self, one: Ranked) -> bool:
        return not one.planned and one.estimate.fits(_NEARLY * self.hardware.memory)

    def _may_run(self, one: Ranked) -> bool:
        return not one.estimate.problems and one.estimate.fits(self.hardware.memory)
