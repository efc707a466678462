"""Experts that are one model on every layout: marks of parameters, initial weights, sequential experts.

Where experts are less cut than attention, each tensor-parallel rank holds whole experts and sees other
tokens, so their gradients must be summed over those ranks too, which megatron-core does only when experts are
also distributed. A parameter of such an expert counts in the gradient norm on every rank that has it, not
only on the first tensor-parallel one; and under sequence parallelism its gradient must not be summed over
tensor-parallel ranks again, which may even hold other experts. Weights drawn on CPU come from a generator
that stands at the same place on every rank, so that distributed experts would start as copies of each other.

A module of experts of your own calls `mark_expert_parameters` when it is built and draws its weights with
`draw_experts`; hosts refuse modules whose parameters lack the marks.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.core.tensor_parallel import RowParallelLinear, get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

T = TypeVar("T")


def mark_expert_parameters(experts: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark the parameters of a module of experts for the reduction of gradients and for their norm.

    Call it at the end of the module's constructor, when its parameters exist. Parameters that expert tensor
    parallelism cuts keep the marks of tensor parallelism that the module gave them.

    Args:
        experts: holds the routed experts of this rank and nothing else.
        config: of the model.
    """
    marks = expert_marks(config)
    for parameter in experts.parameters():
        for name, value in marks.items():
            setattr(parameter, name, value)


def expert_marks(config: TransformerConfig) -> dict[str, bool]:
    """Return the attributes that parameters of experts need on a layout, by name."""
    marks = {}
    if config.expert_model_parallel_size > 1 or _cut(config) != config.tensor_model_parallel_size:
        # They are reduced over the ranks that hold the same experts, not over data-parallel ranks.
        marks["allreduce"] = False
    if _cut(config) == 1:
        marks |= {"tensor_model_parallel": True, "sequence_parallel": False}
    return marks


def draw_experts(
    num_local_experts: int,
    config: TransformerConfig,
    pg: ProcessGroupCollection,
    draw: Callable[[], T],
) -> list[T]:
    """Return newly drawn weights of this rank's experts; those drawn on CPU are the same on every layout.

    With ``--use-cpu-initialization`` every rank draws all experts of the layer in their order and keeps its
    own, so that all ranks leave the generator alike. On a device it draws only its own, from the generator
    that megatron-core keeps for experts.

    Args:
        num_local_experts: experts of this rank.
        config: of the model; the caller asks ``config.perform_initialization`` whether to draw at all.
        pg: with the group ``ep``.
        draw: draws the weights of one expert; with ``--use-cpu-initialization`` whole ones, float32 on CPU,
            of which the caller keeps its part.
    """
    if not config.use_cpu_initialization:
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            return [draw() for _ in range(num_local_experts)]
    first = pg.ep.rank() * num_local_experts
    local_experts = range(first, first + num_local_experts)
    drawn = []
    for expert in range(pg.ep.size() * num_local_experts):
        weights = draw()
        if expert in local_experts:
            drawn.append(weights)
    return drawn


class PlainExperts(SequentialMLP):
    """megatron-core's sequential experts, the same model on every layout."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        **further: Any,
    ) -> None:
        """Build this rank's experts, with the groups ``tp``, ``ep``, ``expt_tp`` and ``expt_dp``.

        ``further`` is what newer versions of megatron-core hand to their class.
        """
        assert pg_collection is not None
        groups: Any = pg_collection
        rank, size = groups.ep.rank(), groups.ep.size()
        draw = size > 1 and config.use_cpu_initialization and config.perform_initialization
        if draw:
            _draw(rank * num_local_experts, config, submodules, groups)
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, **further)
        if draw:
            _draw((size - rank - 1) * num_local_experts, config, submodules, groups)
        mark_expert_parameters(self, config)


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


def _cut(config: TransformerConfig) -> int:
    """Return over how many ranks each expert is cut."""
    return config.expert_tensor_parallel_size or config.tensor_model_parallel_size
