"""``mindspeed-tune calibrate``."""

from __future__ import annotations

from pathlib import Path

import click

from mindspeed_tune.search_command import TARGETS


@click.command(
    "calibrate",
    short_help="A hardware file of this machine, by short runs of the model.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--tune-out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("hardware.toml"),
    show_default=True,
    metavar="FILE",
    help="The hardware file that is written.",
)
@click.option(
    "--tune-hardware",
    "elsewhere",
    metavar="FILE",
    help="Whose numbers hold for what one node cannot tell: links between nodes, reserved memory.",
)
@click.option(
    "--tune-work-dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keeps a journal, from which a calibration that was killed goes on.",
)
@click.option(
    "--layers", type=click.IntRange(1), help="Of a smaller model, where the whole one does not fit."
)
@click.option("--limit-seconds", type=click.FloatRange(1), default=600.0, show_default=True, help="Of a run.")
@click.option("--platform", help="What the runs train on; by default what the command says.")
@click.option(
    "--plan-target",
    "target",
    type=click.Choice([*TARGETS]),
    default="cpu",
    show_default=True,
    help="Whose kernels are planned.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRAINING COMMAND...]")
@click.pass_context
def calibrate(
    context: click.Context,
    tune_out: Path,
    elsewhere: str | None,
    folder: Path | None,
    layers: int | None,
    limit_seconds: float,
    platform: str | None,
    target: str,
    command: tuple[str, ...],
) -> None:
    """Train a few steps of a model in the layouts in which the numbers of a machine show, and fit them.

    Exit status 1 when the runs disagree with each other or with the fitted numbers: the file is written, and
    says so.

    \b
    mindspeed-tune calibrate --tune-out mine.toml -- mindspeed-train --nproc 2 FLAGS
    """
    from mindspeed_core.terminal.listing import say
    from mindspeed_megatron.tables import print_table
    from mindspeed_tune.calibrate import calibrate as run
    from mindspeed_tune.calibrate import hardware_file, write_hardware
    from mindspeed_tune.hardware import read_hardware
    from mindspeed_tune.launch_command import read_command
    from mindspeed_tune.quantities import duration, percent
    from mindspeed_tune.search_command import refuse_unsearchable

    launch = read_command(command)
    refuse_unsearchable(launch.arguments)
    found = run(
        launch,
        folder=folder,
        layers=layers,
        limit=limit_seconds,
        platform=platform,
        target=TARGETS[target],
        elsewhere=read_hardware(elsewhere) if elsewhere else None,
        say=lambda text: click.echo(text, err=True),
    )
    write_hardware(hardware_file(found, command), tune_out)
    rows = [
        (
            name,
            duration(run.best),
            percent(run.spread),
            f"{run.load:.1f}",
            f"{found.fit.errors[name]:+.1%}" if name in found.fit.errors else "–",
        )
        for name, run in found.runs.items()
        if not run.failure
    ]
    print_table(("layout", "step", "spread", "load", "predicted"), rows, title="short runs")
    for note in found.notes:
        say(f"note: {note}", hang=2)
    click.echo(f"\nwritten: {tune_out}")
    context.exit(0 if found.trusted else 1)
