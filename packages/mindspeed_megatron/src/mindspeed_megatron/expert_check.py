"""Refusal of experts whose copies would drift apart, before a model is wrapped for training.

megatron-core's own modules of experts are marked here, whoever built them; a module of somebody else marks
its parameters itself, since only it knows what they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError
from mindspeed_megatron.experts import expert_marks, mark_expert_parameters
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session

_LAYOUT = ("tensor_model_parallel_size", "expert_tensor_parallel_size", "expert_model_parallel_size")


@dataclass
class PlacedModules:
    """The features that put modules into a session's specifications, by the name of the module's class."""

    owners: dict[str, str] = field(default_factory=dict)


def remember_placed(session: Session, spec: Any) -> None:
    """Remember who put which module into a specification tree, for `settle_experts`."""
    if is_dataclass(spec) and not isinstance(spec, type):
        history = SpecEditor(spec, owner="").history
        session.state(PlacedModules).owners.update((entry.new, entry.owner) for entry in history)


def settle_experts(session: Session, model: Iterable[Any], config: TransformerConfig) -> None:
    """Mark megatron-core's own experts in built chunks, and refuse others that lack the marks.

    Raises:
        SessionError: names the parameter, its module and the feature that placed it.
    """
    if getattr(config, "num_moe_experts", None) is None or session.mode == "inference":
        return
    marks = expert_marks(config)
    for chunk in model:
        modules = dict(unwrap(chunk).named_modules())
        for path, experts in modules.items():
            if path.rpartition(".")[2] != "experts":
                continue
            if type(experts).__module__.startswith("megatron.core."):
                mark_expert_parameters(experts, config)
            for name, parameter in experts.named_parameters():
                lacking = {mark: value for mark, value in marks.items() if _mark(parameter, mark) != value}
                if parameter.requires_grad and lacking:
                    raise _refusal(_owner(session, modules, path), path, name, experts, config, lacking)


def _mark(parameter: Any, name: str) -> bool:
    return bool(getattr(parameter, name, name == "allreduce"))


def _owner(session: Session, modules: dict[str, Any], path: str) -> str:
    """Return the feature that placed a module, or one of those around it; empty for none that said so."""
    owners = session.state(PlacedModules).owners
    while path:
        owner = owners.get(type(modules[path]).__qualname__)
        if owner:
            return owner
        path = path.rpartition(".")[0]
    return ""


def _refusal(
    owner: str, path: str, name: str, experts: Any, config: Any, lacking: dict[str, bool]
) -> SessionError:
    kind = type(experts)
    placed = f"placed by {owner}" if owner else "placed by no feature that said so"
    layout = ", ".join(f"{field} {getattr(config, field)}" for field in _LAYOUT)
    attributes = ", ".join(f"{mark}={value}" for mark, value in lacking.items())
    return SessionError(
        f"{path}.{name} of {kind.__module__}.{kind.__qualname__} ({placed}): ranks hold copies of this "
        f"expert's parameter or other experts ({layout}), and it lacks {attributes}, so that gradients of "
        "copies would not be summed, or not be counted in the norm. The module's constructor has to end with "
        "mindspeed_megatron.experts.mark_expert_parameters(self, config); until it does, train with "
        "expert-tensor-parallel-size equal to tensor-model-parallel-size and expert-model-parallel-size 1"
        + (f", or without {owner}" if owner else "")
    )
