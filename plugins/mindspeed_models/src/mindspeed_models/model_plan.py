"""The plan of one model in Megatron's terms: what a recipe makes of a ``config.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ALIBI = "alibi"
"""Positions that are biases of attention."""


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

    def as_built(self) -> dict[str, Any]:
        """Return the arguments as a model has them that is built already, as trainings record them."""
        built = dict(self.arguments)
        if built.get("position_embedding_type") == ALIBI:
            # Whoever adds biases to attention builds a model without position embeddings.
            built["position_embedding_type"] = "none"
        return built

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
