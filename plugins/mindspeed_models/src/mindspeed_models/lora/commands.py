"""Sub-commands of ``mindspeed-models`` for adapters: merge them, write and read peft directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_models.config_file import read_config
from mindspeed_models.families import family_of
from mindspeed_models.lora.peft_files import is_peft
from mindspeed_models.starting_point import is_model_folder

if TYPE_CHECKING:
    from mindspeed_models.lora.adapter_files import Adapters
    from mindspeed_models.recipe import ModelPlan, Recipe

HUGGING_FACE, DISTRIBUTED = "hf", "dist"


def merge(
    base: Path, adapter: Path, target: Path, *, form: str | None, model_config: Path | None, any_base: bool
) -> str:
    """Merge adapters into a base; returns what is to be said.

    Args:
        base: a Hugging Face folder, or one of checkpoints.
        adapter: a folder of a run with adapters, or a peft directory.
        target: the folder that receives the merged weights.
        form: of the result; that of the base.
        model_config: ``config.json`` of the model, where the base is a checkpoint and the adapter peft's.
        any_base: merge into another base than that of the adapters too.

    Raises:
        UserError: folders and formats do not fit.
    """
    from mindspeed_models.lora.merge import merge_into_checkpoint, merge_into_folder

    kind = HUGGING_FACE if is_model_folder(str(base)) else DISTRIBUTED
    if form not in (None, kind):
        names = {HUGGING_FACE: "a Hugging Face folder", DISTRIBUTED: "a folder of checkpoints"}
        raise UserError(
            f"--format {form}: --load {base} is {names[kind]}, and merged weights have the format of "
            "their base; convert the one or the other (mindspeed-models convert, export)"
        )
    if target.resolve() == base.resolve():
        raise UserError(f"--save {target}: holds the base; give another folder")
    described = _described(model_config or base) if kind == HUGGING_FACE or model_config else None
    adapters = load(adapter, described)
    if kind == DISTRIBUTED:
        rounding = merge_into_checkpoint(base, adapters, target, any_base=any_base)
    else:
        assert described is not None
        rounding = merge_into_folder(base, adapters, target, *described, any_base=any_base)
    return f"{target}: {rounding}"


def export(adapter: Path, model_config: Path, target: Path, *, name: str) -> str:
    """Write the adapters of a run as a peft directory; returns what is to be said."""
    from mindspeed_models.lora.adapter_files import write_peft

    recipe, plan = _described(model_config)
    adapters = load(adapter, (recipe, plan))
    base = str(model_config) if is_model_folder(str(model_config)) else ""
    targets = write_peft(adapters, target, recipe.entries(plan), plan, base=base, name=name)
    return f"{target}: adapters of {', '.join(targets)}, rank {adapters.rank}"


def load(folder: Path, described: tuple[Recipe, ModelPlan] | None) -> Adapters:
    """Read adapters of either form.

    Raises:
        UserError: it is a peft directory, and nothing says of which model.
    """
    from mindspeed_models.lora.adapter_files import read_adapters, read_peft

    if not is_peft(folder):
        return read_adapters(folder)
    if described is None:
        raise UserError(
            f"--lora-load {folder} is a peft directory, whose names are Hugging Face's; say with "
            "--model-config which model it belongs to"
        )
    recipe, plan = described
    return read_peft(folder, recipe.entries(plan), plan)[0]


def _described(where: Any) -> tuple[Recipe, ModelPlan]:
    config = read_config(where)
    recipe = family_of(config, str(where))
    return recipe, recipe.make_plan(config)
