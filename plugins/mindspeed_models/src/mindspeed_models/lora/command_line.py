"""The command lines of ``mindspeed-models merge-lora`` and ``export-lora``."""

from __future__ import annotations

from pathlib import Path

import click

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_TARGET = click.Path(file_okay=False, path_type=Path)
_CONFIG = click.Path(exists=True, path_type=Path)
_ADAPTERS = "A --save folder of a run with adapters, or a peft directory."
_MODEL = "config.json of the model, or a folder with one."


@click.command("merge-lora", short_help="Merge adapters into their base.")
@click.option("--load", "base", type=_FOLDER, required=True, help="A Hugging Face folder, or checkpoints.")
@click.option("--lora-load", "adapter", type=_FOLDER, required=True, help=_ADAPTERS)
@click.option("--save", "target", type=_TARGET, required=True, help="The folder that receives the weights.")
@click.option("--format", "form", type=click.Choice(["hf", "dist"]), help="Of the result; that of the base.")
@click.option("--model-config", type=_CONFIG, help=_MODEL)
@click.option("--any-base", is_flag=True, help="Merge into another base than that of the adapters too.")
def merge_command(
    base: Path, adapter: Path, target: Path, form: str | None, model_config: Path | None, any_base: bool
) -> None:
    """Write the weights W + alpha / r * B A, in the dtypes and the format of the base."""
    from mindspeed_megatron.quiet import quieten

    quieten()
    from mindspeed_models.lora.commands import merge

    click.echo(merge(base, adapter, target, form=form, model_config=model_config, any_base=any_base))


@click.command("export-lora", short_help="Write adapters as a peft directory.")
@click.option("--lora-load", "adapter", type=_FOLDER, required=True, help=_ADAPTERS)
@click.option("--model-config", type=_CONFIG, required=True, help=_MODEL)
@click.option("--save", "target", type=_TARGET, required=True, help="The folder that receives the adapter.")
@click.option("--lora-adapter-name", "name", default="default", help="Any other name is a subfolder.")
def export_lora_command(adapter: Path, model_config: Path, target: Path, name: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which peft reads."""
    from mindspeed_megatron.quiet import quieten

    quieten()
    from mindspeed_models.lora.commands import export

    click.echo(export(adapter, model_config, target, name=name))
