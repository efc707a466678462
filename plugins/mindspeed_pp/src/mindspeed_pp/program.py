"""The program ``mindspeed-pp``: schedules drawn, compared and checked, without a training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import mindspeed_pp
from mindspeed_core.terminal.errors import TRACEBACK
from mindspeed_core.terminal.program import ExplainedGroup, run_program

PROGRAM = "mindspeed-pp"


@click.group(cls=ExplainedGroup, name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mindspeed_pp.__version__, prog_name=PROGRAM)
@click.option(TRACEBACK, is_flag=True, expose_value=False, help="Print tracebacks of errors too.")
def program() -> None:
    """Draw, compare and check pipeline schedules; nothing is trained.

    Exit status: 0 the schedule can run, 1 it cannot, 2 wrong usage.
    """


def _sizes(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--limit", type=float, help="Most micro-batches alive on a rank."),
        click.option(
            "--times-from",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Times that --profile-pipeline wrote, in place of --times and --message.",
        ),
        click.option("--reduction", type=float, default=0.0, help="Time to reduce gradients of a chunk."),
        click.option("--paired", type=float, default=1.0, help="Cost of a forward beside a backward pass."),
        click.option("--message", type=float, default=0.0, help="Time of a message between ranks."),
        click.option(
            "--times",
            type=float,
            nargs=3,
            default=(1.0, 1.0, 1.0),
            help="Forward, input and weight gradient.",
        ),
        click.option("-m", "--microbatches", type=click.IntRange(1), default=8, show_default=True),
        click.option("-v", "--chunks", type=click.IntRange(1), default=2, show_default=True),
        click.option("-p", "--ranks", type=click.IntRange(1), default=4, show_default=True),
    ):
        command = option(command)
    return command


def _costs(times: tuple[float, float, float], message: float, paired: float, reduction: float) -> Any:
    from mindspeed_pp.simulator import Costs

    return Costs(*times, message=message, paired=paired, reduction=reduction)


def _measured(path: Path | None) -> Any:
    from mindspeed_pp.stage_times import read_times

    return None if path is None else read_times(str(path))


def _summary(course: Any) -> dict[str, Any]:
    return {
        "schedule": course.schedule.name,
        "makespan": course.makespan,
        "step": course.step,
        "bubble": course.bubble,
        "bubble_share": course.bubble_share,
        "span_bubble": course.span_bubble,
        "peaks": course.peaks,
        "exposed_communication": course.exposed_communication,
    }


@program.command("show", short_help="One schedule: its timeline, bubble and memory.")
@click.argument("schedule")
@_sizes
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw it (PNG or SVG).")
@click.option("--trace", "trace_file", type=click.Path(dir_okay=False, path_type=Path), help="For Perfetto.")
@click.option("--text", is_flag=True, help="Print the file form, which training reads.")
@click.option("--csv", is_flag=True, help="Print the notation of torch.distributed.pipelining.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(
    schedule: str,
    ranks: int,
    chunks: int,
    microbatches: int,
    times: tuple[float, float, float],
    message: float,
    paired: float,
    reduction: float,
    times_from: Path | None,
    limit: float | None,
    picture: Path | None,
    trace_file: Path | None,
    text: bool,
    csv: bool,
    as_json: bool,
) -> None:
    """Show SCHEDULE, the name of one or a schedule file.

    \b
    mindspeed-pp show zbv -p 4 -m 8
    mindspeed-pp show zb-h1 -p 8 -m 32 --times 1 1.2 0.8 --picture zb-h1.svg
    """
    from mindspeed_pp.lint import lint
    from mindspeed_pp.simulator import simulate
    from mindspeed_pp.timeline import draw, text_timeline, write_trace

    measured = _measured(times_from)
    if measured is not None:
        times = measured.of_rank(ranks)
    found = _found(schedule, ranks, chunks, microbatches, times)
    lint(found, limit)
    costs = _costs(times, message, paired, reduction)
    if measured is not None:
        stages = measured.of_stages(found.placement)
        costs = replace(costs, stages=stages, message=message or measured.message)
    course = simulate(found, costs)
    if picture is not None:
        draw(course, picture)
    if trace_file is not None:
        write_trace(course, trace_file)
    if as_json:
        click.echo(json.dumps(_summary(course), indent=2))
    elif text or csv:
        click.echo(found.text() if text else found.csv(), nl=False)
    else:
        click.echo(text_timeline(course))
        _tell(course)


def _found(name: str, ranks: int, chunks: int, microbatches: int, times: tuple[float, float, float]) -> Any:
    from mindspeed_pp.registry import rule_named
    from mindspeed_pp.rule import Context
    from mindspeed_pp.schedule import read_schedule

    if Path(name).is_file():
        return read_schedule(Path(name))
    rule = rule_named(name)
    return rule.schedule(Context(ranks, rule.chunks or chunks, microbatches, times))


def _tell(course: Any) -> None:
    peaks = ", ".join(f"{peak:g}" for peak in course.peaks)
    click.echo(
        f"step {course.step:g}, bubble {course.bubble:g} ({course.bubble_share:.1%}), between a rank's first "
        f"and last action {course.span_bubble:g}; micro-batches alive on each rank: {peaks}"
    )
    if course.exposed_communication:
        click.echo(f"messages lengthen it by {course.exposed_communication:g}")


@program.command("compare", short_help="All schedules for given sizes, and which to choose.")
@_sizes
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(
    ranks: int,
    chunks: int,
    microbatches: int,
    times: tuple[float, float, float],
    message: float,
    paired: float,
    reduction: float,
    times_from: Path | None,
    limit: float | None,
    as_json: bool,
) -> None:
    """Compare every installed schedule; those with two chunks or more take --chunks.

    \b
    mindspeed-pp compare -p 8 -m 32 --times 1 1.2 0.8 --message 0.1 --limit 9
    """
    from mindspeed_megatron.tables import print_table
    from mindspeed_pp.choice import compared
    from mindspeed_pp.registry import rules
    from mindspeed_pp.simulator import Course

    measured = _measured(times_from)
    if measured is not None:
        times = measured.of_rank(ranks)
    costs = _costs(times, message, paired, reduction)
    found = compared(rules().values(), ranks, chunks, microbatches, costs, measured)
    courses = [(rule, course) for rule, course in found if isinstance(course, Course)]
    if as_json:
        click.echo(json.dumps([_summary(course) for _, course in courses], indent=2))
        return
    print_table(
        ("schedule", "step", "bubble", "share", "first to last", "most alive", "exposed messages"),
        [
            (
                rule.name,
                f"{course.step:g}",
                f"{course.bubble:g}",
                f"{course.bubble_share:.1%}",
                f"{course.span_bubble:g}",
                f"{max(course.peaks):g}",
                f"{course.exposed_communication:g}",
            )
            for rule, course in courses
        ],
    )
    for rule, refused in found:
        if isinstance(refused, str):
            click.echo(f"{rule.name}: {refused}")
    click.echo(_advice(courses, limit))


def _advice(courses: Sequence[tuple[Any, Any]], limit: float | None) -> str:
    fitting = [(r, c) for r, c in courses if limit is None or max(c.peaks) <= limit + 1e-9]
    if not fitting:
        return (
            f"no schedule keeps at most {limit:g} micro-batches alive; recompute activations, or use more "
            "ranks"
        )
    order = lambda each: (round(each[1].step, 9), round(max(each[1].peaks), 9))  # noqa: E731
    best, course = min(fitting, key=order)
    said = f"choose {best.name}: step {course.step:g}, {max(course.peaks):g} micro-batches alive"
    if best.splits:
        whole = [each for each in fitting if not each[0].splits]
        if whole:
            other, plain = min(whole, key=order)
            said += (
                f"; where linears cannot put off their weight gradients {other.name}: step {plain.step:g}, "
                f"{max(plain.peaks):g} alive"
            )
    return said


@program.command("lint", short_help="Check a schedule file.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--limit", type=float, help="Most micro-batches alive on a rank.")
def check(file: Path, limit: float | None) -> None:
    """Check FILE, in the form that ``mindspeed-pp show NAME --text`` prints."""
    from mindspeed_pp.lint import lint
    from mindspeed_pp.schedule import read_schedule

    schedule = read_schedule(file)
    findings = lint(schedule, limit)
    deepest = max(findings.look_ahead.values(), default=0)
    click.echo(
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.placement.stages} stages, "
        f"{schedule.microbatches} micro-batches; at most {max(findings.peaks):g} alive on a rank, "
        f"{deepest} receives posted at once"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    return run_program(program, argv, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
