"""Biases of the linears of attention alone (InternLM): of queries, keys and values, and of the projection.

The bias of the projection is on every tensor-parallel rank and added once, behind the sum over ranks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_megatron.layer_spec import ANY_LAYOUT, Site, SpecEditor

if TYPE_CHECKING:
    from mindspeed_core.session import Session

ROLES = ("self_attention.qkv", "self_attention.proj")
FLAG = "--row-col-parallel-linear-bias"


@cache
def with_bias(base: Any) -> Any:
    """Return the subclass of a linear that has a bias, whatever its layer asks for."""

    class WithBias(base):
        def __init__(self, *args: Any, bias: bool = True, **named: Any) -> None:
            super().__init__(*args, bias=True, **named)

    WithBias.__name__ = WithBias.__qualname__ = f"Biased{base.__name__}"
    return WithBias


def place_biases(session: Session, spec: Any, owner: str) -> Any:
    """Return the tree with biases in the linears of attention.

    Args:
        session: counts what is placed.
        spec: the tree of a chunk.
        owner: the feature.

    Raises:
        UserError: something that is no class stands there.
    """
    editor = SpecEditor(spec, owner=owner, session=session)

    def biased(site: Site) -> Any:
        module: Any = site.spec.module if site.spec is not None else None
        if not isinstance(module, type):
            raise UserError(f"{FLAG}: {site.role} ({site.path}) is {module!r}, which is no class of linears")
        return site.carry(with_bias(module))

    editor.replace(ROLES, biased, wrap=True, layouts=ANY_LAYOUT)
    return editor.spec
