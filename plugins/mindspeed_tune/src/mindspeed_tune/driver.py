"""The ranks of a plan: which ones are run, and their records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_tune.kinds import chosen_ranks, group_partners, kinds_of, stage_partners
from mindspeed_tune.launch_command import LaunchCommand
from mindspeed_tune.layout import RANKS_PER_NODE, Layout
from mindspeed_tune.record import RankRecord

KINDS, ALL = "kinds", "all"
_MOST = 512
_NPU = "fake-npu"


class PlanError(UserError):
    """A rank could not be planned: the command itself is wrong, or its code does not run without values."""


class Ranks:
    """Runs ranks of one command, each in a fresh process forked from one that has everything imported."""

    def __init__(
        self,
        command: LaunchCommand,
        *,
        platform: str = "fake",
        exact_layers: bool = False,
        exact_microbatches: bool = False,
        skew: float | None = None,
        parallel: int | None = None,
    ) -> None:
        """Plan a command.

        Args:
            command: that starts the training.
            platform: a dry run.
            exact_layers: run all layers.
            exact_microbatches: run all micro-batches.
            skew: tokens of this rank's experts, as a multiple of the average.
            parallel: ranks at once, by default one per processor.
        """
        self.command = command
        self.platform = platform
        self.exact_layers, self.exact_microbatches = exact_layers, exact_microbatches
        self.skew = skew
        self.parallel = parallel or os.cpu_count() or 1
        self.per_node = command.ranks_per_node or RANKS_PER_NODE
        self._process: subprocess.Popen[str] | None = None
        self._files = ExitStack()

    def __enter__(self) -> Ranks:
        """Start the process that forks ranks.

        Raises:
            UserError: the kernels of NPUs are wanted, and torch_npu or its stand-in runtime is missing.
        """
        environment = {
            **(self._stand_ins() if self.platform == _NPU else os.environ),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_tune.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        if kind is not None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._files.close()

    def _stand_ins(self) -> Mapping[str, str]:
        """Return the environment of a process that imports torch_npu where there is no NPU.

        The libraries are made in a temporary folder, for the installed version.
        """
        from mindspeed_megatron.fake.npu import STAND_IN

        if os.environ.get(STAND_IN) == "1":
            return os.environ
        try:
            from mindspeed_testing.npu.stubs import build_stubs, installed_version
        except ModuleNotFoundError:
            raise UserError(
                "--plan-target npu needs a stand-in runtime: pip install mindspeed-tune[npu], or plan "
                "with --plan-target cpu"
            ) from None
        try:
            installed_version()
            folder = self._files.enter_context(tempfile.TemporaryDirectory(prefix="mindspeed-npu-"))
            return build_stubs(Path(folder)).environment(device=True)
        except UserError as error:
            raise UserError(f"--plan-target npu: {error}") from None

    def run(self, ranks: Sequence[int], *, only_order: bool = False) -> list[RankRecord]:
        """Run ranks; return their records in the order asked for.

        Raises:
            PlanError: one of them cannot be planned.
        """
        outcomes = {outcome["rank"]: outcome for outcome in self._outcomes(ranks, only_order)}
        return [self._record(outcomes[rank]) for rank in ranks]

    def _outcomes(self, ranks: Sequence[int], only_order: bool) -> Iterable[dict[str, Any]]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("enter the context first")
        jobs = [
            {
                "rank": rank,
                "world_size": self.command.world_size,
                "per_node": self.per_node,
                "platform": self.platform,
                "command": asdict(self.command),
                "options": {
                    "exact_layers": self.exact_layers,
                    "exact_microbatches": self.exact_microbatches,
                    "only_order": only_order,
                },
                "skew": self.skew,
            }
            for rank in ranks
        ]
        process.stdin.write(json.dumps({"jobs": jobs, "parallel": self.parallel}) + "\n")
        process.stdin.flush()
        found: list[dict[str, Any]] = []
        for line in process.stdout:
            outcome = json.loads(line)
            if not outcome:
                return found
            found.append(outcome)
        raise PlanError("the process that runs ranks ended unexpectedly; its last words stand above")

    def _record(self, outcome: dict[str, Any]) -> RankRecord:
        if outcome["kind"] == "record":
            return RankRecord.from_json(outcome["record"])
        if outcome["kind"] == "explained":
            raise PlanError(outcome["text"])
        told = [f"rank {outcome['rank']} could not be planned: {outcome['text']}"]
        if os.environ.get("MINDSPEED_TRACEBACK") and outcome.get("traceback"):
            told.append(outcome["traceback"])
        elif outcome.get("output", "").strip():
            told += [
                "it printed last:",
                *(f"  {line}" for line in outcome["output"].strip().splitlines()[-6:]),
            ]
        raise PlanError("\n".join(told))


def records_of(ranks: Ranks, wanted: str = KINDS) -> list[RankRecord]:
    """Run the ranks that a plan is made of.

    Args:
        ranks: the open runner.
        wanted: ``kinds`` (one rank of every kind, and a partner for every kind of call), ``all``, or a list.

    Raises:
        PlanError: a rank cannot be planned.
        UserError: ``wanted`` names no ranks of the world.
    """
    world = ranks.command.world_size
    if wanted == ALL:
        if world > _MOST:
            raise UserError(
                f"--plan-ranks all runs {world:,} processes; use kinds, or name up to {_MOST} ranks"
            )
        return ranks.run(range(world))
    if wanted != KINDS:
        return ranks.run(chosen_ranks(wanted, world))
    [first] = ranks.run([0])
    layout: Layout = first.layout
    kinds = kinds_of(layout, first.stages)
    representatives = [kind.representative for kind in kinds if kind.representative != 0]
    found = [first, *ranks.run(representatives)]
    known = [record.rank for record in found]
    partners = [rank for rank in stage_partners(layout, kinds) if rank not in known]
    checked: set[tuple[str, str]] = set()
    for record in found:
        partners += group_partners(record, [*known, *partners], checked)
    partners = list(dict.fromkeys(partners))
    return [*found, *ranks.run(partners, only_order=True)] if partners else found
