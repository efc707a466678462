"""``mindspeed-models convert`` and ``export``, and the listing of families."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed_core.errors import UserError
from mindspeed_models.config_file import read_config
from mindspeed_models.families import described_folder, described_model, listing

if TYPE_CHECKING:
    pass

_DTYPES = ("float32", "float16", "bfloat16")
_MIB = 1 << 20
_FOLDER = click.Path(file_okay=False, path_type=Path)
_dtype = click.option(
    "--dtype", type=click.Choice(_DTYPES), help="Dtype of the weights; by default as they are."
)
_resume = click.option("--resume", is_flag=True, help="Go on where an interrupted call stopped.")
_workers = click.option(
    "--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Threads that read and write."
)
_model = click.option("--model", metavar="FAMILY", help="The family, where config.json does not say it.")
_quiet = click.option("--quiet", is_flag=True, help="Print the result alone.")


@click.command("convert", short_help="Hugging Face weights into a checkpoint that any layout loads.")
@click.option("--input-model-dir", "source", type=_FOLDER, required=True, help="Folder of Hugging Face.")
@click.option("--output-model-dir", "target", type=_FOLDER, required=True, help="Receives the checkpoint.")
@_model
@_dtype
@click.option(
    "--added-token-num",
    "added",
    type=click.IntRange(0),
    default=0,
    help="Tokens beyond the model's; their rows are the mean of all others.",
)
@click.option(
    "--max-chunk-mib", type=click.IntRange(1), default=64, show_default=True, help="Most MiB held at a time."
)
@click.option("--legacy-layout", is_flag=True, help="Write a file for each rank, as AscendSpeed loads them.")
@click.option(
    "--tensor-model-parallel-size", "tensor", type=click.IntRange(1), default=1, help="Of --legacy-layout."
)
@click.option(
    "--pipeline-model-parallel-size",
    "pipeline",
    type=click.IntRange(1),
    default=1,
    help="Of --legacy-layout.",
)
@_workers
@_resume
@_quiet
def convert_command(
    source: Path,
    target: Path,
    model: str | None,
    dtype: str | None,
    added: int,
    max_chunk_mib: int,
    legacy_layout: bool,
    tensor: int,
    pipeline: int,
    workers: int,
    resume: bool,
    quiet: bool,
) -> None:
    """Convert a folder of Hugging Face into a distributed checkpoint of megatron-core.

    It loads under every tensor, pipeline and expert size, here (--pretrained-checkpoint FOLDER) and in
    Megatron-LM (--load FOLDER --finetune). Memory does not grow with the model.
    """
    import torch

    from mindspeed_models.weights.convert import Conversion, convert

    recipe, plan = described_folder(source, model)
    if legacy_layout:
        from mindspeed_models.weights.legacy import LegacyLayout
        from mindspeed_models.weights.legacy_commands import write_older

        click.echo(write_older(source, target, recipe, plan, LegacyLayout(tensor, pipeline), added))
        return
    say = (lambda text: None) if quiet else click.echo
    options = Conversion(
        source,
        target,
        recipe,
        plan,
        dtype=getattr(torch, dtype) if dtype else None,
        added_tokens=added,
        chunk_bytes=max_chunk_mib * _MIB,
        workers=workers,
        resume=resume,
        say=say,
    )
    click.echo(f"{convert(options)}: {recipe.name}, {plan.layers} layers")


@click.command("export", short_help="A checkpoint as Hugging Face weights.")
@click.option(
    "--load", "source", type=_FOLDER, required=True, help="Checkpoint, or the folder of a training."
)
@click.option("--output-model-dir", "target", type=_FOLDER, required=True, help="The new folder.")
@click.option(
    "--model-config",
    "config",
    type=click.Path(path_type=Path),
    help="config.json, or a folder with it; by default what conversion kept.",
)
@_model
@_dtype
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Most bytes of a file, for instance 5GB; by default as converted.",
)
@click.option(
    "--legacy-layout", is_flag=True, help="--load is a folder with a file for each rank (AscendSpeed)."
)
@click.option("--seed-gqa-order", is_flag=True, help="Undo the order of heads that older converters wrote.")
@click.option("--ckpt-step", "step", type=click.IntRange(0), help="This step instead of the latest.")
@_workers
@_resume
@_quiet
def export_command(
    source: Path,
    target: Path,
    config: Path | None,
    model: str | None,
    dtype: str | None,
    max_shard_size: str | None,
    step: int | None,
    legacy_layout: bool,
    seed_gqa_order: bool,
    workers: int,
    resume: bool,
    quiet: bool,
) -> None:
    """Write the weights of a checkpoint as safetensors, under the names of Hugging Face.

    Tokenizer and configuration that conversion kept come along. A checkpoint of a training needs the folder
    that its model came from: --model-config DIR.
    """
    import torch

    from mindspeed_models.weights.export import Export, export
    from mindspeed_models.weights.mcore_files import McoreFiles

    if config is None and legacy_layout:
        raise UserError("--legacy-layout: older files hold no config.json; name it with --model-config")
    if config is None:
        with McoreFiles(source, step) as files:
            config = files.hf
    where = config
    content = read_config(where)
    recipe, plan = described_model(content, model, str(where))
    options = Export(
        source,
        target,
        recipe,
        plan,
        content,
        dtype=getattr(torch, dtype) if dtype else None,
        shard_bytes=_bytes(max_shard_size),
        step=step,
        legacy=legacy_layout,
        seed_gqa_order=seed_gqa_order,
        workers=workers,
        resume=resume,
        say=(lambda text: None) if quiet else click.echo,
    )
    click.echo(f"{export(options)}: {recipe.name}")


@click.command("families", short_help="List the families of models.")
def families_command() -> None:
    """List the families of models with their sizes, and those that are refused, with the reason."""
    for name, text in listing().items():
        click.echo(f"{name:14} {text}")


def _bytes(text: str | None) -> int | None:
    """Read a size such as ``5GB``, ``200MB`` or ``1GiB``."""
    if text is None:
        return None
    units: dict[str, int] = {"GIB": 1 << 30, "MIB": 1 << 20, "GB": 10**9, "MB": 10**6, "B": 1}
    upper = text.strip().upper()
    unit = next((each for each in units if upper.endswith(each)), "")
    number: Any = upper.removesuffix(unit).strip()
    if not number.isdecimal() or int(number) < 1:
        raise UserError(f"--max-shard-size {text}: is no size; write 5GB or 500MB")
    return int(number) * units.get(unit, 1)
