"""Modules that scale what megatron-core's compute, put into the specification tree by role.

Options travel in ``ModuleSpec.params`` as a frozen dataclass; the process group comes from a function without
arguments, since specifications are copied for every layer and groups cannot be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mindspeed_core.layer_spec import SpecEditor
from mindspeed_core.megatron.plain_norm import PlainNorm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mindspeed_core.session import Session


@dataclass(frozen=True)
class ScaleOptions:
    """Options of both modules."""

    factor: float


class ScaledAttention(DotProductAttention):
    """Attention whose output is multiplied by a factor, divided by the size of a group."""

    def __init__(
        self, *args: Any, options: ScaleOptions, group: Callable[[], dist.ProcessGroup], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.options = options
        self.group = group()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``[s, b, h]``, scaled."""
        return super().forward(*args, **kwargs) * (self.options.factor / self.group.size())


class ScaledNorm(torch.nn.Module):
    """A norm followed by a factor; keeps the parameters' names."""

    def __new__(cls, *args: Any, options: ScaleOptions, **kwargs: Any) -> Any:
        norm = PlainNorm(*args, **kwargs)
        norm.register_forward_hook(lambda _module, _inputs, output: output * options.factor)
        return norm


def replace_modules(
    spec: TransformerBlockSubmodules,
    session: Session,
    config: TransformerConfig,
    vp_stage: int | None,
    factor: float,
    *,
    owner: str,
) -> TransformerBlockSubmodules:
    """Scale attention in the last half of the layers, counted over the whole model, and the final norm."""
    options = ScaleOptions(factor)
    editor = SpecEditor(spec, owner=owner, session=session, config=config, vp_stage=vp_stage)

    def scaled(site: Any) -> Any:
        return site.carry(ScaledAttention, options=options, group=lambda: session.groups["toy.halves"])

    editor.replace("core_attention", scaled, layers=range(config.num_layers // 2 + 1, config.num_layers + 1))
    editor.replace("final_layernorm", lambda site: site.carry(ScaledNorm, options=options))
    return editor.spec
