"""Default validation: the mean loss over some batches, without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mindspeed_core.feature import hookimpl
from mindspeed_core.hosts.standalone.step import reduce_reports, run_schedule, without_param_gather

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@hookimpl(trylast=True)
def evaluate(run: Run, split: str) -> dict[str, float]:
    """Run ``--eval-iters`` global batches of a split forward."""
    assert run.data is not None
    iterators = getattr(run.data, split)
    if iterators is None or run.args.eval_iters == 0:
        return {}
    for chunk in run.model:
        chunk.eval()
    reports: list[dict[str, torch.Tensor]] = []
    try:
        with without_param_gather(run, param_sync=True), torch.no_grad():
            for _ in range(run.args.eval_iters):
                reports += run_schedule(run, iterators, run.args.num_microbatches, forward_only=True)
    finally:
        for chunk in run.model:
            chunk.train()
    if split == "valid":
        run.consumed_valid_samples += run.args.eval_iters * run.args.global_batch_size
    return reduce_reports(run, reports)
