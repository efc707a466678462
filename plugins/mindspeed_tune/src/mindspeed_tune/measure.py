"""Measured steps of candidates: all of one world size in one world, one after the other.

What dies, hangs or runs out of memory ends its world, is remembered as infeasible with its message, and the
others go on in a new one.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.flags.flag_set import FlagSet
from mindspeed_tune.candidate import Candidate
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import TRAIN, LaunchCommand
from mindspeed_tune.measured_run import BEGIN, END, HANGS, run_candidates

STEPS, ROUNDS, MOST_ROUNDS = 3, 3, 6
"""Timed steps of a candidate in a round, and rounds: each of the others has its turn in between. Candidates
that rounds do not tell apart get more of them, up to the last number."""
REPEATED = 0.02
"""A shortest step to which another round comes so close is known: where those of two neighbours are, further
rounds would not move them."""
APART = 0.10
"""Rounds that differ by more than this tell nothing of which candidate is faster."""
_MEASURED, _RUNNING = "measured", "running.jsonl"
_NEVER: dict[str, Any] = dict.fromkeys(
    "--load --save --save-interval --tensorboard-dir --run-dir --wandb-project --wandb-exp-name --profile "
    "--exit-interval --exit-duration-in-mins --exit-on-missing-checkpoint --async-save --finetune "
    "--save-retain-interval --log-straggler --timing-log-level".split()
)
"""Flags that short runs leave out: they write or read files, or end runs."""


@dataclass(frozen=True)
class Measured:
    """Measured steps of a candidate.

    Attributes:
        seconds: the shortest step of every round; empty where the candidate failed.
        peak: bytes of memory at the peak of the fullest rank; None where it was not asked for.
        load: of the machine, the highest of the rounds.
        failure: why it is infeasible; empty where it trained.
    """

    seconds: tuple[float, ...] = ()
    peak: float | None = None
    load: float = 0.0
    failure: str = ""

    @property
    def best(self) -> float:
        """Return the shortest step."""
        return min(self.seconds, default=float("inf"))

    @property
    def spread(self) -> float:
        """Return how much longer the worst round was than the best one."""
        return max(self.seconds) / self.best - 1 if self.seconds else 0.0

    @property
    def doubt(self) -> float:
        """Return how much longer the second-best round was: so far the shortest step may still move."""
        best, *others = sorted(self.seconds) or [1.0]
        return others[0] / best - 1 if others else 0.0

    @property
    def typical(self) -> float:
        """Return how much longer the median round was than the best one."""
        return statistics.median(self.seconds) / self.best - 1 if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the numbers for a JSON file."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Measured:
        """Return the numbers that `as_json` wrote."""
        return cls(**{**fields, "seconds": tuple(fields["seconds"])})


@dataclass
class Measuring:
    """Runs candidates of one command on this machine.

    Attributes:
        command: the user's; its ranks are started here.
        flags: that exist.
        journal: that results go into, a line for every round of a candidate.
        limit: seconds after which a candidate hangs.
        platform: what they train on; None for what the command says.
        settings: that all runs share, a smaller model for instance.
        train: what every rank of a world runs.
        say: tells the user how far it is.
    """

    command: LaunchCommand
    flags: FlagSet
    journal: Journal
    limit: float = 600.0
    platform: str | None = None
    settings: Mapping[str, Any] | None = None
    train: Callable[..., int] = run_candidates
    say: Callable[[str], None] = lambda text: None

    def measure(
        self, candidates: Sequence[Candidate], rounds: int = ROUNDS, *, memory: bool = False
    ) -> dict[str, Measured]:
        """Return the measured steps of candidates by name.

        Args:
            candidates: of one world size.
            rounds: in which each has its turn, every other one in the opposite order.
            memory: measure the peak of memory too, in the first round.

        Raises:
            UserError: the command is a script, which does not say when a step begins.
        """
        if self.command.kind != TRAIN:
            raise UserError(
                f"{self.command.target}: short runs are those of mindspeed-train; give its flags as "
                "mindspeed-train FLAGS, or leave --tune-refine out"
            )
        queue: list[tuple[int, Candidate]] = []
        for number in range(rounds):
            turn = list(candidates) if number % 2 == 0 else list(reversed(candidates))
            queue += [(number, candidate) for candidate in turn]
        if self.journal.folder is not None:
            # Of a world that was killed together with this program.
            self._take(self.journal.folder / _RUNNING)
        left = [one for one in queue if self._known(*one) is None]
        while left:
            left = self._world(left, memory)
        return {one.name: self._of(one, rounds) for one in candidates}

    def settle(
        self,
        candidates: Sequence[Candidate],
        rounds: int = ROUNDS,
        *,
        memory: bool = False,
        unsure: Callable[[Mapping[str, Measured]], Collection[str]] | None = None,
    ) -> dict[str, Measured]:
        """Measure candidates until rounds have told those apart that they can tell apart.

        Args:
            candidates: of one world size.
            rounds: of all of them.
            memory: measure the peak of memory too.
            unsure: which candidates need another round; None for neighbours in the ranking that are neither
                apart nor known to be equal.
        """
        found = self.measure(candidates, rounds, memory=memory)
        for more in range(rounds + 1, MOST_ROUNDS + 1):
            names = (unsure or undecided)(found)
            again = [one for one in candidates if one.name in names]
            if not again:
                break
            self.say(f"rounds do not tell {len(again)} candidates apart yet: round {more}")
            found |= self.measure(again, more)
        return found

    def halve(self, candidates: Sequence[Candidate], *, memory: bool = False) -> dict[str, Measured]:
        """Measure candidates by successive halving: one round of all, two of the better half, and so on."""
        found: dict[str, Measured] = {}
        left = list(candidates)
        for rounds in range(1, ROUNDS):
            self.say(f"measuring {len(left)} candidates, {rounds} rounds")
            found |= self.measure(left, rounds, memory=memory)
            trained = sorted(
                (one for one in left if not found[one.name].failure), key=lambda o: found[o.name].best
            )
            left = trained[: max(2, (len(trained) + 1) // 2)]
        self.say(f"measuring {len(left)} candidates, {ROUNDS} rounds or more")
        return found | self.settle(left, memory=memory)

    def _known(self, number: int, candidate: Candidate) -> Any:
        failed = self.journal.get(_MEASURED, f"{candidate.name} | failed")
        return failed or self.journal.get(_MEASURED, self._key(number, candidate))

    def _key(self, number: int, candidate: Candidate) -> str:
        reduced = " ".join(f"{flag} {value}" for flag, value in (self.settings or {}).items())
        return " | ".join(filter(None, (candidate.name, reduced, f"round {number}")))

    def _of(self, candidate: Candidate, rounds: int) -> Measured:
        failed = self.journal.get(_MEASURED, f"{candidate.name} | failed")
        if failed:
            return Measured(failure=failed["failure"])
        found = [self.journal.get(_MEASURED, self._key(number, candidate)) for number in range(rounds)]
        peaks = [one["peak"] for one in found if one["peak"] is not None]
        return Measured(
            tuple(min(one["times"]) for one in found),
            max(peaks, default=None),
            max(one["load"] for one in found),
        )

    def _world(self, queue: Sequence[tuple[int, Candidate]], memory: bool) -> list[tuple[int, Candidate]]:
        """Run a queue in one world until one fails; return what is left of it."""
        from mindspeed_testing.worlds import WorldError, WorldTimeout, run_world

        lines = [
            (self._key(number, one), self._arguments(one), memory and number == 0) for number, one in queue
        ]
        failure = ""
        with self._results_file() as file:
            try:
                run_world(
                    self.train,
                    self.command.world_size,
                    lines,
                    str(file),
                    STEPS,
                    self.limit,
                    self.platform,
                    timeout=self.limit * len(lines) + 60.0,
                    env=self.command.environment,
                )
            except WorldTimeout:
                failure = f"hangs: no result after {self.limit:g} s"
            except WorldError as error:
                failure = _reason(error, self.limit)
            began, ended = self._take(file)
        if not failure or ended == len(queue):
            return []
        if not began:
            raise UserError(f"no world of {self.command.world_size} processes starts here: {failure}")
        culprit = queue[ended][1]
        self.journal.put(_MEASURED, f"{culprit.name} | failed", {"failure": failure})
        self.say(f"{culprit.name}: {failure}")
        return [one for one in queue[ended + 1 :] if one[1].name != culprit.name]

    @contextmanager
    def _results_file(self) -> Iterator[Path]:
        """Yield an empty file for the results of a world; beside the journal they outlive a kill."""
        if self.journal.folder is None:
            with tempfile.TemporaryDirectory(prefix="mindspeed-tune-") as folder:
                yield Path(folder) / _RUNNING
            return
        file = self.journal.folder / _RUNNING
        file.unlink(missing_ok=True)
        yield file
        file.unlink(missing_ok=True)

    def _take(self, file: Path) -> tuple[int, int]:
        """Take a file's results into the journal; return how many candidates began and ended in it."""
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        # What follows the last line's end was being written when its world died.
        found = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
        done = [line for line in found if line["kind"] == END]
        for line in done:
            self.journal.put(
                _MEASURED, line["name"], {name: line[name] for name in ("times", "peak", "load")}
            )
        return sum(line["kind"] == BEGIN for line in found), len(done)

    def _arguments(self, candidate: Candidate) -> tuple[str, ...]:
        short = {**_NEVER, "--eval-iters": 0, "--log-interval": 1_000_000, "--num-workers": 0}
        settings = {flag: value for flag, value in short.items() if flag in self.flags}
        one = candidate.with_settings({**settings, **(self.settings or {})})
        return one.arguments(self.command.arguments, self.flags)


def _reason(error: Any, limit: float) -> str:
    cause = error.failures[0]
    if f"status {HANGS} " in cause.reason:
        return f"hangs: no result after {limit:g} s"
    return f"rank {cause.rank}: {cause.reason.splitlines()[0]}"


def ignored(arguments: Sequence[str]) -> list[str]:
    """Return a note for folders of checkpoints in a command, which short runs and dry runs leave alone."""
    found = [flag for flag in ("--load", "--save") if any(w.partition("=")[0] == flag for w in arguments)]
    return [f"{' and '.join(found)}: ignored; nothing is read or written there"] if found else []


def check_one_node(command: LaunchCommand) -> None:
    """Refuse to time ranks of several nodes: short runs start all of them on this machine.

    Raises:
        UserError: the launcher says that there are several nodes.
    """
    per_node = command.ranks_per_node
    if per_node is not None and command.world_size > per_node:
        raise UserError(
            f"{command.world_size:,} ranks on nodes of {per_node}: short runs start all of them on this "
            "machine, whose links are not those between nodes; time one node (--nnodes 1), and take links "
            "between nodes from a file, calibrate's --tune-hardware FILE"
        )


def check_processors(world_size: int) -> str:
    """Return a note on the load where more processes are to be timed than there are free processors.

    Raises:
        UserError: there are more processes than processors.
    """
    from mindspeed_tune.threads import processors

    count, load = processors(), os.getloadavg()[0]
    if world_size > count:
        raise UserError(
            f"{world_size} processes on {count} processors wait for each other, and their times mean "
            "nothing; "
            f"measure up to {count} ranks here, or on a machine with more"
        )
    if load > count - world_size + 0.5:
        return (
            f"the machine was busy: load {load:.1f} on {count} processors before {world_size} "
            "processes were timed"
        )
    return ""


def ranked_by_time(measured: Mapping[str, Measured]) -> tuple[list[str], str]:
    """Return the candidates that trained, fastest first, and why times tell no order; empty where they do."""
    trained = sorted(
        (name for name in measured if not measured[name].failure), key=lambda name: measured[name].best
    )
    several = [measured[name] for name in trained if len(measured[name].seconds) > 1]
    noisy = [one for one in several if one.typical > APART]
    if several and len(noisy) * 2 > len(several):
        loads = max(one.load for one in several)
        return trained, (
            f"rounds of the same candidate differ by up to {max(one.spread for one in several):.0%} "
            f"(load {loads:.1f}): times here tell no order"
        )
    return trained, ""


def equal(one: Measured, other: Measured) -> bool:
    """Return whether two candidates are closer to each other than their own rounds are."""
    return abs(one.best - other.best) <= max(one.doubt * one.best, other.doubt * other.best)


def undecided(measured: Mapping[str, Measured]) -> set[str]:
    """Return the candidates that further rounds may tell from a neighbour in the ranking.

    Both of a pair get them: a machine is faster in one minute than in another, and so would seem the one that
    alone had more rounds.
    """
    trained = {name: one for name, one in measured.items() if not one.failure}
    found: set[str] = set()
    for pair in pairwise(sorted(trained, key=lambda name: trained[name].best)):
        one, other = (trained[name] for name in pair)
        if equal(one, other) and max(one.doubt, other.doubt) > REPEATED:
            found.update(pair)
    return found


def apart(measured: Mapping[str, Measured]) -> set[str]:
    """Return the candidates whose rounds disagree."""
    return {name for name, one in measured.items() if one.seconds and one.typical > APART}
