"""Positions of a micro-batch that are no tokens: what a model chunk is told of them, and what a step counts.

``Batch.padding_mask`` says which positions fill up. megatron-core's GPT hands it to the routers of its
layers. It splits the mask over the ranks of sequence parallelism on the first pipeline stage alone, so later
stages get their part here. What its routers then do with it is corrected in `expert_losses`.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_megatron.flops import count_run, uncounted
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Batch, Run

_UNIT = 1000.0
"""Operations are summed over ranks in thousands, as whole numbers."""


def padding_options(run: Run, batch: Batch, chunk: Any, *, planned: bool = False) -> dict[str, Any]:
    """Return what a model chunk is called with so that its routers leave out positions that are no tokens.

    Args:
        run: the run in progress.
        batch: of the chunk's pipeline stage.
        chunk: the model chunk, wrapped or not.
        planned: the chunk is asked for a plan of its layers and not run.

    Returns:
        ``padding_mask``, or nothing where there is no padding or no expert.

    Raises:
        UserError: megatron-core loses the mask on its way to the routers.
    """
    mask, config = batch.padding_mask, run.config
    if mask is None or config.num_moe_experts is None:
        return {}
    chunk = unwrap(chunk)
    _check_reaches_routers(config, type(chunk), planned)
    if config.sequence_parallel and not chunk.pre_process:
        rank, size = run.pg.tp.rank(), run.pg.tp.size()
        mask = mask.chunk(size, dim=1)[rank].contiguous()
    return {"padding_mask": mask}


def _check_reaches_routers(config: Any, model: type, planned: bool) -> None:
    lost = ""
    if not _takes_mask(model):
        lost = f"{model.__name__} takes no padding_mask (megatron-core's GPT does since 0.16)"
    elif planned:
        lost = "a schedule that overlaps parts of layers does not hand it to their routers"
    elif getattr(config, "mtp_num_layers", None):
        lost = "--mtp-num-layers: layers that predict further tokens do not get it"
    elif config.moe_expert_capacity_factor is not None:
        lost = "--moe-expert-capacity-factor: the capacity of an expert counts all positions"
    elif config.moe_permute_fusion:
        lost = "--moe-permute-fusion: the fused kernel expects that every position has its experts"
    if lost:
        raise UserError(
            f"the samples are filled up with positions that are no tokens, and routers of experts have to "
            f"know them: {lost}; drop the flag, or train on samples of one length"
        )


@functools.cache
def _takes_mask(model: type) -> bool:
    return "padding_mask" in inspect.signature(model.forward).parameters  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StepWork:
    """The work of a step whose samples are filled up, over all ranks.

    Attributes:
        tokens: positions that are tokens.
        samples: how many samples of ``--seq-length`` tokens cost as much; None where the formula does not
            cover the model.
        model: floating-point operations, see `flops.FlopCount`; None likewise.
        hardware: with those of recomputed activations; None likewise.
    """

    tokens: int
    samples: float | None = None
    model: float | None = None
    hardware: float | None = None


@dataclass
class StepLengths:
    """The lengths of the samples that this rank has read in the step under way.

    Attributes:
        lengths: ``[b]`` int64 on the device by micro-batch: positions that are tokens.
        work: of the last finished step; None where its samples were not filled up.
    """

    lengths: dict[int, torch.Tensor] = field(default_factory=dict)
    work: StepWork | None = None

    def note(self, run: Run, batch: Batch) -> None:
        """Remember a micro-batch of this rank; its further chunks, and repetitions, have the same one."""
        context = run.context
        if batch.padding_mask is None or run.session.platform.dry_run:
            return
        if context.training and not context.vp_stage:
            self.lengths[context.microbatch] = (~batch.padding_mask).sum(dim=1)

    def finish(self, run: Run) -> StepWork | None:
        """Return the work of the step, and begin the next one. Collective where samples are filled up."""
        lengths, self.lengths = [*self.lengths.values()], {}
        self.work = _work_of(run, torch.cat(lengths)) if lengths else None
        return self.work


def _work_of(run: Run, lengths: torch.Tensor) -> StepWork:
    if run.pg.cp.size() > 1:
        # A rank has its part of each sample.
        dist.all_reduce(lengths, group=run.pg.cp)
    found = lengths.tolist()
    counted = not uncounted(run.config)
    operations = functools.cache(lambda length: _operations(run, length) if counted else (0.0, 0.0))
    totals = [
        sum(found),
        *(round(sum(operations(length)[part] for length in found) / _UNIT) for part in (0, 1)),
    ]
    if run.pg.dp.size() > 1:
        # Not every backend sums float64, and float32 has no counts of operations.
        table = torch.tensor(totals, dtype=torch.int64, device=run.dist.device)
        dist.all_reduce(table, group=run.pg.dp)
        totals = table.tolist()
    tokens, model, hardware = totals[0], totals[1] * _UNIT, totals[2] * _UNIT
    if not counted:
        return StepWork(tokens)
    return StepWork(tokens, model / operations(run.args.seq_length)[0], model, hardware)


def _operations(run: Run, length: int) -> tuple[float, float]:
    if not length:
        return 0.0, 0.0
    found = count_run(run, length)
    return found.model, found.hardware
