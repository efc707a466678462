"""Placement of attention and layers of uneven parts, and changes of what is built outside of layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from megatron.core.transformer import ModuleSpec
from torch import Tensor

from mindspeed_core.session import current
from mindspeed_megatron.layer_sites import Site
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_megatron.unwrap import unwrap
from mindspeed_tp.described_layer import DescribesItsLinears
from mindspeed_tp.linear_function import Communication, How, PlannedLinearFunction
from mindspeed_tp.options import UNEVEN
from mindspeed_tp.plan import LinearPlan
from mindspeed_tp.rows import Rows
from mindspeed_tp.uneven.cut import Cuts
from mindspeed_tp.uneven.linears import ALONE, TOGETHER
from mindspeed_tp.vocabulary import embedded

if TYPE_CHECKING:
    import torch

    from mindspeed_core.session import Session


@cache
def uneven_attention(attention: type) -> type:
    """Return a subclass of an attention module that has this rank's number of heads."""

    class UnevenAttention(attention):
        def __init__(self, *, config: Any, pg_collection: Any, cuts: Cuts, **named: Any) -> None:
            own_config, groups = copy.copy(config), copy.copy(pg_collection)
            own_config.num_query_groups = cuts.groups.sizes[current().groups[TOGETHER].rank()]
            own_config.num_attention_heads = own_config.num_query_groups * cuts.per_group
            groups.tp = current().groups[ALONE]
            super().__init__(config=own_config, pg_collection=groups, **named)
            # Its norms of heads are the same on all ranks.
            self.tp_group = pg_collection.tp

    UnevenAttention.__name__ = UnevenAttention.__qualname__ = f"Uneven{attention.__name__}"
    return UnevenAttention


@cache
def described_layer(layer: type) -> type:
    """Return a subclass of a transformer layer whose linears describe themselves in checkpoints."""
    return type(f"Uneven{layer.__name__}", (DescribesItsLinears, layer), {})


def place_uneven(session: Session, spec: Any, cuts: Cuts) -> Any:
    """Return the tree with everything but the linears of a model of uneven parts.

    Args:
        session: counts what is placed.
        spec: the tree.
        cuts: of the model.
    """
    editor = SpecEditor(spec, owner=UNEVEN, session=session)

    def attention(site: Site) -> ModuleSpec | None:
        return None if site.spec is None else site.carry(uneven_attention(site.spec.module), cuts=cuts)

    def layer(site: Site) -> ModuleSpec | None:
        return None if site.spec is None else site.carry(described_layer(site.spec.module))

    editor.replace("self_attention", attention, wrap=True)
    editor.replace("layer", layer, wrap=True)
    return editor.spec


def change_ends(session: Session, model: Sequence[torch.nn.Module], cuts: Cuts) -> None:
    """Let embedding, rotary angles and output layer work on parts of a sequence that differ in length."""
    if cuts.sequence is None or cuts.sequence.even:
        return
    rows = Rows(session.groups[TOGETHER], cuts.sequence)
    change = session.instances.set
    for chunk in model:
        bare: Any = unwrap(chunk)
        angles = getattr(bare, "rotary_pos_emb", None)
        if angles is not None:
            change(UNEVEN, angles, "get_rotary_seq_len", partial(_length, cuts.sequence.total))
        embedding = getattr(getattr(bare, "embedding", None), "word_embeddings", None)
        if embedding is not None:
            change(UNEVEN, embedding, "forward", partial(embedded, embedding, rows=rows))
        output = getattr(bare, "output_layer", None)
        if output is not None:
            change(UNEVEN, output, "_forward_impl", partial(_multiplied, rows))


def _length(positions: int, *_: Any, **__: Any) -> int:
    return positions


def _multiplied(
    rows: Rows, input: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any
) -> Tensor:
    """Multiply gathered rows, in place of megatron-core's function of the same arguments."""
    how = How(LinearPlan(), Communication(gather=rows), bool(named.get("gradient_accumulation_fusion")))
    result: Tensor = PlannedLinearFunction.apply(input, weight, bias, how)
    return result
