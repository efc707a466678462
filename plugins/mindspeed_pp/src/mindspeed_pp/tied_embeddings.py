"""One word embedding for input and output where both are on one rank, in two chunks.

megatron-core gives the last stage a copy of the embedding and sums the gradients of both copies. Where the
first and the last stage share a rank, the last one uses the parameter of the first instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError
from mindspeed_core.megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def first_rank(ranks: Sequence[int], *_: Any) -> list[int]:
    """Return the only pipeline rank that holds word embeddings."""
    return [ranks[0]]


def share_embedding(session: Session, chunks: Sequence[Any], pg: Any, owner: str) -> None:
    """Let the chunk with the output layer use the embedding of another chunk of this rank.

    Args:
        session: takes the change back when it closes.
        chunks: of this rank.
        pg: the process groups.
        owner: the feature.

    Raises:
        SessionError: the group of embeddings holds other ranks, which would wait for this one.
    """
    plain = [unwrap(chunk) for chunk in chunks]
    first = next((chunk for chunk in plain if getattr(chunk, "pre_process", False)), None)
    last = next((chunk for chunk in plain if getattr(chunk, "post_process", False)), None)
    if first is None or last is None or first is last or not last.share_embeddings_and_output_weights:
        return
    group = getattr(pg, "embd", None)
    if group is not None and group.size() > 1:
        raise SessionError(
            "embedding and output layer are on one pipeline rank, and the group of embeddings has "
            f"{group.size()}; call initialize_model_parallel(get_embedding_ranks="
            "mindspeed_pp.tied_embeddings.first_rank), or untie them"
        )
    last.output_layer.weight = None
    session.instances.set(
        owner, last, "shared_embedding_or_output_weight", first.shared_embedding_or_output_weight
    )
    # The checkpoint has the embedding of the first stage, for both.
    session.instances.set(owner, last, "tie_embeddings_and_output_weights_state_dict", lambda *_, **__: None)
