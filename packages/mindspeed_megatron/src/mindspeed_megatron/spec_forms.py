"""Forms in which megatron-core says how a module is built: a ``ModuleSpec``, a class, or a ``partial``.

Up to 0.16 a module with submodules is a ``ModuleSpec``. From 0.17 on experts, and from 0.18 on all MLPs, are
``functools.partial`` objects of what builds them. `as_spec` shows each of them as a ``ModuleSpec``, so that
what edits specifications knows one form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec

ROLES = (
    "megatron.core.transformer.transformer_block:TransformerBlockSubmodules",
    "megatron.core.transformer.transformer_layer:TransformerLayerSubmodules",
    "megatron.core.transformer.attention:SelfAttentionSubmodules",
    "megatron.core.transformer.multi_latent_attention:MLASelfAttentionSubmodules",
    "megatron.core.transformer.mlp:MLPSubmodules",
    "megatron.core.transformer.moe.moe_layer:MoESubmodules",
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayerSubmodules",
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlockSubmodules",
)
"""Dataclasses whose fields are the roles of modules."""
_SUBMODULES = "submodules"
_OF_LAYER = "as_mlp_submodule"
"""Method of MLP classes that takes what a layer of megatron-core 0.18 hands to its MLP."""
_BUILT = {"_build_shared_experts": SharedExpertMLP}
"""Functions that build a module of a class, by name."""


class LayerMlpSpec(ModuleSpec):
    """Specification of an MLP that a layer builds by its ``as_mlp_submodule``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the module from what a layer hands over."""
        build: Callable[..., Any] = getattr(self.module, _OF_LAYER)
        return build(*args, **{_SUBMODULES: self.submodules, **self.params, **kwargs})


def as_spec(value: Any) -> ModuleSpec | None:
    """Return a form as a ``ModuleSpec`` that shares its submodules; None for nothing and for identities."""
    if value is None or value in (IdentityOp, IdentityFuncOp):
        return None
    if isinstance(value, ModuleSpec):
        return None if value.module in (IdentityOp, IdentityFuncOp) else value
    if isinstance(value, partial):
        params = dict(value.keywords)
        submodules = params.pop(_SUBMODULES, None)
        return ModuleSpec(module=_built_class(value.func), params=params, submodules=submodules)
    return ModuleSpec(module=value)


def copied_partial(value: partial[Any], copied: Callable[[str, Any], Any]) -> partial[Any]:
    """Return a ``partial`` with each argument by name as ``copied(name, argument)`` returns it."""
    return partial(
        value.func, *value.args, **{name: copied(name, item) for name, item in value.keywords.items()}
    )


def in_role(spec: ModuleSpec, role: str) -> ModuleSpec:
    """Return the specification as a module of this role is built: an MLP from what its layer hands over."""
    if role != "mlp" or isinstance(spec, LayerMlpSpec) or not hasattr(spec.module, _OF_LAYER):
        return spec
    changed = copy.copy(spec)
    changed.__class__ = LayerMlpSpec
    return changed


def _built_class(builder: Any) -> Any:
    """Return the class whose instances a function or a method of the class builds."""
    owner = getattr(builder, "__self__", None)
    if isinstance(owner, type):
        return owner
    return _BUILT.get(getattr(builder, "__name__", ""), builder)
