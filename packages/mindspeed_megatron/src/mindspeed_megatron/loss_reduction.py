"""The losses that micro-batches reported, reduced to those of a step: one collective for all names.

A collective needs the same names on all ranks, and what is reported may depend on the data. So ranks agree on
names once, and again after a step in which one of them had another name: that they learn from the reduction
itself, and no step waits for another rank's Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_core.feature import hookimpl
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.losses import Losses, copied_later

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


@dataclass
class _Agreed:
    """The names that ranks reduce together.

    Attributes:
        names: in order; None before the first step.
        others: reads whether a rank had a name that is not among them in the last step.
    """

    names: tuple[str, ...] | None = None
    others: Callable[[], list[float]] | None = None


@hookimpl(trylast=True)
def reduce_losses(
    session: Session, run: Run, reports: Sequence[Mapping[str, torch.Tensor]], training: bool
) -> Losses:
    """Sum ``[sum, count]`` over micro-batches and ranks, by Megatron-LM's rule, and divide when read."""
    if _groups(run) == (None, None):
        return _of_this_process(session, reports)
    names, table = reduced_table(run, reports, training=training)
    return losses_of(names, copied_later(table, session.platform))


def _of_this_process(session: Session, reports: Sequence[Mapping[str, torch.Tensor]]) -> Losses:
    """Return the losses where no other rank has any: no names to agree on, no table to reduce."""
    names = _reported(reports)
    if not names:
        return Losses(dict)
    pairs = [[_pair(name, report[name]) for report in reports if name in report] for name in names]
    sums = torch.stack([torch.stack(found).sum(dim=0) for found in pairs])
    read = copied_later(sums, session.platform)
    return losses_of(names, lambda: [[*pair, 1.0] for pair in read()])


def losses_of(names: Sequence[str], values: Callable[[], list[list[float]]]) -> Losses:
    """Return the losses in a table of `reduced_table`, whose values are read when a loss is."""

    def reported() -> dict[str, list[float]]:
        return {name: row for name, row in zip(names, values()) if row[2]}

    def means() -> dict[str, float]:
        return {name: total / count if count else 0.0 for name, (total, count, _) in reported().items()}

    return Losses(means, Losses(lambda: {name: row[1] for name, row in reported().items()}))


def reduced_table(
    run: Run, reports: Sequence[Mapping[str, torch.Tensor]], *, training: bool
) -> tuple[tuple[str, ...], torch.Tensor]:
    """Return what several ranks reported under each name in a step, the same on each. Collective.

    Args:
        run: the run.
        reports: of this rank's micro-batches, empty where no loss is computed. A report of one value is a
            mean and counts as one.
        training: False in an evaluation, where ranks agree on names every time. In training a name that comes
            up after the first step is missing from that step.

    Returns:
        The names, and float32 ``[names + 1, 3]``: sum, count, and how often it was reported.

    Raises:
        ValueError: a report is neither ``[sum, count]`` nor one value.
    """
    names, table = own_table(run, reports, training=training)
    data, pipeline = _groups(run)
    if data is not None and reports:
        dist.all_reduce(table, group=data)
    if pipeline is not None:
        dist.all_reduce(table, group=pipeline)
    if training:
        remember_others(run, copied_later(table[-1], run.session.platform))
    return names, table


def remember_others(run: Run, read: Callable[[], list[float]]) -> None:
    """Keep how to read the last row of a step's reduced table, which tells whether names were missing."""
    run.session.state(_Agreed).others = read


def own_table(
    run: Run, reports: Sequence[Mapping[str, torch.Tensor]], *, training: bool
) -> tuple[tuple[str, ...], torch.Tensor]:
    """Return what this rank reported, in the form of `reduced_table` before its reduction.

    Ranks agree on the names, which is collective where they have not done so yet.

    Args:
        run: the run.
        reports: see `reduced_table`.
        training: see `reduced_table`.
    """
    groups = _groups(run)
    local = _reported(reports)
    names = _names(run, local, groups, training)
    device = next((value.device for report in reports for value in report.values()), None)
    # The last row tells of names that are not in the table.
    table = torch.zeros(len(names) + 1, 3, device=device or run.dist.device)
    for row, name in zip(table, names):
        found = [_pair(name, report[name]) for report in reports if name in report]
        if found:
            row[:2] = torch.stack(found).sum(dim=0)
            row[2] = len(found)
    if not set(local) <= set(names):
        table[-1] = 1.0
    return names, table


def with_same_names(
    run: Run, reports: Sequence[Mapping[str, torch.Tensor]], *, training: bool
) -> list[dict[str, torch.Tensor]]:
    """Return reports with the same names in the same order, in every micro-batch and on every rank.

    For a reduction that goes by the names of the first micro-batch. Nothing is added to a sum or a count; a
    name that nobody reported comes out as 0. Collective over the ranks of the data.

    Args:
        run: the run.
        reports: see `reduced_table`.
        training: see `reduced_table`.
    """
    if not reports:
        return []
    data, _ = groups = (_groups(run)[0], None)
    local = _reported(reports)
    names = _names(run, local, groups, training)
    if data is not None and training:
        others = torch.tensor([float(not set(local) <= set(names))], device=run.dist.device)
        dist.all_reduce(others, group=data)
        run.session.state(_Agreed).others = copied_later(others, run.session.platform)
    # Vanishes beside any count, and keeps 0 / 0 out.
    nothing = torch.tensor([0.0, torch.finfo(torch.float32).tiny], device=run.dist.device)
    return [{name: report.get(name, nothing) for name in names} for report in reports]


def _reported(reports: Sequence[Mapping[str, torch.Tensor]]) -> list[str]:
    return list(dict.fromkeys(name for report in reports for name in report))


def _groups(run: Run) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the groups over which losses are summed: those of the data, and those of pipeline stages."""
    if run.pg is None:
        return None, None
    data, pipeline = run.pg.dp_cp, run.pg.pp
    return (data if data.size() > 1 else None), (pipeline if pipeline.size() > 1 else None)


def _names(run: Run, local: list[str], groups: tuple[Any, Any], training: bool) -> tuple[str, ...]:
    alone = groups == (None, None)
    if not training:
        return tuple(local) if alone else _union(local, groups)
    agreed = run.session.state(_Agreed)
    known = agreed.names or ()
    if alone:
        agreed.names = (*known, *(name for name in local if name not in known))
    elif agreed.names is None or _others_had_more(run, agreed):
        # In a dry run the other ranks say what this one says, and a stage without loss would hear of none.
        told = ["lm loss"] if run.session.platform.dry_run and not local else local
        agreed.names = _union([*known, *told], groups)
    assert agreed.names is not None
    return agreed.names


def _others_had_more(run: Run, agreed: _Agreed) -> bool:
    if run.session.platform.dry_run or agreed.others is None:
        return False
    return bool(agreed.others()[0])


def _union(names: Sequence[str], groups: tuple[Any, Any]) -> tuple[str, ...]:
    """Return every rank's names, in an order that is the same on all."""
    for group in groups:
        if group is not None:
            names = [name for part in all_gather_values(list(names), group) for name in part]
    return tuple(dict.fromkeys(names))


def _pair(name: str, value: torch.Tensor) -> torch.Tensor:
    value = value.detach().float().reshape(-1)
    if value.numel() == 1:
        return torch.cat([value, value.new_ones(1)])
    if value.numel() != 2:
        raise ValueError(f"{name!r}: a report is [sum, count], this has {value.numel()} values")
    return value
