"""``mindspeed-tune search``, ``measure`` and ``report``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mindspeed_core.errors import UserError

TARGETS = {"cpu": "fake", "npu": "fake-npu", "cuda": "fake-cuda"}
NONE, SHORT_RUNS = "none", "short-runs"
MEASURED = 8
"""Candidates that short runs compare."""
_COMMAND = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@dataclass(frozen=True)
class Options:
    """Options of a search.

    Attributes:
        hardware: a file, or the name of one that comes along.
        space: the file of ``--tune-space``; None for everything.
        work_dir: the journal's folder; None keeps nothing.
        refine: ``none`` or ``short-runs``.
        target: whose kernels are planned: ``cpu``, ``npu`` or ``cuda``.
        trials: candidates that get dry runs of their own.
        budget_minutes: after which no dry run is begun; None for no limit.
        features: try the flags that features state to be worth searching.
        strategy: of which candidates are planned; empty for the built-in one.
        cost: that corrects estimates; empty for none.
        limit: seconds after which a short run hangs.
    """

    hardware: str
    space: Path | None = None
    work_dir: Path | None = None
    refine: str = NONE
    target: str = "cpu"
    trials: int = 30
    budget_minutes: float | None = None
    features: bool = True
    strategy: str = ""
    cost: str = ""


def search_layouts(words: Sequence[str], options: Options, say: Any) -> dict[str, Any]:
    """Search for the layouts of a training command and return the report.

    Args:
        words: the command.
        options: what is asked for.
        say: takes lines about the progress.

    Raises:
        UserError: the command, the space or the hardware file is wrong, or no layout works.
    """
    from mindspeed_core.flags.flag_set import known_flags
    from mindspeed_core.registry import Registry
    from mindspeed_tune.contributions import contributed
    from mindspeed_tune.hardware import ONE_RANK, read_hardware
    from mindspeed_tune.journal import Journal
    from mindspeed_tune.launch_command import read_command
    from mindspeed_tune.measure import Measuring, check_one_node, check_processors, ignored
    from mindspeed_tune.ranked import facts_of
    from mindspeed_tune.search import Search
    from mindspeed_tune.search_report import report_of
    from mindspeed_tune.space_file import read_space
    from mindspeed_tune.tuned_features import tune_features
    from mindspeed_tune.warm_process import WarmProcess

    hardware = read_hardware(options.hardware)
    command = read_command(words)
    refuse_unsearchable(command.arguments)
    refuse_inside_training()
    if command.world_size > 1 and hardware.sources.get("links.within_node") == ONE_RANK:
        raise UserError(
            f"--tune-hardware {options.hardware}: was calibrated with one rank, which sends nothing, and "
            f"{command.world_size:,} ranks communicate; calibrate with two ranks or more"
        )
    registry = Registry.discover()
    space = read_space(options.space, known_flags(registry))
    notes = []
    if options.refine == SHORT_RUNS:
        check_one_node(command)
        notes.append(check_processors(command.world_size))
    strategy, cost = contributed(registry, options.strategy, options.cost)
    deadline = None if options.budget_minutes is None else time.monotonic() + 60 * options.budget_minutes
    with ExitStack() as open_things:
        journal = Journal(options.work_dir, facts_of(command, hardware, space, options.target))
        open_things.enter_context(journal)
        if journal.remembered:
            say(f"going on from {journal.remembered} results in {options.work_dir}")
        limit = space.limits["seconds_per_run"]
        process = open_things.enter_context(WarmProcess(TARGETS[options.target], limit=limit))
        search = Search(
            command,
            space,
            hardware,
            process,
            journal,
            registry,
            trials=options.trials,
            deadline=deadline,
            say=say,
            strategy=strategy,
            cost=cost,
        )
        search.notes += filter(None, (*notes, *ignored(command.arguments)))
        search.run()
        tried = tune_features(search) if options.features else []
        measured = None
        if options.refine == SHORT_RUNS:
            measuring = Measuring(command, search.flags, journal, limit=limit, say=say)
            chosen = [one.candidate for one in search.best()[:MEASURED]]
            measured = measuring.halve([*chosen, *search.only_measured])
        return report_of(search, tried, measured)


def refuse_unsearchable(arguments: Sequence[str]) -> None:
    """Refuse commands that a search would have to change, or that observe a training.

    Raises:
        UserError: names the flag.
    """
    for flag in ("--profile", "--plan-only"):
        if flag in arguments:
            raise UserError(f"{flag}: a search runs no training to look at; leave it out of the command")
    for position, word in enumerate(arguments):
        given = word.partition("=")[2] or (arguments[position + 1] if position + 1 < len(arguments) else "")
        if word.partition("=")[0] == "--platform" and given.startswith("fake"):
            raise UserError(
                f"--platform {given}: a search plans by itself; leave it out, and choose --plan-target"
            )


def refuse_inside_training() -> None:
    """Refuse to search in a process that is a rank of a training.

    Raises:
        UserError: it is one.
    """
    distributed = sys.modules.get("torch.distributed")
    running = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if running or "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "a training runs in this process, and a search plans every rank by itself: start it once, "
            "outside of torchrun and of a training script"
        )


def searching(function: Any) -> Any:
    """Add the options of searches to a command."""
    options = (
        click.option(
            "--tune-hardware",
            "--plan-hardware",
            "hardware",
            required=True,
            metavar="FILE",
            help="A hardware file, as calibrate writes it, or the name of one that comes along.",
        ),
        click.option(
            "--tune-space",
            "space",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Values to try for flags, as TOML: narrows or widens what is searched.",
        ),
        click.option(
            "--tune-work-dir",
            "work_dir",
            type=click.Path(file_okay=False, path_type=Path),
            metavar="DIR",
            help="Keeps a journal, from which a search that was killed goes on.",
        ),
        click.option(
            "--tune-refine",
            "refine",
            type=click.Choice([NONE, SHORT_RUNS]),
            default=NONE,
            show_default=True,
            help="Measure the best candidates on this machine.",
        ),
        click.option(
            "--tune-trials",
            "trials",
            type=click.IntRange(1),
            default=30,
            show_default=True,
            help="Leading candidates that get dry runs of their own.",
        ),
        click.option(
            "--tune-budget-minutes",
            "budget_minutes",
            type=click.FloatRange(0, min_open=True),
            metavar="M",
            help="Begin no dry run after so many minutes.",
        ),
        click.option(
            "--tune-features/--no-tune-features",
            "features",
            default=True,
            show_default=True,
            help="Try flags of features on the best layout.",
        ),
        click.option("--tune-strategy", "strategy", default="", help="A package's choice of dry runs."),
        click.option("--tune-cost", "cost", default="", help="A package's correction of estimates."),
        click.option(
            "--plan-target",
            "target",
            type=click.Choice([*TARGETS]),
            default="cpu",
            show_default=True,
            help="Whose kernels are planned.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.command(
    "search", short_help="The fastest layouts of a launch, found without devices.", context_settings=_COMMAND
)
@searching
@click.option(
    "--tune-out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write the reports."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRAINING COMMAND...]")
def search(tune_out: Path | None, as_json: bool, command: tuple[str, ...], **options: Any) -> None:
    """Rank every valid layout of a training command, and plan the best ones by dry runs.

    Sizes of tensor, pipeline, context and expert parallelism, chunks, micro-batches, recomputation and what
    installed features state to be worth trying; batch, data and numerics stay what the command says.

    \b
    mindspeed-tune search --tune-hardware ascend-910b --tune-out layouts -- \\
        torchrun --nnodes 2 --nproc-per-node 8 -m mindspeed_core.train FLAGS
    """
    from mindspeed_megatron.quiet import quieten
    from mindspeed_tune.report_pages import print_report, write_reports

    quieten()
    report = search_layouts(command, Options(**options), lambda text: click.echo(text, err=True))
    _deliver(report, tune_out, as_json, print_report, write_reports)


@click.command("measure", short_help="Short runs of the best layouts of a search, on this machine.")
@click.option(
    "--tune-work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keeps a journal.",
)
@click.option("--tune-trials", type=click.IntRange(1), default=MEASURED, show_default=True, help="How many.")
@click.option("--limit-seconds", type=click.FloatRange(1), default=600.0, show_default=True, help="Of a run.")
@click.option("--memory", is_flag=True, help="Measure the peak of memory too.")
@click.option("--tune-out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def measure(
    tune_work_dir: Path | None,
    tune_trials: int,
    limit_seconds: float,
    memory: bool,
    tune_out: Path | None,
    as_json: bool,
    file: Path,
) -> None:
    """Measure the best layouts of FILE, a search's search.json, and write their times into its report."""
    from mindspeed_tune.measured_report import measured_report
    from mindspeed_tune.report_pages import print_report, read_report, write_reports

    report = measured_report(
        read_report(file),
        folder=tune_work_dir,
        trials=tune_trials,
        limit=limit_seconds,
        memory=memory,
        say=lambda text: click.echo(text, err=True),
    )
    _deliver(report, tune_out, as_json, print_report, write_reports)


@click.command("report", short_help="The report of a search again, as Markdown, HTML and on the terminal.")
@click.option("--tune-out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def report(tune_out: Path | None, as_json: bool, file: Path) -> None:
    """Print the report in FILE, the search.json of a search; --tune-out writes all its forms."""
    from mindspeed_tune.report_pages import print_report, read_report, write_reports

    _deliver(read_report(file), tune_out, as_json, print_report, write_reports)


def _deliver(found: Mapping[str, Any], folder: Path | None, as_json: bool, show: Any, write: Any) -> None:
    if folder is not None:
        write(found, folder)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    show(found)
    if folder is not None:
        click.echo(f"\nreports: {folder / 'search.html'}, search.md, search.json")
