"""Model families: the description of a family, the plan of one model, and the families that are installed.

A recipe is a declaration: rules between ``config.json`` and Megatron's flags, and a weight table. Importing a
recipe loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import DeclarationError
from mindspeed_models.weights.table import Entry, Row, expand


@dataclass(frozen=True)
class ModelPlan:
    """One model in Megatron's terms.

    Attributes:
        family: name of the recipe.
        arguments: values of flags that the model is, by attribute of the parsed arguments. Another value is
            another model: flags that contradict are refused.
        defaults: values that the family trains with, which any flag may change.
    """

    family: str
    arguments: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def value(self, name: str, default: Any = None) -> Any:
        """Return an argument."""
        found = self.arguments.get(name)
        return default if found is None else found

    def replaced(self, arguments: Mapping[str, Any]) -> ModelPlan:
        """Return the plan with other values of its arguments."""
        return replace(self, arguments={**self.arguments, **arguments})

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return int(self.arguments["num_layers"])

    @property
    def hidden(self) -> int:
        """Return the hidden size."""
        return int(self.arguments["hidden_size"])

    @property
    def heads(self) -> int:
        """Return the number of query heads."""
        return int(self.arguments["num_attention_heads"])

    @property
    def groups(self) -> int:
        """Return the number of key and value heads."""
        return int(self.value("num_query_groups", self.heads))

    @property
    def head_dim(self) -> int:
        """Return the channels of a head."""
        return int(self.value("kv_channels", self.hidden // self.heads))

    @property
    def experts(self) -> int:
        """Return the number of routed experts, 0 for none."""
        return int(self.value("num_experts", 0))

    @property
    def prediction_modules(self) -> int:
        """Return the number of multi-token prediction modules."""
        return int(self.value("mtp_num_layers", 0))

    @property
    def tied(self) -> bool:
        """Return whether the output layer is the embedding."""
        return not self.value("untie_embeddings_and_output_weights", False)

    @property
    def vocabulary(self) -> int:
        """Return the rows of the embedding in the files."""
        return int(self.arguments["vocab_size"])

    def routed(self, layer: int) -> bool:
        """Return whether a decoder layer has routed experts."""
        if not self.experts:
            return False
        pattern = self.value("moe_layer_freq", 1)
        return layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer])


Config = Mapping[str, Any]
"""The content of a ``config.json``."""


@dataclass(frozen=True)
class Recipe:
    """One family of models.

    Attributes:
        name: kebab-case, for instance ``qwen3-moe``.
        summary: one line for the listing.
        model_types: values of ``model_type`` in ``config.json`` that this family reads.
        plan: makes the plan of a ``config.json``; raises `RecipeError` for what the family refuses.
        config: the way back: a ``config.json`` of a plan.
        rows: the weight table.
        sizes: contents of a ``config.json`` by name of a size, for training from nothing.
        chat_template: name of the template of chats where a tokenizer brings none.
        prefix: a part of names in files that some publishers leave out, for instance ``transformer.``.
        ignored: patterns (``fnmatch``) of names in files that are no weights.
        refused: why models of this type are not supported; then nothing else is given.
    """

    name: str
    summary: str = ""
    model_types: tuple[str, ...] = ()
    plan: Callable[[Config], ModelPlan] | None = None
    config: Callable[[ModelPlan], dict[str, Any]] | None = None
    rows: tuple[Row, ...] = ()
    sizes: Mapping[str, Config] = field(default_factory=dict)
    chat_template: str = ""
    prefix: str = ""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")
    refused: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.model_types, str):
            raise DeclarationError(f"recipe {self.name}: model_types is a tuple")
        if not self.refused and (self.plan is None or not self.rows):
            raise DeclarationError(f"recipe {self.name}: give plan and rows, or the reason why it is refused")

    def entries(self, plan: ModelPlan) -> dict[tuple[str, int | None], Entry]:
        """Return the weight table of one model, by key and expert."""
        return expand(self.rows, plan)

    def make_plan(self, config: Config) -> ModelPlan:
        """Return the plan of a ``config.json``.

        Raises:
            RecipeError: it is of no model that this family builds.
        """
        if self.plan is None:
            raise RecipeError(f"models of the family {self.name} are not supported: {self.refused}")
        return self.plan(config)


class RecipeError(UserError):
    """A model that no recipe builds, or a configuration that contradicts itself."""


def check_recipe(found: Any) -> None:
    """Refuse what is registered as a recipe and is none."""
    if not isinstance(found, Recipe) and not (
        isinstance(found, Sequence) and found and all(isinstance(each, Recipe) for each in found)
    ):
        raise DeclarationError(f"{found!r} is no mindspeed_models.recipe.Recipe, nor a tuple of them")
