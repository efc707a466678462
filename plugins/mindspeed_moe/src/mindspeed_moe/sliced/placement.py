"""Placement of sliced layers in a specification tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer import ModuleSpec, TransformerLayer

from mindspeed_core.errors import SessionError
from mindspeed_megatron.layer_sites import Site
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_moe.sliced.layer import SlicedTransformerLayer

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def place_sliced_layers(session: Session, spec: Any, slices: int) -> Any:
    """Return the tree whose transformer layers are computed in so many slices.

    Raises:
        SessionError: another layer than megatron-core's stands in the tree.
    """
    editor = SpecEditor(spec, owner="moe-ampipe", session=session)

    def sliced(site: Site) -> ModuleSpec:
        module = site.spec.module if site.spec is not None else None
        if module is not TransformerLayer:
            name = getattr(module, "__qualname__", module)
            raise SessionError(
                f"{site.path} is {name}, where moe-ampipe refines TransformerLayer; drop --ampipe-degree, or "
                "what put it there"
            )
        return site.carry(SlicedTransformerLayer, slices=slices)

    editor.replace("layer", sliced)
    return editor.spec
