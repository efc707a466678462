"""The two converters of AscendSpeed by their names and flags: from Hugging Face, and to other parallel sizes.

Both write a checkpoint that loads under any layout; with ``--legacy-layout`` they write a file for each rank,
as they always did. Sizes come from ``config.json``, and flags that say other ones are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed_core.errors import UserError
from mindspeed_core.terminal.program import run_program
from mindspeed_models.families import described_folder, described_model, named_model

if TYPE_CHECKING:
    from mindspeed_models.recipe import ModelPlan, Recipe
    from mindspeed_models.weights.legacy import LegacyLayout

FROM_HF = "convert_weights_from_huggingface.py"
CHANGE = "convert_weights_when_tp_pp_change.py"
_TYPES = {
    "7B": (32, 4096, 32),
    "7B1": (30, 4096, 32),
    "13B": (40, 5120, 40),
    "30B": (60, 6656, 52),
    "33B": (60, 6656, 52),
    "34B": (48, 8192, 64),
    "65B": (80, 8192, 64),
    "70B": (80, 8192, 64),
    "176B": (70, 14336, 112),
}
"""Layers, hidden size and heads by ``--type``."""
_TYPES_OF = {"bloom": {"7B": _TYPES["7B1"]}}
"""The same where the converter of a family meant others."""
_FOLDER = click.Path(file_okay=False, path_type=Path)
_SIZE = click.IntRange(1)
Decorator = Callable[[Any], Any]


def _sizes(command: Any) -> Any:
    """Add the flags that both programs share."""
    flags: tuple[Decorator, ...] = (
        click.option(
            "--input-model-dir", "source", type=_FOLDER, default=Path("./input_model_dir"), show_default=True
        ),
        click.option(
            "--output-model-dir",
            "target",
            type=_FOLDER,
            default=Path("./output_model_dir"),
            show_default=True,
        ),
        click.option(
            "--make-vocab-size-divisible-by", "divisible", type=_SIZE, default=128, show_default=True
        ),
        click.option("--added-token-num", "added", type=click.IntRange(0), default=0, show_default=True),
        click.option("--type", "size", type=click.Choice(tuple(_TYPES)), help="Compared with the model."),
        click.option("--num-layers", "--num_layers", "layers", type=_SIZE, help="Compared with the model."),
        click.option("--num-heads", "--num_heads", "heads", type=_SIZE, help="Compared with the model."),
        click.option(
            "--num-kv-heads", "--num_kv_heads", "groups", type=_SIZE, help="Compared with the model."
        ),
        click.option("--hidden-size", "--hidden_size", "hidden", type=_SIZE, help="Compared with the model."),
        click.option("--bias", is_flag=True, help="Accepted; the files say whether there are biases."),
        click.option("--deepspeed", is_flag=True, help="With --legacy-layout: files of DeepSpeed."),
        click.option(
            "--partition-layers", "partition", help="With --legacy-layout: layers of Bloom's stages, 6,6,…,4."
        ),
        click.option("--merge-mlp", is_flag=True, help="With --legacy-layout: gate and up in one tensor."),
        click.option(
            "--legacy-layout", is_flag=True, help="Write a file for each rank, as AscendSpeed loads them."
        ),
        click.option("--model", metavar="FAMILY", help="The family, where config.json does not say it."),
    )
    for flag in reversed(flags):
        command = flag(command)
    return command


@click.command(FROM_HF, context_settings={"help_option_names": ["-h", "--help"]})
@_sizes
@click.option("--tensor-model-parallel-size", "tensor", type=_SIZE, default=1, show_default=True)
@click.option("--pipeline-model-parallel-size", "pipeline", type=_SIZE, default=1, show_default=True)
@click.option("--pse", is_flag=True, help="Accepted; the files say whether q, k, v are one tensor.")
@click.option("--use_wpack_rotray", is_flag=True, help="Accepted; the files say it.")
@click.option("--load_weight_map", is_flag=True, help="Accepted; an index is read where there is one.")
def from_huggingface(
    source: Path,
    target: Path,
    added: int,
    tensor: int,
    pipeline: int,
    legacy_layout: bool,
    model: str | None,
    **given: Any,
) -> None:
    """Convert weights of Hugging Face."""
    recipe, plan = described_folder(source, model)
    _check_sizes(plan, given)
    if legacy_layout:
        layout = _layout(plan, tensor, pipeline, given)
        click.echo(write_older(source, target, recipe, plan, layout, added))
        return
    from mindspeed_models.weights.convert import Conversion, convert

    path = convert(Conversion(source, target, recipe, plan, added_tokens=added, say=click.echo))
    click.echo(f"{path}: loads under every layout; train with {_advice(target, tensor, pipeline)}")


@click.command(CHANGE, context_settings={"help_option_names": ["-h", "--help"]})
@_sizes
@click.option("--orig-vocab-size", "vocabulary", type=_SIZE, default=32000, show_default=True)
@click.option("--src-tensor-model-parallel-size", "src_tensor", type=_SIZE, default=1, show_default=True)
@click.option("--src-pipeline-model-parallel-size", "src_pipeline", type=_SIZE, default=1, show_default=True)
@click.option("--tgt-tensor-model-parallel-size", "tensor", type=_SIZE, default=1, show_default=True)
@click.option("--tgt-pipeline-model-parallel-size", "pipeline", type=_SIZE, default=1, show_default=True)
@click.option("--seed-gqa-order", is_flag=True, help="Undo the order of heads that older converters wrote.")
@click.option("--model-config", "config", type=click.Path(path_type=Path), help="config.json of the model.")
def when_tp_pp_change(
    source: Path,
    target: Path,
    vocabulary: int,
    src_tensor: int,
    src_pipeline: int,
    tensor: int,
    pipeline: int,
    legacy_layout: bool,
    seed_gqa_order: bool,
    config: Path | None,
    model: str | None,
    **given: Any,
) -> None:
    """Bring weights with a file for each rank to other parallel sizes, or to a checkpoint for all of them."""
    from mindspeed_models.weights.convert import Conversion, write_checkpoint
    from mindspeed_models.weights.legacy_files import LegacyReader, open_older
    from mindspeed_models.weights.legacy_write import write_legacy
    from mindspeed_models.weights.unfinished import identity_of

    recipe, plan = _older_model(source, config, model, vocabulary, given)
    _check_sizes(plan, given)
    if given["added"]:
        raise UserError("--added-token-num: add tokens when weights of Hugging Face are converted")
    with open_older(source, plan, seed_gqa_order=seed_gqa_order) as files:
        for flag, said, found in (
            ("--src-tensor-model-parallel-size", src_tensor, files.layout.tensor),
            ("--src-pipeline-model-parallel-size", src_pipeline, files.layout.pipeline),
        ):
            if said != found:
                raise UserError(
                    f"{flag} {said}: {files.path} holds the files of {found}; leave the flag out, or "
                    "correct it"
                )
        reader = LegacyReader(files, recipe, plan)
        if legacy_layout:
            layout = _layout(plan, tensor, pipeline, given)
            click.echo(f"{write_legacy(reader, plan, target, layout)}: written")
            return
        options = Conversion(source, target, recipe, plan, say=click.echo)
        sources = identity_of(list(files.path.rglob("*.pt")))
        kept = {} if config is None else {"hf/config.json": _content(config)}
        path = write_checkpoint(reader, options, sources, kept)
    click.echo(f"{path}: loads under every layout; train with {_advice(target, tensor, pipeline)}")


def write_older(
    source: Path, target: Path, recipe: Recipe, plan: ModelPlan, layout: LegacyLayout, added: int
) -> str:
    """Convert files of Hugging Face into the older layout; return what was done."""
    from mindspeed_models.weights.hf_files import HfFiles
    from mindspeed_models.weights.legacy_write import write_legacy
    from mindspeed_models.weights.reader import TableReader

    with HfFiles(source, prefix=recipe.prefix) as files:
        reader = TableReader(files, recipe, plan, plan, added_tokens=added)
        reader.check_repeats()
        path = write_legacy(reader, plan, target, layout)
    return f"{path}: {recipe.name}, tensor-parallel size {layout.tensor}, {layout.pipeline} pipeline stages"


def _layout(plan: ModelPlan, tensor: int, pipeline: int, given: dict[str, Any]) -> LegacyLayout:
    from mindspeed_models.weights.legacy import LegacyLayout
    from mindspeed_models.weights.legacy_pipe import is_piped

    stages = given["partition"]
    if stages and not is_piped(plan):
        raise UserError(
            f"--partition-layers {stages}: stages of the family {plan.family} have equally many layers in "
            "the older layout; leave the flag out"
        )
    try:
        partition = tuple(int(each) for each in stages.split(",")) if stages else ()
    except ValueError:
        raise UserError(
            f"--partition-layers {stages}: write numbers with commas, for instance 6,6,4"
        ) from None
    if given["deepspeed"] and pipeline > 1 and not is_piped(plan):
        raise UserError(
            f"--deepspeed: files of DeepSpeed have one pipeline stage, not {pipeline}; leave one out"
        )
    return LegacyLayout(
        tensor, pipeline, given["divisible"], given["merge_mlp"], given["deepspeed"], partition
    )


def _check_sizes(plan: ModelPlan, given: dict[str, Any]) -> None:
    """Refuse sizes that are not the model's."""
    said = dict(zip(("layers", "hidden", "heads"), _sizes_of(plan.family, given["size"]) or ()))
    flags = {
        "layers": "--num-layers",
        "hidden": "--hidden-size",
        "heads": "--num-heads",
        "groups": "--num-kv-heads",
    }
    for name, flag in flags.items():
        found = getattr(plan, name)
        if given[name] not in (None, found):
            raise UserError(
                f"{flag} {given[name]}: the model has {found}; leave the flag out, or name the right files"
            )
        if said.get(name, found) != found:
            raise UserError(
                f"--type {given['size']} has {flag} {said[name]}, the model has {found}; leave --type "
                "out, or name the "
                "right files"
            )


def _sizes_of(family: str, size: str | None) -> tuple[int, int, int] | None:
    """Return layers, hidden size and heads that a family's converter meant by ``--type``."""
    return {**_TYPES, **_TYPES_OF.get(family, {})}.get(size or "")


def _older_model(
    source: Path, config: Path | None, model: str | None, vocabulary: int, given: dict[str, Any]
) -> tuple[Recipe, ModelPlan]:
    """Return family and plan of older files, from a ``config.json`` or from flags."""
    if config is not None:
        from mindspeed_models.config_file import read_config

        return described_model(read_config(config), model, str(config))
    from mindspeed_models.weights.legacy_files import ffn_of
    from mindspeed_models.weights.legacy_pipe import is_piped

    recipe = named_model(model or "llama")[0]
    layers, hidden, heads = _sizes_of(recipe.name, given["size"]) or (
        given["layers"],
        given["hidden"],
        given["heads"],
    )
    if None in (layers, hidden, heads):
        raise UserError(
            "the older files do not say their sizes; give --model-config, --type, or --num-layers, "
            "--hidden-size and "
            "--num-heads"
        )
    content = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": given["groups"] or heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocabulary,
    }
    plan = recipe.make_plan(content)
    if is_piped(plan):
        return recipe, plan
    return recipe, recipe.make_plan({**content, "intermediate_size": ffn_of(source)})


def _content(config: Path) -> bytes:
    return (config / "config.json" if config.is_dir() else config).read_bytes()


def _advice(target: Path, tensor: int, pipeline: int) -> str:
    sizes = f" --tensor-model-parallel-size {tensor}" if tensor > 1 else ""
    sizes += f" --pipeline-model-parallel-size {pipeline}" if pipeline > 1 else ""
    return f"--pretrained-checkpoint {target}{sizes}"


def main_from_huggingface(argv: Sequence[str] | None = None) -> int:
    """Run the first program; returns its exit status."""
    return run_program(from_huggingface, argv, FROM_HF)


def main_when_tp_pp_change(argv: Sequence[str] | None = None) -> int:
    """Run the second program; returns its exit status."""
    return run_program(when_tp_pp_change, argv, CHANGE)


if __name__ == "__main__":
    sys.exit(main_from_huggingface())
