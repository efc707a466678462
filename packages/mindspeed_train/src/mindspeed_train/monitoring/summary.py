"""The summary of a run: ``summary.html``, one file that needs no other, and the same as ``summary.md``.

Says what was run (command, plan, versions, layout), how it went (losses, throughput, curves) and where its
checkpoints are. Written by rank 0 at the end of a run, also of one that failed.
"""

from __future__ import annotations

import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import clean, for_html, for_markdown
from mindspeed_train.checkpoint.source import published_names
from mindspeed_train.data.identity import TrainingData
from mindspeed_train.monitoring.curves import (
    LOSS,
    Points,
    loss_series,
    series,
    svg_curve,
    wanted,
)
from mindspeed_train.monitoring.measures import Measures
from mindspeed_train.monitoring.throughput import operations_of

if TYPE_CHECKING:
    from mindspeed_core.run import Run

Rows = list[tuple[str, str]]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2rem; border-bottom: 1px solid #8884; } table { border-collapse: collapse; }
td { padding: .15rem 1rem .15rem 0; vertical-align: top; } td:first-child { color: #777; }
pre { white-space: pre-wrap; background: #8882; padding: .6rem; } svg { width: 100%; height: auto; }
:root { color-scheme: light dark; }
"""


@dataclass(frozen=True)
class Summary:
    """The content of both pages.

    Attributes:
        title: one line.
        command: the command line of the run.
        sections: rows of name and value by heading.
        curves: series of ``(step, value)`` by chart and name.
    """

    title: str
    command: str
    sections: Mapping[str, Rows]
    curves: Mapping[str, Mapping[str, Points]] = field(default_factory=dict)


def write_summary(run: Run) -> None:
    """Write both pages into the run's folder."""
    assert run.run_dir is not None
    summary = summarize(run)
    (run.run_dir / "summary.html").write_text(as_html(summary), encoding="utf-8")
    (run.run_dir / "summary.md").write_text(as_markdown(summary), encoding="utf-8")


def summarize(run: Run) -> Summary:
    """Collect what the pages show, from this process alone: other ranks may be gone."""
    args = run.args
    done = f"step {run.iteration} of {args.train_iters}"
    if run.iteration >= args.train_iters:
        done = f"all {args.train_iters} steps"
    sections = {
        "Result": _result(run.history),
        "Throughput": _throughput(run),
        "Layout": _layout(run),
        "Features": _features(run),
        "Checkpoints": _checkpoints(args.save),
        "Training data": _data(run),
        "Versions": _versions(run),
    }
    return Summary(
        title=f"{run.run_dir.name if run.run_dir else 'run'}: {done}",
        command=shlex.join(sys.argv),
        sections={name: rows for name, rows in sections.items() if rows},
        curves=curves_of(run.history) if wanted() else {},
    )


def _data(run: Run) -> Rows:
    """Return the digest of each dataset that the run trains on, by which a resumed run knows it again."""
    record = run.session.state(TrainingData).record
    return [
        (one["prefix"], f"{one['digest']}" + ("" if one["weight"] is None else f", weight {one['weight']}"))
        for one in record.get("train", ())
    ]


def curves_of(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Points]]:
    """Return the series of a run's records by chart."""
    return {
        LOSS: loss_series(history),
        "gradient norm": {"norm": series(history, "grad_norm")},
        "learning rate": {"rate": series(history, "learning_rate")},
        "tokens per second": {"all devices": series(history, "tokens_per_second")},
    }


def as_markdown(summary: Summary) -> str:
    """Format the page as Markdown."""
    # Indented, so that no fence in the text can end it.
    lines = [f"# {for_markdown(summary.title)}", "", f"    {clean(summary.command)}"]
    for name, rows in summary.sections.items():
        lines += ["", f"## {for_markdown(name)}", "", "| | |", "|---|---|"]
        lines += [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows]
    if summary.curves:
        lines += ["", "## Curves", "", "![loss over steps](loss_curve.png)"]
    return "\n".join([*lines, ""])


def as_html(summary: Summary) -> str:
    """Format the page as HTML that refers to nothing outside itself."""
    title = for_html(summary.title)
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f"<pre>{for_html(summary.command)}</pre>",
        *(svg_curve(name, series) for name, series in summary.curves.items()),
    ]
    for name, rows in summary.sections.items():
        body = "\n".join(f"<tr><td>{for_html(k)}</td><td>{for_html(v)}</td></tr>" for k, v in rows)
        parts.append(f"<h2>{for_html(name)}</h2><table>\n{body}\n</table>")
    return "\n".join([*parts, "</body></html>", ""])


def _result(history: Sequence[Mapping[str, Any]]) -> Rows:
    rows: Rows = []
    losses = [(row["loss"], row["step"]) for row in history if row.get("loss") is not None]
    if losses:
        lowest = min(losses)
        rows.append(("training loss", f"{losses[0][0]:.6f} at step {losses[0][1]}"))
        rows.append(("", f"{lowest[0]:.6f} at step {lowest[1]} (lowest)"))
        rows.append(("", f"{losses[-1][0]:.6f} at step {losses[-1][1]} (last)"))
    for key, name in (("validation_loss", "validation loss"), ("test_loss", "test loss")):
        found = [row for row in history if key in row]
        if found:
            rows.append((name, f"{found[-1][key]:.6f} at step {found[-1]['step']}"))
    skipped = sum(1 for row in history if row.get("skipped"))
    if skipped:
        rows.append(("skipped updates", f"{skipped} of the logged steps"))
    return rows


def _throughput(run: Run) -> Rows:
    steps = [row for row in run.history if row.get("tokens_per_second")]
    if not steps:
        return []
    tokens = statistics.median(row["tokens_per_second"] for row in steps)
    rows: Rows = [
        ("tokens per second", f"{tokens:,.0f} (median of {len(steps)} logged steps, all devices)"),
        ("step", f"{statistics.median(row['step_ms'] for row in steps):.1f} ms (median)"),
        ("peak memory of rank 0", f"{max(row['peak_memory_bytes'] for row in steps) / 2**20:,.0f} MiB"),
    ]
    operations = operations_of(run)
    if operations is not None:
        per_device = tokens / run.args.seq_length / run.dist.world_size / 1e12
        rows.append(("TFLOP/s per device", f"{operations.model * per_device:.4g} (counted by formula)"))
        if operations.recomputed:
            rows.append(("with recompute", f"{operations.hardware * per_device:.4g}"))
        throughput = run.session.state(Measures).throughput
        if throughput is not None and throughput.peak:
            share = operations.model * per_device / throughput.peak
            rows.append(("share of peak", f"{share:.1%} of {throughput.peak:.4g} ({throughput.source})"))
    return rows


def _layout(run: Run) -> Rows:
    args = run.args
    parameters = sum(parameter.numel() for chunk in run.model for parameter in chunk.parameters())
    sizes = {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "data": args.data_parallel_size,
    }
    return [
        ("platform", run.session.platform.name),
        ("rank 0", str(run.session.platform.place(run.dist.local_rank))),
        ("processes", str(run.dist.world_size)),
        ("parallel sizes", ", ".join(f"{name} {size}" for name, size in sizes.items())),
        ("batch", f"{args.global_batch_size} sequences of {args.seq_length} tokens"),
        ("parameters on rank 0", f"{parameters:,} in {str(args.params_dtype).removeprefix('torch.')}"),
    ]


def _features(run: Run) -> Rows:
    plan = run.session.plan
    rows: Rows = [(feature.name, "active") for feature in plan.features]
    rows += [(held.name, f"held back: {held.reason}") for held in plan.held_back]
    return [*rows, ("plan digest", plan.digest)] if rows else [("none", "the plain host")]


def _checkpoints(save: str | None) -> Rows:
    if not save:
        return []
    try:
        published = published_names(save)
    except CheckpointError as error:
        return [(save, f"cannot be listed: {error}")]
    return published or [(save, "no checkpoint was published")]


def _versions(run: Run) -> Rows:
    found = {"python": platform.python_version(), **run.session.registry.distributions()}
    for name in ("torch", "megatron-core", "mindspeed-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return sorted(found.items())


def _cell(text: str) -> str:
    return for_markdown(" ".join(text.split()))
