"""Low-rank updates beside frozen weights: ``W x + U D x``, where ``U`` is cut like ``W``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from mindspeed_core.layer_spec import SpecEditor
from mindspeed_core.megatron.unwrap import unwrap

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mindspeed_core.session import Session

_NAMES = ("adapter_down", "adapter_up")


class AdaptedLinear(ColumnParallelLinear):
    """A column-parallel layer and its update of rank ``rank``, which begins as zero."""

    def __init__(self, input_size: int, output_size: int, *, rank: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        down = torch.linspace(-0.1, 0.1, rank * input_size).view(rank, input_size)
        self.adapter_down = torch.nn.Parameter(down)
        self.adapter_up = torch.nn.Parameter(torch.zeros(self.output_size_per_partition, rank))

    def forward(self, input_: torch.Tensor, *rest: Any, **named: Any) -> Any:
        output, bias = super().forward(input_, *rest, **named)
        low = copy_to_tensor_model_parallel_region(torch.nn.functional.linear(input_, self.adapter_down))
        return output + torch.nn.functional.linear(low, self.adapter_up), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        whole = self.state_dict(prefix="", keep_vars=True)
        cut = {"weight": 0, "bias": 0, "adapter_up": 0}
        return make_sharded_tensors_for_checkpoint(whole, prefix, cut, sharded_offsets)


def replace_fc1(
    spec: TransformerBlockSubmodules, session: Session, rank: int, *, owner: str
) -> TransformerBlockSubmodules:
    """Put an adapter beside every ``fc1``."""
    editor = SpecEditor(spec, owner=owner, session=session)
    editor.replace("fc1", lambda site: site.carry(AdaptedLinear, rank=rank))
    return editor.spec


def is_adapter(name: str) -> bool:
    """Return whether a weight belongs to an adapter."""
    return name.endswith(_NAMES)


def freeze_base(model: list[Any]) -> None:
    """Train adapters alone."""
    for chunk in model:
        for name, parameter in unwrap(chunk).named_parameters():
            parameter.requires_grad_(is_adapter(name))
