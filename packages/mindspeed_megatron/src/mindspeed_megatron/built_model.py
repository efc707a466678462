"""Corrections that every host makes to the chunks of a model before they are wrapped for training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.drop_policy import settle_drop_policy
from mindspeed_megatron.expert_check import settle_experts
from mindspeed_megatron.expert_losses import weigh_expert_losses
from mindspeed_megatron.prediction_losses import weigh_predictions
from mindspeed_megatron.tensor_parallel_marks import settle_marks

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session


def settle_model(session: Session, model: Iterable[Any], config: TransformerConfig) -> None:
    """Correct the marks of parameters and the weight of losses that layers add, or refuse what cannot be.

    Call it once or several times for a chunk.

    Args:
        session: the open session.
        model: chunks of this rank, wrapped or not.
        config: of the model.

    Raises:
        SessionError: gradients of a parameter would be summed or counted wrongly; names it, its module and
            the feature that placed it.
    """
    chunks = list(model)
    change_functions(session, chunks, config)
    if session.mode == "inference":
        return
    settle_experts(session, chunks, config)
    settle_marks(session, chunks, config)
    if getattr(config, "num_moe_experts", None) is not None:
        weigh_expert_losses(session, chunks)


def change_functions(session: Session, model: Iterable[Any], config: TransformerConfig) -> None:
    """Change the functions of megatron-core that built chunks call; again where a session is opened anew."""
    settle_drop_policy(session, config)
    if getattr(config, "mtp_num_layers", None) and session.mode != "inference":
        weigh_predictions(session, model)
