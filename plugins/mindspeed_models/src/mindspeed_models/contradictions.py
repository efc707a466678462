"""Flags compared with the model that a recipe describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_models.model_plan import ALIBI
from mindspeed_models.recipe import ModelPlan

_OF_FILES = ("vocab_size",)
"""Arguments that a tokenizer or a padding may change without changing the model."""
_ALIBI_KIND, _OF_ROOTS = "alibi_fusion_attn_type", 3
"""Of the flag's values, the one by which biases are another function; published models have multiples of the
distance."""


@dataclass(frozen=True)
class Contradiction:
    """An argument whose value is another one than the model's."""

    name: str
    given: Any
    model: Any

    def __str__(self) -> str:
        """Return both values, with the flag as one types it."""
        return f"--{self.name.replace('_', '-')} is {self.given!r}, the model has {self.model!r}"


def contradictions(plan: ModelPlan, args: Any, *, built: bool = False) -> Iterator[Contradiction]:
    """Return the arguments that are not the model's; those that are not given at all are left alone.

    ``built`` is whether they are those of a model that was built, where features have changed some for good.
    """
    changed = plan.as_built() if built else plan.arguments
    for name, value in plan.arguments.items():
        given = getattr(args, name, value)
        if given == changed[name] != value:
            continue
        if name not in _OF_FILES and given is not None and not _same(plan, name, given, value):
            yield Contradiction(name, given, value)
    kind = getattr(args, _ALIBI_KIND, None)
    if plan.value("position_embedding_type") == ALIBI and kind == _OF_ROOTS != plan.value(_ALIBI_KIND):
        yield Contradiction(_ALIBI_KIND, kind, 2)


def with_given(plan: ModelPlan, differing: Iterable[Contradiction]) -> ModelPlan:
    """Return the plan with arguments as they are given: for a model that is overridden."""
    return plan.replaced({each.name: each.given for each in differing})


def _same(plan: ModelPlan, name: str, given: Any, value: Any) -> bool:
    if name == "moe_layer_freq" and given != value:
        other = plan.replaced({name: given})
        if isinstance(given, list) and len(given) != plan.layers:
            return False
        return all(plan.routed(layer) == other.routed(layer) for layer in range(plan.layers))
    if isinstance(value, (list, tuple)) and isinstance(given, (list, tuple)):
        return list(given) == list(value)
    if isinstance(value, float) and isinstance(given, (int, float)):
        # A flag's text and a file's number may round differently.
        return abs(given - value) <= 1e-12 * abs(value)
    return bool(given == value)
