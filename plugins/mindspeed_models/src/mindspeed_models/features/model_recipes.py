"""The declaration of models by name: flags from a recipe, weights from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Feature, Flag, Proofs, hookimpl
from mindspeed_models.model_names import OVERRIDE, family_names

if TYPE_CHECKING:
    from mindspeed_models.recipe import Config, ModelPlan, Recipe

_MODEL, _CONFIG = "--model", "--model-config"
_PADDED, _ADDED = "--pad-vocab-size-to", "--added-token-num"


class ModelRecipes(Feature):
    """A model by its name or its ``config.json``, and its published weights."""

    name = "model-recipes"
    family = "models"
    summary = "Set a model's flags by name or config.json, and load its published weights"
    flags = (
        Flag(
            _MODEL,
            type=str,
            metavar="NAME[-SIZE]",
            help=f"A model by name, for instance llama3-8b. Families: {', '.join(family_names())}.",
        ),
        Flag(
            _CONFIG,
            type=str,
            per_rank=True,
            metavar="FILE|DIR",
            help="A config.json, or a folder with one: its model is built. Default: that of --load.",
        ),
        Flag(OVERRIDE, help="Let flags win over the model that --model, --model-config or --load describes."),
        Flag(
            _ADDED,
            type=int,
            default=0,
            help="Tokens of the tokenizer beyond the model's; their rows begin as the mean of all others.",
        ),
    )
    docs = "mindspeed_models:docs/model-recipes.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_models.features.recipe_proofs:RECIPE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a model is named, by a flag or by the folder that is loaded."""
        from mindspeed_models.starting_point import folders

        named = getattr(args, "model", None) or getattr(args, "model_config", None)
        return bool(named) or bool(folders(args))

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return the flags of the model."""
        if not cls.enabled(args):
            return {}
        from mindspeed_models.recipe import RecipeError

        try:
            found = described(args)
        except RecipeError:
            # `validate` says what is wrong.
            return {}
        if found is None:
            return {}
        _, plan = found
        values = {**plan.defaults, **plan.arguments}
        values["vocab_size"] = plan.vocabulary + (getattr(args, "added_token_num", 0) or 0)
        return {name: value for name, value in values.items() if hasattr(args, name)}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse flags that describe another model, each with both values."""
        from mindspeed_models.contradictions import contradictions
        from mindspeed_models.recipe import RecipeError

        try:
            found = described(args)
        except RecipeError as error:
            return [str(error)]
        if found is None:
            return [
                f"{_MODEL} {args.model} names a family and no size; add the size ({_MODEL} "
                f"{args.model}-SIZE), or "
                f"{_CONFIG}"
            ]
        if args.added_token_num < 0:
            return [f"{_ADDED} {args.added_token_num} is negative; give the number of added tokens"]
        if args.override_model_config:
            return []
        recipe, plan = found
        problems = [
            f"{each} ({recipe.name}, {_origin(args)}); leave the flag out, or give {OVERRIDE}"
            for each in contradictions(plan, args)
        ]
        missing = []
        if hasattr(args, "norm_epsilon"):
            # Planned outside of a script of Megatron-LM, the script's own flags are not known.
            missing = [name for name, value in plan.arguments.items() if value and not hasattr(args, name)]
        return [*problems, *(_without_flag(recipe, name) for name in missing)]

    @hookimpl
    def load_checkpoint(self, run: Any, source: str | None) -> Any:
        """Load a Hugging Face folder; anything else is left to the host."""
        from mindspeed_models.starting_point import is_model_folder, starting_folder

        if run.session.platform.dry_run:
            return None
        training = run.optimizer is not None
        found = starting_folder(run.args, training=training) if source is None else None
        if source is not None and is_model_folder(source):
            found = ("source", source)
        if found is None:
            return None
        from mindspeed_models.weights.live import load_folder

        return load_folder(run, found[1], found[0])


class PaddedVocabulary(Feature):
    """The size of the padded vocabulary, in the spelling of MindSpeed-LLM."""

    name = "padded-vocabulary"
    family = "models"
    summary = "Pad the vocabulary to a size of its own, as MindSpeed-LLM spells it"
    flags = (Flag(_PADDED, type=int, help="Rows of embedding and output layer; MindSpeed-LLM's spelling."),)
    docs = "mindspeed_models:docs/padded-vocabulary.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_models.features.recipe_proofs:PADDING_PROOFS")

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return the host's own argument for it."""
        size = getattr(args, "pad_vocab_size_to", None)
        name = _own_padding(args)
        return {name: size} if size is not None and name else {}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a size that has no room, or that ranks cannot share."""
        size, vocabulary = args.pad_vocab_size_to, getattr(args, "vocab_size", None)
        parts = getattr(args, "tensor_model_parallel_size", 1) or 1
        own = _own_padding(args)
        if own is None:
            return [f"{_PADDED} {size}: the program builds its own vocabulary; give its size there"]
        if vocabulary is not None and size < vocabulary:
            return [
                f"{_PADDED} {size} is less than the vocabulary of {vocabulary}; give {vocabulary} or more"
            ]
        if size % parts:
            return [
                f"{_PADDED} {size} cannot be shared by --tensor-model-parallel-size {parts}; give a multiple"
            ]
        if getattr(args, own) != size:
            return [f"{_PADDED} {size}: another flag asks for {getattr(args, own)}; leave one of the two out"]
        return []


class NoGate(Feature):
    """MLPs without a gate, as older scripts spell it."""

    name = "no-add-gate"
    family = "models"
    summary = "Build MLPs without a gate, which is what they are without --swiglu"
    flags = (
        Flag("--no-add-gate", inverts="add_gate", help="MLPs without a gate: the default without --swiglu."),
    )
    docs = "mindspeed_models:docs/no-add-gate.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_models.features.recipe_proofs:GATE_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse flags that add a gate."""
        gated = [flag for flag in ("swiglu", "quick_geglu", "geglu") if getattr(args, flag, False)]
        return (
            [f"--no-add-gate: --{gated[0].replace('_', '-')} has a gate; leave one of the two out"]
            if gated
            else []
        )


def described(args: Any) -> tuple[Recipe, ModelPlan] | None:
    """Return family and plan of the model that flags name; None where they name a family without a size.

    Raises:
        RecipeError: it is no model that is known, or its ``config.json`` is wrong.
    """
    from mindspeed_models.families import family_of, named_model

    model = getattr(args, "model", None)
    named = named_model(model) if model else None
    config = _config(args, None if named is None else named[1])
    if config is None:
        return None
    recipe = named[0] if named is not None else family_of(config, _origin(args))
    return recipe, recipe.make_plan(config)


def _config(args: Any, of_size: Config | None) -> Config | None:
    """Return the configuration: of ``--model-config``, of ``--model``, or of what is loaded."""
    from mindspeed_models.config_file import read_config
    from mindspeed_models.starting_point import folders

    given = getattr(args, "model_config", None)
    if given:
        return read_config(given, _CONFIG)
    if of_size is not None:
        return of_size
    return next((read_config(folder, flag) for flag, folder in folders(args)), None)


def _origin(args: Any) -> str:
    from mindspeed_models.starting_point import folders

    if getattr(args, "model_config", None):
        return f"{_CONFIG} {args.model_config}"
    if getattr(args, "model", None):
        return f"{_MODEL} {args.model}"
    return next((f"{flag} {folder}" for flag, folder in folders(args)), _MODEL)


def _own_padding(args: Any) -> str | None:
    return next(
        (each for each in ("asked_padded_vocab_size", "padded_vocab_size") if hasattr(args, each)), None
    )


def _without_flag(recipe: Recipe, name: str) -> str:
    return (
        f"the family {recipe.name} needs --{name.replace('_', '-')}, which no installed package brings; "
        "upgrade "
        "mindspeed-models"
    )
