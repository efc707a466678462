"""A low-rank product beside a linear that stays what it is: ``W x + U D x``, whoever computes ``W x``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from mindspeed_core.layer_spec import SpecEditor

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mindspeed_core.session import Session


class BesideLinear(torch.nn.Module):
    """A column-parallel linear and a product of rank ``rank`` that is added to its output."""

    wraps: ClassVar[str] = "inner"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        inner: ModuleSpec,
        rank: int,
        config: TransformerConfig,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.inner = build_module(inner, input_size, output_size, config=config, **options)
        down = torch.linspace(-0.2, 0.3, rank * input_size).view(rank, input_size)
        up = torch.linspace(-0.3, 0.2, output_size * rank).view(output_size, rank)
        ranks, mine = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        self.down = torch.nn.Parameter(down)
        self.up = torch.nn.Parameter(up.chunk(ranks)[mine].contiguous())
        self.down.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.up.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor, *rest: Any, **named: Any) -> Any:
        output, bias = self.inner(input_, *rest, **named)
        low = torch.nn.functional.linear(input_, self.down)
        together = (
            gather_from_sequence_parallel_region
            if self.config.sequence_parallel
            else copy_to_tensor_model_parallel_region
        )
        return output + torch.nn.functional.linear(together(low), self.up), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        # A checkpoint names the weight as without the product.
        inside = self.inner.sharded_state_dict(f"{prefix}inner.", sharded_offsets, metadata)
        replace_prefix_for_sharding(inside, f"{prefix}inner.", prefix)
        own = {"down": self.down, "up": self.up}
        return {**inside, **make_sharded_tensors_for_checkpoint(own, prefix, {"up": 0}, sharded_offsets)}


def place_beside(
    spec: TransformerBlockSubmodules, session: Session, rank: int, *, owner: str
) -> TransformerBlockSubmodules:
    """Put the product beside every ``fc1``."""
    editor = SpecEditor(spec, owner=owner, session=session)
    editor.replace("mlp.fc1", lambda site: site.wrap(BesideLinear, rank=rank), wrap=True)
    return editor.spec
