"""Cells of candidates: those that one small pipeline tells everything about, and its dry runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_core.flags.flag_set import FlagSet
from mindspeed_tune.candidate import (
    CHUNKS,
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    GLOBAL_BATCH,
    GRADIENT_OVERLAP,
    LAYERS_PER_CHUNK,
    MICRO_BATCH,
    PARAMETER_OVERLAP,
    PIPELINE,
    TENSOR,
    Candidate,
)
from mindspeed_tune.compose import Cell, Target
from mindspeed_tune.driver import Ranks
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import LaunchCommand
from mindspeed_tune.layout import Layout
from mindspeed_tune.record import RankRecord
from mindspeed_tune.small_pipeline import LAYERS, MICROBATCHES, STAGES, NotComposable, slim
from mindspeed_tune.warm_process import PlanError, WarmProcess

_BY_ARITHMETIC = (
    PIPELINE,
    MICRO_BATCH,
    LAYERS_PER_CHUNK,
    CHUNKS,
    GRADIENT_OVERLAP,
    PARAMETER_OVERLAP,
)
_RECORDS = "cell"


@dataclass(frozen=True)
class CellKey:
    """Settings that the candidates of a cell share.

    Attributes:
        settings: those that its dry runs depend on.
    """

    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, candidate: Candidate) -> CellKey:
        """Return the cell of a candidate."""
        return cls(tuple(item for item in candidate.settings.items() if item[0] not in _BY_ARITHMETIC))

    @property
    def name(self) -> str:
        """Return its settings on one line."""
        return Candidate(dict(self.settings)).name

    def data_parallel(self) -> int:
        """Return the least data-parallel size in which every group has two ranks, those of experts too."""
        one = Candidate(dict(self.settings))
        dense = one.size(TENSOR) * one.size(CONTEXT)
        expert = one.size(EXPERT) * (one.size(EXPERT_TENSOR, one.size(TENSOR)))
        size = 2
        while dense * size % (2 * expert):
            size += 1
        return size

    def command(self, command: LaunchCommand, flags: FlagSet, micro_batch_size: int) -> LaunchCommand:
        """Return the launch of the small pipeline."""
        one = Candidate(dict(self.settings))
        dp = self.data_parallel()
        small = one.with_settings(
            {
                PIPELINE: STAGES,
                "--num-layers": STAGES * LAYERS,
                MICRO_BATCH: micro_batch_size,
                GLOBAL_BATCH: MICROBATCHES * micro_batch_size * dp,
                "--rampup-batch-size": None,
                "--step-batch-size-schedule": None,
                **dict.fromkeys((LAYERS_PER_CHUNK, CHUNKS, GRADIENT_OVERLAP, PARAMETER_OVERLAP)),
            }
        )
        world = one.size(TENSOR) * one.size(CONTEXT) * STAGES * dp
        return small.command(command, flags, world_size=world)

    def ranks(self) -> list[int]:
        """Return a rank of every stage of the small pipeline."""
        one = Candidate(dict(self.settings))
        stage = one.size(TENSOR) * one.size(CONTEXT) * self.data_parallel()
        return [place * stage for place in range(STAGES)]


@dataclass
class Cells:
    """Runs cells, and estimates candidates from them.

    Attributes:
        command: the user's.
        flags: that exist.
        process: that runs ranks.
        journal: of the search.
    """

    command: LaunchCommand
    flags: FlagSet
    process: WarmProcess
    journal: Journal

    def run(self, key: CellKey, sizes: Iterable[int]) -> Cell:
        """Return a cell, from the journal where it has it.

        Args:
            key: which.
            sizes: micro-batch sizes that are asked for; the smallest two are run.

        Raises:
            NotComposable: other pipelines do not follow from it, or it cannot be run.
        """
        wanted = sorted(set(sizes))[:2]
        known = f"{key.name} | {' '.join(map(str, wanted))}"
        found = self.journal.get(_RECORDS, known)
        if found is None:
            found = self._run(key, wanted)
            self.journal.put(_RECORDS, known, found)
        if "failed" in found:
            raise NotComposable(found["failed"])
        return Cell.of(
            {int(size): [RankRecord.from_json(one) for one in records] for size, records in found.items()}
        )

    def _run(self, key: CellKey, sizes: list[int]) -> dict[str, Any]:
        try:
            found = {}
            for size in sizes:
                command = key.command(self.command, self.flags, size)
                with Ranks(command, process=self.process, reliefs=False) as ranks:
                    found[str(size)] = [slim(one).as_json() for one in ranks.run(key.ranks())]
        except PlanError as error:
            return {"failed": str(error)}
        return found


def target_of(candidate: Candidate, args: Any, world_size: int, model_flops: float, order: str) -> Target:
    """Return what a candidate asks its cell.

    Args:
        candidate: which.
        args: its validated arguments.
        world_size: ranks.
        model_flops: operations of the model in a step.
        order: of the dimensions of ranks.

    Raises:
        NotComposable: its pipeline stages are not equal.
    """
    tp, cp, pp = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.pipeline_model_parallel_size,
    )
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    if args.num_layers % (pp * chunks) or any(getattr(args, name, None) for name in _UNEVEN):
        raise NotComposable("its pipeline stages differ")
    layout = Layout(
        world_size,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=getattr(args, "expert_model_parallel_size", None) or 1,
        etp=getattr(args, "expert_tensor_parallel_size", None) or tp,
        vpp=chunks,
        order=order,
    )
    return Target(
        layout=layout,
        layers=args.num_layers,
        microbatches=args.global_batch_size // (args.micro_batch_size * layout.dp),
        micro_batch_size=args.micro_batch_size,
        overlap=bool(getattr(args, "overlap_grad_reduce", False)),
        model_flops=model_flops,
        overlap_gather=bool(getattr(args, "overlap_param_gather", False)),
    )


_UNEVEN = (
    "num_layer_list",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "noop_layers",
    "mtp_num_layers",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
)


def by_cell(candidates: Iterable[Candidate]) -> Mapping[CellKey, list[Candidate]]:
    """Return the candidates of every cell, in order."""
    found: dict[CellKey, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(CellKey.of(candidate), []).append(candidate)
    return found


ASKED = (
    *_UNEVEN,
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "global_batch_size",
    "micro_batch_size",
    "seq_length",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "recompute_granularity",
)
"""Validated arguments that are kept of every candidate."""
