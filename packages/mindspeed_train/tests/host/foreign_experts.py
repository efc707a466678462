"""A module of experts as somebody else writes it, with and without the marks of its parameters."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule

from mindspeed_core.feature import hookimpl
from mindspeed_megatron.experts import draw_experts, mark_expert_parameters
from mindspeed_megatron.layer_spec import SpecEditor


class StackedExperts(MegatronModule):
    """Two layers with a ReLU in between; each parameter stacks whole experts of this rank."""

    marked = True

    def __init__(self, num_local_experts, config, pg_collection=None, **further):
        super().__init__(config)

        def draw():
            up = torch.empty(config.moe_ffn_hidden_size, config.hidden_size)
            config.init_method(up)
            down = torch.empty(config.hidden_size, config.moe_ffn_hidden_size)
            config.output_layer_init_method(down)
            return up, down

        drawn = draw_experts(num_local_experts, config, pg_collection, draw)
        self.up = torch.nn.Parameter(torch.stack([up for up, _ in drawn]))
        self.down = torch.nn.Parameter(torch.stack([down for _, down in drawn]))
        if self.marked:
            mark_expert_parameters(self, config)

    def forward(self, rows, tokens_per_expert, probs):
        of_experts = rows.split(tokens_per_expert.tolist())
        hidden = [
            torch.relu(part @ up.t()) @ down.t() for part, up, down in zip(of_experts, self.up, self.down)
        ]
        return torch.cat(hidden) * probs.unsqueeze(-1), None


class UnmarkedExperts(StackedExperts):
    """Their copies would drift apart."""

    marked = False


class _Placing:
    """Puts the experts of a class into every layer."""

    kind = StackedExperts

    @hookimpl(wrapper=True)
    def build_layer_spec(self):
        editor = SpecEditor((yield), owner="own-experts")
        editor.replace("experts", self.kind)
        return editor.spec


class Stacked(_Placing):
    """Experts that train the same on every layout."""


class Unmarked(_Placing):
    """Experts without marks."""

    kind = UnmarkedExperts
