"""Default validation: the mean loss over some batches, or over every sample, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.feature import hookimpl
from mindspeed_train.step import run_schedule

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@hookimpl(trylast=True)
def evaluate(run: Run, split: str) -> dict[str, float]:
    """Run a split forward: ``--eval-iters`` global batches, or all of it with ``--full-validation``.

    With ``--multiple-validation-sets`` each loss is there once per dataset, as ``"lm loss NAME"``, and its
    mean over the datasets under its own name.
    """
    assert run.data is not None
    assert run.datasets is not None
    sets: dict[str, tuple[Any, Any]] = {"": (getattr(run.datasets, split), getattr(run.data, split))}
    if split == "valid" and run.data.valid_sets:
        sets = {
            name: (run.datasets.valid_sets[name], iterators)
            for name, iterators in run.data.valid_sets.items()
        }
    found: dict[str, dict[str, float]] = {}
    for name, (dataset, iterators) in sets.items():
        steps = run.args.eval_iters
        if split == "valid" and run.args.full_validation and dataset is not None:
            steps = -(-len(dataset) // run.args.global_batch_size)
        if run.session.platform.dry_run:
            # Every batch is like the first.
            steps = min(steps, 1)
        if iterators is not None and steps:
            found[name] = _losses(run, iterators, steps)
    if split == "valid" and found and not run.args.full_validation:
        # Every set advances by the same number of samples.
        run.consumed_valid_samples += run.args.eval_iters * run.args.global_batch_size
    if set(found) <= {""}:
        return found.get("", {})
    losses = {f"{key} {name}": value for name, each in found.items() for key, value in each.items()}
    by_key: dict[str, list[float]] = {}
    for each in found.values():
        for key, value in each.items():
            by_key.setdefault(key, []).append(value)
    return {**{key: sum(values) / len(values) for key, values in by_key.items()}, **losses}


def _losses(run: Run, iterators: list[Iterator[Any]], steps: int) -> dict[str, float]:
    for chunk in run.model:
        chunk.eval()
    reports: list[dict[str, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for _ in range(steps):
                reports += run_schedule(run, iterators, run.args.num_microbatches, forward_only=True)
    finally:
        for chunk in run.model:
            chunk.train()
    return dict(run.session.call("reduce_losses", run=run, reports=reports, training=False))
