"""The program ``mindspeed-tune``: what a launch will keep, send and take, and which layout is the fastest.

``mindspeed-tune plan -- ANY TRAINING COMMAND``, also as ``mindspeed-features plan-scale``; ``search``,
``measure``, ``report`` and ``calibrate``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import mindspeed_tune
from mindspeed_core.errors import UserError
from mindspeed_core.terminal.errors import TRACEBACK
from mindspeed_core.terminal.program import ExplainedGroup, run_program
from mindspeed_megatron.earlier_files import move_aside
from mindspeed_tune.calibrate_command import calibrate
from mindspeed_tune.search_command import TARGETS, measure, report, search

if TYPE_CHECKING:
    from mindspeed_tune.launch_plan import LaunchPlan

PROGRAM = "mindspeed-tune"
EXIT_PROBLEMS = 1


@click.group(cls=ExplainedGroup, name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mindspeed_tune.__version__, prog_name=PROGRAM)
@click.option(TRACEBACK, is_flag=True, expose_value=False, help="Print tracebacks of errors too.")
def program() -> None:
    """Plan a launch on this machine, whatever its size, and find its fastest layout.

    Exit status: 0 the launch holds together, 1 it does not, or cannot be planned, 2 wrong usage.
    """


@program.command(
    "plan",
    short_help="Memory, communication, order of calls and step time of a launch.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--plan-ranks", default="kinds", show_default=True, help="kinds, all, or a list: 0,8,0:64:8.")
@click.option(
    "--plan-layers",
    type=click.Choice(["exact", "extrapolate"]),
    default="extrapolate",
    show_default=True,
    help="Run all layers, or one and two of each kind.",
)
@click.option(
    "--plan-microbatches",
    type=click.Choice(["exact", "extrapolate"]),
    default="extrapolate",
    show_default=True,
    help="Run all micro-batches, or one and two.",
)
@click.option("--plan-hardware", metavar="FILE", help="A hardware file, or the name of one that comes along.")
@click.option(
    "--plan-target",
    type=click.Choice(["cpu", "npu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Whose kernels run; npu needs torch_npu and mindspeed-tune[npu].",
)
@click.option("--plan-skew", type=float, metavar="F", help="Tokens of this rank's experts, over the average.")
@click.option("--plan-out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Reports.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRAINING COMMAND...]")
@click.pass_context
def plan(
    context: click.Context,
    plan_ranks: str,
    plan_layers: str,
    plan_microbatches: str,
    plan_hardware: str | None,
    plan_target: str,
    plan_skew: float | None,
    plan_out: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run one step of every kind of rank of a launch on shapes alone, and say what it takes.

    TRAINING COMMAND is what starts the training: mindspeed-train FLAGS, torchrun … SCRIPT FLAGS, or the flags
    alone with --fake-world-size N. Nothing is computed, allocated,
    sent or written but --plan-out. Exit status 1 when a kind of rank does not fit, or the order of
    communication differs between ranks.

    \b
    mindspeed-tune plan --plan-hardware ascend-910b --plan-out plan -- \\
        torchrun --nnodes 128 --nproc-per-node 8 -m mindspeed_core.train FLAGS
    """
    from mindspeed_tune.driver import Ranks, records_of
    from mindspeed_tune.hardware import read_hardware
    from mindspeed_tune.launch_command import read_command
    from mindspeed_tune.launch_plan import make_plan

    hardware = read_hardware(plan_hardware) if plan_hardware else None
    launch = read_command(command)
    runner = Ranks(
        launch,
        platform=TARGETS[plan_target],
        exact_layers=plan_layers == "exact",
        exact_microbatches=plan_microbatches == "exact",
        skew=plan_skew,
    )
    with runner:
        records = records_of(runner, plan_ranks)
    found = make_plan(launch.text, records, hardware, launch.ranks_per_node)
    if plan_out is not None:
        write_reports(found, plan_out)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        from mindspeed_tune.summary import print_summary

        print_summary(found)
        if plan_out is not None:
            click.echo(f"\nreports: {plan_out / 'plan.html'}, plan.md, plan.json, schedule.json")
    context.exit(0 if found.ok else EXIT_PROBLEMS)


REPORTS = ("plan.html", "plan.md", "plan.json", "schedule.json")


def write_reports(launch_plan: LaunchPlan, folder: Path) -> None:
    """Write a plan as HTML, Markdown, JSON and Chrome trace.

    Raises:
        UserError: the folder cannot be written.
    """
    from mindspeed_tune.chrome_trace import chrome_trace
    from mindspeed_tune.html_report import html_report
    from mindspeed_tune.summary import markdown

    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Those of an earlier plan, with one number.
        move_aside(folder, REPORTS)
        (folder / "plan.html").write_text(html_report(launch_plan), encoding="utf-8")
        (folder / "plan.md").write_text(markdown(launch_plan), encoding="utf-8")
        (folder / "plan.json").write_text(
            json.dumps(launch_plan.as_json(), indent=2) + "\n", encoding="utf-8"
        )
        (folder / "schedule.json").write_text(json.dumps(chrome_trace(launch_plan)) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--plan-out {folder}: cannot be written ({error}); name another folder") from None


for _command in (search, measure, report, calibrate):
    program.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status; ``argv`` is by default that of the process."""
    return run_program(program, argv, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
