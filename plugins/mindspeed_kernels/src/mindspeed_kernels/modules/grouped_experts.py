"""The experts of a layer in one grouped product, as a megatron-core module, and its placement.

The module has the weights of megatron-core's ``GroupedMLP`` with another forward: every dtype, our grouped
product, and, where it was asked for, weight gradients that are added to the main gradients in place. Its
weights begin as those of sequential experts, on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput, set_tensor_model_parallel_attributes
from torch import Tensor

from mindspeed_core.errors import SessionError
from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_kernels.ops.gmm_put_off import Leave, PutOffProduct
from mindspeed_kernels.ops.row_groups import ends_of_groups
from mindspeed_megatron.expert_weights import StackedExperts
from mindspeed_megatron.experts import draw_experts, mark_expert_parameters
from mindspeed_megatron.layer_spec import SpecEditor

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session


class GroupedExperts(StackedExperts):
    """Rows sorted by expert, times the weights of all local experts at once.

    Attributes:
        accumulates: backward adds weight gradients to the parameters' main gradients in place.
    """

    accumulates = False
    _leave: Leave | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        """Offer weight gradients that come later only where they are computed as here."""
        super().__init_subclass__(**named)
        if {"forward", "_product"} & vars(cls).keys() and "put_off_weight_gradients" not in vars(cls):
            cls.put_off_weight_gradients = None  # type: ignore[method-assign,assignment]

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        """Build this rank's experts, with the groups ``ep``, ``expt_tp`` and ``expt_dp``.

        ``name``, that of the module in the model, is given by newer versions of megatron-core, and not used.
        """
        assert pg_collection is not None
        drawn_on_cpu = config.use_cpu_initialization and config.perform_initialization
        blank = copy(config)
        blank.perform_initialization = config.perform_initialization and not drawn_on_cpu
        super().__init__(num_local_experts, blank, pg_collection=pg_collection)
        self.config = config
        if drawn_on_cpu:
            self._draw(config, pg_collection)
        for parameter, cut in ((self.weight1, 1), (self.weight2, 0)):
            if not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, cut, 1)
        mark_expert_parameters(self, config)
        self._hooks: list[Callable[[], None]] = []
        self._computed = 0

    def put_off_weight_gradients(self, leave: Leave) -> None:
        """Hand computations of weight gradients to somebody, instead of doing them in backward.

        Call it before data parallelism wraps the module.

        Args:
            leave: takes each computation with its operands, and calls it later or at once; those of one call
                of the module before those of another one.
        """
        self._leave = leave
        for parameter in self.parameters():
            parameter.skip_backward_post_hook = True

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call a hook of data parallelism, one for each parameter, whenever both gradients exist."""
        self._hooks.append(hook)

    def _put_off(self, compute: Callable[..., None], *operands: Tensor) -> None:
        def whole(*operands: Tensor) -> None:
            learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
            if not self._hooks and hasattr(learning[0], "main_grad"):
                raise SessionError(
                    "gradients of weights come later than in backward, and data parallelism does not wait "
                    "for them; wrap the model with DistributedDataParallelConfig(delay_wgrad_compute=True)"
                )
            compute(*operands)
            self._computed += 1
            if self._computed == len(learning):
                self._computed = 0
                for hook in self._hooks:
                    hook()

        assert self._leave is not None
        self._leave(whole, *operands)

    @torch.no_grad()
    def _draw(self, config: TransformerConfig, pg: ProcessGroupCollection) -> None:
        """Draw each expert as megatron-core draws its two linear layers, and keep this rank's part."""
        width, halves = config.moe_ffn_hidden_size, 2 if config.gated_linear_unit else 1

        def draw() -> tuple[Tensor, Tensor]:
            first = torch.empty(halves * width, config.hidden_size)
            config.init_method(first)
            second = torch.empty(config.hidden_size, width)
            config.output_layer_init_method(second)
            return first, second

        rank, size = pg.expt_tp.rank(), pg.expt_tp.size()
        firsts = self.weight1.view(self.num_local_experts, config.hidden_size, -1)
        seconds = self.weight2.view(self.num_local_experts, -1, config.hidden_size)
        for index, (first, second) in enumerate(draw_experts(self.num_local_experts, config, pg, draw)):
            parts = [half.chunk(size)[rank] for half in first.chunk(halves)]
            firsts[index].copy_(torch.cat(parts).t())
            seconds[index].copy_(second.chunk(size, dim=1)[rank].t())

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Compute the experts.

        Args:
            permuted_local_hidden_states: ``[m, h]``, rows sorted by local expert.
            tokens_per_expert: ``[E]``, number of rows of each; experts may have none.
            permuted_probs: ``[m]``, the router's probability of each row.

        Returns:
            ``[m, h]``, and no bias.
        """
        rows, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            rows = (probs * rows).to(rows.dtype)
            probs = torch.ones_like(probs)
        hidden = self.config.hidden_size
        ends = ends_of_groups(
            "--moe-grouped-gemm", tokens_per_expert, rows.shape[0], self.num_local_experts, counts=True
        )
        first = self._product(rows, self.weight1, (self.num_local_experts, hidden, -1), ends)
        shape = (self.num_local_experts, -1, hidden)
        if not self.activation_recompute:
            inner = self.activation_func_with_probs(first, probs)
            return self._product(inner, self.weight2, shape, ends), None
        checkpoint = CheckpointWithoutOutput()
        inner = checkpoint.checkpoint(self.activation_func_with_probs, first, probs)
        result = self._product(inner, self.weight2, shape, ends)
        checkpoint.discard_output_and_register_recompute(result)
        return result, None

    def _product(self, rows: Tensor, parameter: Tensor, shape: tuple[int, ...], ends: Tensor) -> Tensor:
        # Evaluation runs without main gradients, and so does a model that nothing wrapped for training.
        adds = self.accumulates and torch.is_grad_enabled() and hasattr(parameter, "main_grad")
        if self._leave is not None and torch.is_grad_enabled() and parameter.requires_grad:
            put_off: Tensor = PutOffProduct.apply(rows, parameter, shape, ends, self._put_off, adds)
            return put_off
        return grouped_matmul(rows, parameter.view(shape), ends, parameter if adds else None)


def place_grouped_experts(session: Session, spec: Any) -> Any:
    """Return the tree with `GroupedExperts` in every layer that has experts."""
    editor = SpecEditor(spec, owner="grouped-experts", session=session)
    editor.replace("experts", GroupedExperts)
    return editor.spec


def accumulate_in_place(session: Session, model: list[Any]) -> None:
    """Let backward of every `GroupedExperts` add to the main gradients that data parallelism brings."""
    found = 0
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, GroupedExperts):
                found += 1
                module.accumulates = True
    session.place("gmm-add", found)
