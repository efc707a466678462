"""The command lines of ``mindspeed-models run`` and ``write-config``."""

from __future__ import annotations

from pathlib import Path

import click

from mindspeed_core.errors import UserError
from mindspeed_models.running.sheets import find_sheet, sheet_names
from mindspeed_models.running.steps import STEPS, Asked, Command

_PATH = click.Path(path_type=Path)
_MOST = 8
"""Devices of a machine, where nobody says how many."""
_PLATFORMS = ("npu", "cuda", "cpu")
_STEPS = "\n\n".join(f"{name:11} {step.summary}" for name, step in STEPS.items())


@click.command(
    "run",
    short_help="A model from published weights or from text to a finetuned one, step by step.",
    help=f"""Run a step for a model: NAME is a family with its size (llama2-13b, or llama2 with --size 13b),
    tiny-FAMILY, or the file of a sheet (.toml). Flags behind -- are put behind those of the step.

    \b
    Steps:
    {_STEPS.replace(chr(10) * 2, chr(10) + "    ")}

    Models with a sheet: {", ".join(sheet_names())}.
    """,
)
@click.argument("name")
@click.argument("step", type=click.Choice(tuple(STEPS)))
@click.argument("further", nargs=-1, type=click.UNPROCESSED)
@click.option("--size", help="Size of the model, where NAME has none.")
@click.option(
    "--work-dir", type=_PATH, default=Path("work"), show_default=True, help="Folder of all results."
)
@click.option("--platform", type=click.Choice(_PLATFORMS), help="Platform of trainings; else the one found.")
@click.option(
    "--nproc", type=click.IntRange(1), help="Processes on this machine; by default those of a layout."
)
@click.option("--devices", type=click.IntRange(1), help="Processes on all machines; by default --nproc.")
@click.option("--hf-dir", type=_PATH, help="Folder of Hugging Face with the published model.")
@click.option("--tokenizer", type=_PATH, help="Folder or tokenizer.json, where it is not the model's.")
@click.option("--corpus", type=_PATH, help="Texts to pretrain on, a file or a folder.")
@click.option("--instructions", type=_PATH, help="Records to finetune on: instruction, input, output.")
@click.option("--prompts", type=_PATH, help="Texts to continue, one a line; objects in a .jsonl file.")
@click.option("--task", "tasks", multiple=True, metavar="NAME=PATH", help="A benchmark and its data.")
@click.option("--load", type=_PATH, help="Weights to go on from, in place of those of the step before.")
@click.option("--plain", is_flag=True, help="Leave out flags of fused kernels.")
@click.option("--print", "printed", is_flag=True, help="Print the equivalent shell script and run nothing.")
@click.pass_context
def run_command(
    context: click.Context,
    name: str,
    step: str,
    further: tuple[str, ...],
    size: str | None,
    work_dir: Path,
    platform: str | None,
    nproc: int | None,
    devices: int | None,
    hf_dir: Path | None,
    tokenizer: Path | None,
    corpus: Path | None,
    instructions: Path | None,
    prompts: Path | None,
    tasks: tuple[str, ...],
    load: Path | None,
    plain: bool,
    printed: bool,
) -> None:
    """Run a step, or print it."""
    from mindspeed_models.running.script import execute, script_of

    sheet = find_sheet(name, size)
    usual = [each for each in sheet.devices if each <= _MOST] or [_MOST]
    nproc = nproc or min(devices or usual[-1], _MOST)
    devices = devices or nproc
    if devices % nproc:
        raise UserError(
            f"--devices {devices}: is no multiple of --nproc {nproc}, the processes of each machine; correct "
            "the one or the other"
        )
    asked = Asked(
        sheet=sheet,
        work=work_dir,
        nproc=nproc,
        devices=devices,
        platform=platform or "",
        hf=hf_dir,
        tokenizer=tokenizer,
        corpus=corpus,
        instructions=instructions,
        load=load,
        kernels=not plain,
        prompts=prompts,
        tasks=tasks,
        further=further,
    )
    commands = STEPS[step].commands(asked)
    last = commands[-1]
    commands[-1] = Command(last.program, (*last.words, *further), last.parallel)
    if printed:
        click.echo(script_of(commands, asked), nl=False)
        return
    if devices > nproc and any(command.parallel for command in commands):
        raise UserError(
            f"--devices {devices} with --nproc {nproc}: this machine has a part of them; write the script "
            "with --print, and start it on each machine"
        )
    context.exit(execute(commands, asked))


@click.command("write-config", short_help="The config.json of a model by its name.")
@click.argument("name", metavar="NAME-SIZE")
@click.argument("folder", type=_PATH)
@click.option("--vocab-size", type=click.IntRange(1), help="Tokens, in place of those of the size.")
def write_config_command(name: str, folder: Path, vocab_size: int | None) -> None:
    """Write FOLDER/config.json of a model that is trained from new weights, for --model-config."""
    from mindspeed_models.running.config import write_config

    click.echo(write_config(name, folder, vocab_size))
