"""Model families: the description of a family, the plan of one model, and the families that are installed.

A recipe is a declaration: rules between ``config.json`` and Megatron's flags, and a weight table. Importing a
recipe loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import DeclarationError
from mindspeed_models.model_plan import ModelPlan
from mindspeed_models.weights.table import Entry, Row, expand

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
