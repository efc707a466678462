"""Weight of the losses that routers add to the gradient, where a sequence is split over ranks.

With ``--calculate-per-token-loss`` gradients are summed over ranks and divided by the tokens of the step, so
megatron-core multiplies a router's losses by a number of tokens: those of the rank. The rank's loss is its
share of the sequence's too, so that each loss counts less by the number of ranks that share the sequence. A
coefficient multiplied by that number gives the gradient of one process, where the ranks have equally many
tokens that count; what is reported is divided by the coefficient and stays as it is. A router of your own
multiplies its losses by the tokens of its rank too.
"""

from __future__ import annotations

from typing import TypeVar

from megatron.core.transformer import TransformerConfig

C = TypeVar("C", bound=TransformerConfig)


def weigh_expert_losses(config: C) -> C:
    """Multiply the coefficients of balance and z losses by the ranks that share a sequence, in place.

    Call it once for a configuration, where it is made.

    Args:
        config: with megatron-core's own meaning of the coefficients.
    """
    size = ranks_sharing_expert_losses(config)
    if size > 1:
        balance = config.moe_aux_loss_coeff
        config.moe_aux_loss_coeff = (
            [size * coefficient for coefficient in balance]
            if isinstance(balance, (list, tuple))
            else size * balance
        )
        if config.moe_z_loss_coeff is not None:
            config.moe_z_loss_coeff = size * config.moe_z_loss_coeff
    return config


def ranks_sharing_expert_losses(config: TransformerConfig) -> int:
    """Return over how many ranks megatron-core loses weight of a router's losses; 1 where it loses none."""
    if config.num_moe_experts is None or not config.calculate_per_token_loss:
        return 1
    # Without sequence parallelism megatron-core trains no experts on several tensor-parallel ranks.
    tensor = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return int(tensor * config.context_parallel_size)
