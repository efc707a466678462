"""Experts that run one after the other, without what megatron-core's own get wrong when ranks share them.

Where experts are less cut than attention, each tensor-parallel rank holds whole experts and sees other
tokens, so their gradients must be summed over those ranks too, which megatron-core does only when experts are
also distributed. A bias of such an expert counts in the gradient norm on every rank that has it, not only on
the first tensor-parallel one; and under sequence parallelism its gradient must not be summed over
tensor-parallel ranks again, which may even hold other experts. Weights drawn on CPU come from a
generator that stands at the same place on every rank, so that distributed experts would start as copies of
each other.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


class PlainExperts(SequentialMLP):
    """megatron-core's sequential experts, the same model on every layout."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build this rank's experts, with the groups ``tp``, ``ep``, ``expt_tp`` and ``expt_dp``."""
        assert pg_collection is not None
        groups: Any = pg_collection
        rank, size = groups.ep.rank(), groups.ep.size()
        draw = size > 1 and config.use_cpu_initialization and config.perform_initialization
        if draw:
            _draw(rank * num_local_experts, config, submodules, groups)
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection)
        if draw:
            _draw((size - rank - 1) * num_local_experts, config, submodules, groups)
        whole = groups.expt_tp.size() == 1
        less_cut = groups.expt_tp.size() != groups.tp.size()
        for parameter in self.parameters():
            if less_cut:
                parameter.allreduce = False
            if whole:
                parameter.tensor_model_parallel = True
                parameter.sequence_parallel = False


class ExpertOutput(RowParallelLinear):
    """The second linear of an expert, whose result megatron-core adds the weighted bias to in place."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply ``[tokens, f/etp]`` by the weight, giving ``[tokens, h]`` and the bias ``[h]``."""
        output, bias = super().forward(input_)
        # Where experts are whole the result is the input of a reduction over one rank, which autograd lets
        # nobody write into.
        return (output if bias is None else output.clone()), bias


def _draw(count: int, config: TransformerConfig, submodules: MLPSubmodules, groups: Any) -> None:
    """Draw and forget the weights of other ranks' experts, so that all ranks leave the generator alike."""
    # An expert takes the width of its second linear from the configuration.
    narrow = copy(config)
    narrow.ffn_hidden_size = config.moe_ffn_hidden_size
    for _ in range(count):
        width = config.moe_ffn_hidden_size
        MLP(narrow, submodules, is_expert=True, ffn_hidden_size=width, tp_group=groups.expt_tp)
