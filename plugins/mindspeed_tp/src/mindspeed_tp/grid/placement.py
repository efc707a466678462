"""Placement of norms, attention and layers of the grid in a specification tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.transformer import ModuleSpec

from mindspeed_megatron.layer_sites import Site
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_megatron.unwrap import unwrap
from mindspeed_tp.grid.layers import CoreAttention2D, attention_2d, drawn_apart, layer_2d
from mindspeed_tp.grid.norms import FinalNorm2D, Norm2D
from mindspeed_tp.grid.place import here
from mindspeed_tp.options import GRID

if TYPE_CHECKING:
    import torch

    from mindspeed_core.session import Session


def place_grid(session: Session, spec: Any, groups: Callable[[], Any]) -> Any:
    """Return the tree with everything but the linears of a model on a grid.

    Args:
        session: counts what is placed.
        spec: the tree.
        groups: returns the model's process groups.
    """
    editor = SpecEditor(spec, owner=GRID, session=session)
    editor.replace(("input_layernorm", "pre_mlp_layernorm"), Norm2D)
    editor.replace("final_layernorm", FinalNorm2D)
    editor.replace(("self_attn_bda", "mlp_bda"), ModuleSpec(module=drawn_apart))

    def core(site: Site) -> ModuleSpec:
        return ModuleSpec(module=CoreAttention2D, params={"inner": site.spec, "groups": groups})

    editor.replace("core_attention", core, wrap=True)
    editor.replace("self_attention", _refined(attention_2d), wrap=True)
    editor.replace("layer", _refined(layer_2d), wrap=True)
    return editor.spec


def _refined(subclass: Callable[[type], type]) -> Callable[[Site], ModuleSpec | None]:
    def refine(site: Site) -> ModuleSpec | None:
        return None if site.spec is None else site.carry(subclass(site.spec.module))

    return refine


def lengthen_angles(session: Session, model: Sequence[torch.nn.Module]) -> None:
    """Count all positions of a sequence on pipeline stages that receive a part of the hidden state."""
    for chunk in model:
        bare: Any = unwrap(chunk)
        angles = getattr(bare, "rotary_pos_emb", None)
        if angles is None or bare.pre_process:
            continue
        counted = angles.get_rotary_seq_len

        def all_positions(*args: Any, counted: Any = counted, **named: Any) -> int:
            return int(counted(*args, **named)) * here().x.size()

        session.instances.set(GRID, angles, "get_rotary_seq_len", all_positions)
