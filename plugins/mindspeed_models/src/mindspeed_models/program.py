"""The program ``mindspeed-models``: weights and data, without a training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

import mindspeed_models
from mindspeed_core.terminal.errors import TRACEBACK
from mindspeed_core.terminal.program import ExplainedGroup, run_program

PROGRAM = "mindspeed-models"


@click.group(cls=ExplainedGroup, name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mindspeed_models.__version__, prog_name=PROGRAM)
@click.option(TRACEBACK, is_flag=True, expose_value=False, help="Print tracebacks of errors too.")
def program() -> None:
    """Convert weights, prepare data, merge adapters; nothing is trained.

    Exit status: 0 done, 1 not, 2 wrong usage.
    """


_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_TARGET = click.Path(file_okay=False, path_type=Path)
_ADAPTERS = "A --save folder of a run with adapters, or a peft directory."
_MODEL = "config.json of the model, or a folder with one."


.command("merge-lora", short_help="Merge adapters into their base.")
.option("--load", "base", type=_FOLDER, required=True, help="The base: a Hugging Face folder, or checkpoints.")
.option("--lora-load", "adapter", type=_FOLDER, required=True, help=_ADAPTERS)
.option("--save", "target", type=_TARGET, required=True, help="The folder that receives the weights.")
.option("--format", "form", type=click.Choice(["hf", "dist"]), help="Of the result; that of the base.")
.option("--model-config", type=click.Path(exists=True, path_type=Path), help=_MODEL)
.option("--any-base", is_flag=True, help="Merge into another base than that of the adapters too.")
def merge_lora(
    base: Path, adapter: Path, target: Path, form: str | None, model_config: Path | None, any_base: bool
) -> None:
    """Write the weights W + alpha / r * B A, in the dtypes and the format of the base."""
    from mindspeed_models.lora.commands import merge

    click.echo(merge(base, adapter, target, form=form, model_config=model_config, any_base=any_base))


.command("export-lora", short_help="Write adapters as a peft directory.")
.option("--lora-load", "adapter", type=_FOLDER, required=True, help="A --save folder of a run with adapters.")
.option(
    "--model-config", type=click.Path(exists=True, path_type=Path), required=True, help=_MODEL
)
.option("--save", "target", type=_TARGET, required=True, help="The folder that receives the adapter.")
.option("--lora-adapter-name", "name", default="default", help="Any other name is a subfolder.")
def export_lora(adapter: Path, model_config: Path, target: Path, name: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which peft reads."""
    from mindspeed_models.lora.commands import export

    click.echo(export(adapter, model_config, target, name=name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    return run_program(program, argv, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
