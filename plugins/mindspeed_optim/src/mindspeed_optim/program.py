"""The program ``mindspeed-optim``: what update rules keep in checkpoints, without a training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

import mindspeed_optim
from mindspeed_core.terminal.errors import TRACEBACK
from mindspeed_core.terminal.program import ExplainedGroup, run_program

PROGRAM = "mindspeed-optim"


@click.group(cls=ExplainedGroup, name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mindspeed_optim.__version__, prog_name=PROGRAM)
@click.option(TRACEBACK, is_flag=True, expose_value=False, help="Print tracebacks of errors too.")
def program() -> None:
    """Work on what update rules save; nothing is trained.

    Exit status: 0 done, 1 not, 2 wrong usage.
    """


@program.command("ema-export", short_help="Write averaged weights as the weights of a checkpoint.")
@click.argument("checkpoints", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(0), help="This step instead of the latest.")
def ema_export(checkpoints: Path, target: Path, step: int | None) -> None:
    """Write into TARGET a checkpoint whose weights are the averages in the latest one of CHECKPOINTS.

    CHECKPOINTS is the --save folder of a run with --optimizer-selection fused_ema_adamw. What is written
    has no optimizer: load it with --finetune or --pretrained-checkpoint, under any layout.
    """
    from mindspeed_optim.ema_export import export_averages

    found = export_averages(checkpoints, target, step)
    rest = f", {found.kept} other tensors as they were" if found.kept else ""
    click.echo(f"{found.path}: {found.averaged} averaged weights{rest}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    return run_program(program, argv, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
