"""Places of modules in a specification tree, and the record of who replaced what there."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed_core.errors import UserError
from mindspeed_megatron.linear_layout import wrapped_argument

HISTORY = "mindspeed_history"


class LayerSpecError(RuntimeError):
    """A specification tree cannot be edited as asked; the message names role, path and owners."""


class LinearLayoutError(LayerSpecError, UserError):
    """A module goes around a linear whose layout it does not know; the message names both and the way out."""


@dataclass(frozen=True)
class Replacement:
    """One replacement, as `SpecEditor.history` reports it.

    Attributes:
        owner: the feature.
        role: the role of the site.
        path: where in the tree, ``layers.3.self_attention.core_attention`` (position within the chunk).
        old: class that was there, ``None`` for an empty site.
        new: class that is there now.
        layouts: names of the layouts of linears that a wrapper knows, beside megatron-core's.
    """

    owner: str
    role: str
    path: str
    old: str | None
    new: str
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Site:
    """A place in the tree where a module is specified.

    Attributes:
        role: what the module is: ``qkv``, ``core_attention``, ``fc1``, ``input_layernorm``, ….
        path: attribute path from the root, list positions as numbers.
        layer_number: number of the layer in the whole model, counted from 1 as megatron-core does; None
            outside layers, and where the editor has no configuration.
        spec: what is specified there; a bare class appears as ``ModuleSpec(module=class)``, an empty site
            (None or an identity) as None.
        within: roles of the modules around it, outermost first.
        wrapped_in: what wraps it at this place and declares so, outermost first.
    """

    role: str
    path: str
    layer_number: int | None
    spec: ModuleSpec | None
    within: tuple[str, ...] = ()
    wrapped_in: tuple[str, ...] = ()

    @property
    def placed_by(self) -> str:
        """Return the feature that put the module here; empty where no feature did."""
        past = history(self.spec) if self.spec is not None else ()
        return past[-1].owner if past else ""

    def wrap(self, module: type, **params: Any) -> ModuleSpec:
        """Return a specification of ``module`` that contains what this site specifies.

        Features that come later find what is inside, and replace it there.

        Args:
            module: a class with the attribute ``wraps``: the name of the constructor's argument that gets the
                specification of what stands here. The other arguments are those of what it contains.
            params: further constructor arguments.

        Raises:
            LayerSpecError: the class does not say what it wraps, or nothing stands here.
        """
        inside = wrapped_argument(module)
        if not inside or self.spec is None:
            lacks = f"{module.__qualname__} has no attribute wraps" if not inside else "nothing stands there"
            raise LayerSpecError(f"{self.role} ({self.path}) cannot be wrapped: {lacks}")
        return ModuleSpec(module=module, params={inside: self.spec, **params})

    def carry(self, module: type, **params: Any) -> ModuleSpec:
        """Return a specification of ``module`` that keeps everything else this site specifies.

        Args:
            module: the class that takes over.
            params: further constructor arguments; the same name replaces the old value.
        """
        if self.spec is None:
            return ModuleSpec(module=module, params=params)
        taken_over = copy.copy(self.spec)
        taken_over.module = module
        taken_over.params = {**self.spec.params, **params}
        return taken_over


def history(spec: ModuleSpec) -> tuple[Replacement, ...]:
    """Return who replaced the module of a specification, the first one first."""
    return getattr(spec, HISTORY, ())
