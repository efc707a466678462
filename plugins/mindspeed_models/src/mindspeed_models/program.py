"""The program ``mindspeed-models``: weights, data and generation, and a model through all of its steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

import mindspeed_models
from mindspeed_core.terminal.errors import TRACEBACK
from mindspeed_core.terminal.program import ExplainedGroup, run_program
from mindspeed_models.data.preprocess_command import command as preprocess_command
from mindspeed_models.evaluation.command import evaluate_command
from mindspeed_models.inference.generate_command import command as generate_command
from mindspeed_models.lora.command_line import export_lora_command, merge_command
from mindspeed_models.running.command import run_command, write_config_command
from mindspeed_models.serving.chat_command import chat_command
from mindspeed_models.serving.serve_command import serve_command
from mindspeed_models.weights.commands import convert_command, export_command, families_command

PROGRAM = "mindspeed-models"


@click.group(cls=ExplainedGroup, name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mindspeed_models.__version__, prog_name=PROGRAM)
@click.option(TRACEBACK, is_flag=True, expose_value=False, help="Print tracebacks of errors too.")
def program() -> None:
    """Convert weights, prepare data, merge adapters, generate, or run a model through all of its steps.

    Exit status: 0 done, 1 not, 2 wrong usage.
    """


for _command in (
    *(convert_command, export_command, families_command),
    *(preprocess_command, merge_command, export_lora_command),
    *(generate_command, chat_command, serve_command, evaluate_command),
    *(run_command, write_config_command),
):
    program.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    return run_program(program, argv, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
