"""Two weights that hold all experts of a rank, and how a distributed checkpoint keeps them.

megatron-core has these as ``GroupedMLP`` up to 0.16; 0.17 dropped the class for those of TransformerEngine.
`StackedExperts` is that class where it exists, and `StackedWeights` elsewhere, with the same parameters,
initial values and keys in checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_gpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import experts
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

_SINGLE = "singleton_local_shards"
_EXTRA = "_extra_state"


class StackedWeights(MegatronModule):
    """Weights of a rank's experts beside one another; what computes with them is a subclass.

    Attributes:
        weight1: ``[h, E * n / etp]`` as ``E`` matrices ``[h, n / etp]``; ``n`` is twice the width where
            experts are gated.
        weight2: ``[E * f / etp, h]`` as ``E`` matrices ``[f / etp, h]``.
        activation_recompute: ``--recompute-modules moe_act``.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build the weights, with the groups ``ep``, ``expt_tp`` and ``expt_dp``.

        Raises:
            ValueError: experts are gated by something else than silu or gelu.
        """
        super().__init__(config=config)
        groups: Any = pg_collection
        self.config = config
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        self.activation_recompute = config.recompute_granularity == "selective" and "moe_act" in (
            config.recompute_modules or ()
        )
        functional = torch.nn.functional
        if config.gated_linear_unit and config.activation_func not in (functional.silu, functional.gelu):
            raise ValueError("experts in one grouped product are gated by silu or gelu")
        size = self.tp_group.size()
        width = config.moe_ffn_hidden_size * num_local_experts // size
        self.weight1 = self._weight(config.hidden_size, width * (2 if config.gated_linear_unit else 1))
        self.weight2 = self._weight(width, config.hidden_size)
        if config.perform_initialization:
            for weight, draw, cut in (
                (self.weight1, config.init_method, 1),
                (self.weight2, config.output_layer_init_method, 0),
            ):
                _initialize_affine_weight_gpu(weight, draw, partition_dim=cut, is_expert=True)
        for weight in (self.weight1, self.weight2):
            vars(weight)["allreduce"] = config.expert_model_parallel_size == 1
        self.register_load_state_dict_post_hook(_expect_no_extra_state)

    def _weight(self, *shape: int) -> torch.nn.Parameter:
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        return torch.nn.Parameter(torch.empty(*shape, device=device, dtype=self.config.params_dtype))

    def activation_func_with_probs(self, hidden: Tensor, probs: Tensor) -> Tensor:
        """Return the activation of ``[m, n / etp]``, gated where experts are, times ``[m, 1]``."""
        if self.config.gated_linear_unit:
            gate, values = hidden.chunk(2, dim=-1)
            active = self.config.activation_func(gate) * values
        else:
            active = self.config.activation_func(hidden)
        return (active * probs).to(hidden.dtype)

    def backward_dw(self) -> None:
        """Do nothing: gradients of weights are computed in backward."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the weights for a distributed checkpoint, under the keys of sequential experts."""
        single = bool((metadata or {}).get(_SINGLE, False))
        rows = self.dp_group.rank()
        state: dict[str, Any] = {}
        for name, linear, gated in (
            ("weight1", "linear_fc1", self.config.gated_linear_unit),
            ("weight2", "linear_fc2", False),
        ):
            parts = partial(
                self._parts, prefix=prefix, offsets=sharded_offsets, single=single, first=name == "weight1"
            )
            joined = partial(self._joined, gated=gated, first=name == "weight1")
            state[f"{prefix}{name}"] = ShardedTensorFactory(
                f"{prefix}experts.{linear}.weight", getattr(self, name), parts, joined, (0, 0, rows)
            )
        self._add_extra_state(state, prefix, sharded_offsets, single)
        return state

    def _add_extra_state(
        self, state: dict[str, Any], prefix: str, offsets: tuple[tuple[int, int, int], ...], single: bool
    ) -> None:
        """Add the empty states that sequential experts have."""
        count, replica = self.num_local_experts, (0, self.tp_group.rank(), self.dp_group.rank())
        for local in range(count):
            number = self.ep_group.rank() * count + local
            for linear in ("linear_fc1", "linear_fc2"):
                key = f"{prefix}experts.{f'{number}.' if single else ''}{linear}.{_EXTRA}"
                place = () if single else ((len(offsets), number, self.ep_group.size() * count),)
                state[f"{prefix}expert{number}.{linear}.{_EXTRA}"] = make_sharded_object_for_checkpoint(
                    None, key, (*offsets, *place), replica
                )

    @torch.no_grad()
    def _parts(
        self,
        key: str,
        weight: Tensor,
        replica_id: Any,
        flattened_range: slice | None = None,
        *,
        prefix: str,
        offsets: tuple[tuple[int, int, int], ...],
        single: bool,
        first: bool,
    ) -> Any:
        """Cut one of the weights, or state of its shape, into what sequential experts save."""
        if flattened_range is not None:
            raise ValueError(f"{key}: a flat part of grouped experts cannot be described")
        count, hidden = self.num_local_experts, self.config.hidden_size
        shape = (count, hidden, -1) if first else (count, -1, hidden)
        linear = weight.view(shape).transpose(-1, -2)
        axis, rank, size = (0 if first else 1), self.tp_group.rank(), self.tp_group.size()
        halves = linear.chunk(2, -2) if first and self.config.gated_linear_unit else None
        ahead = len(offsets)

        def shard(name: str, values: Tensor, *places: tuple[int, int, int]) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                name, values.contiguous(), *offsets, *places, replica_id=replica_id, prepend_axis_num=ahead
            )

        if not single:
            own = (ahead, self.ep_group.rank(), self.ep_group.size())
            if halves is None:
                return shard(key, linear, own, (ahead + 1 + axis, rank, size))
            return [
                shard(key, half, own, (ahead + 1, index * size + rank, 2 * size))
                for index, half in enumerate(halves)
            ]

        def each(name: str, values: Tensor) -> list[ShardedTensor]:
            start, within = self.ep_group.rank() * count, f"{prefix}experts."
            return [
                shard(name.replace(within, f"{within}{start + index}."), one, (ahead + axis, rank, size))
                for index, one in enumerate(values)
            ]

        found: Any = each(key, linear)
        if halves is not None:
            found = {suffix: each(f"{key}_{suffix}", half) for suffix, half in zip("wv", halves)}
        return {_SINGLE: LocalNonpersistentObject(True), "data": found}

    @torch.no_grad()
    def _joined(self, parts: Any, *, gated: bool, first: bool) -> Tensor:
        """Return a weight of its parts, the opposite of `_parts`."""
        if isinstance(parts, dict):
            data = parts["data"]
            halves = [torch.stack(data[suffix]) for suffix in "wv"] if gated else [torch.stack(data)]
        else:
            halves = parts if gated else [parts]
        shape = (self.config.hidden_size, -1) if first else (-1, self.config.hidden_size)
        return torch.cat(list(halves), -2).transpose(-1, -2).reshape(shape)


def _expect_no_extra_state(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Take keys of sequential experts' empty states as expected."""
    unexpected = incompatible_keys.unexpected_keys
    unexpected[:] = [key for key in unexpected if _EXTRA not in key]


StackedExperts: Any = getattr(experts, "GroupedMLP", StackedWeights)
"""megatron-core's class of such weights, or `StackedWeights` where it has none."""
