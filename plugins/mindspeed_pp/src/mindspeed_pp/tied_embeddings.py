"""One word embedding for the first and the last stage where both are on one rank, in two chunks.

megatron-core gives the last stage a copy of the embedding, for tied output layers and for predictions of
further tokens, and sums the gradients of both copies. Where the first and the last stage share a rank, the
last one uses the parameter of the first instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def first_rank(ranks: Sequence[int], *_: Any) -> list[int]:
    """Return the only pipeline rank that holds word embeddings."""
    return [ranks[0]]


def _without_copy(last: Any, *given: Any, **named: Any) -> Any:
    """Describe the last chunk; the checkpoint has the embedding of the first one."""
    last.mtp_process = False
    try:
        return type(last).sharded_state_dict(last, *given, **named)
    finally:
        last.mtp_process = True


def share_embedding(session: Session, chunks: Sequence[Any], pg: Any, owner: str) -> None:
    """Let the last chunk of the model use the embedding of the first one, where both are on this rank.

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
    if first is None or last is None or first is last:
        return
    tied, predicts = last.share_embeddings_and_output_weights, getattr(last, "mtp_process", False)
    if not tied and not predicts:
        return
    group = getattr(pg, "embd", None)
    if group is not None and group.size() > 1:
        raise SessionError(
            "first and last stage are on one pipeline rank and share the embedding, and its group has "
            f"{group.size()}; call initialize_model_parallel(get_embedding_ranks="
            "mindspeed_pp.tied_embeddings.first_rank), or use a schedule that is not V-shaped"
        )
    if predicts:
        # Not as a module of its own: data parallelism finds the parameters in the first chunk.
        del last._modules["embedding"]
        vars(last)["embedding"] = first.embedding
        session.instances.set(owner, last, "sharded_state_dict", partial(_without_copy, last))
    if not tied:
        return
    last.output_layer.weight = None
    # Where the output layer adds to the main gradient itself, the embedding's gradient counts all the same.
    first.shared_embedding_or_output_weight().zero_out_wgrad = True
    session.instances.set(
        owner, last, "shared_embedding_or_output_weight", first.shared_embedding_or_output_weight
    )
    # The checkpoint has the embedding of the first stage, for both.
    session.instances.set(owner, last, "tie_embeddings_and_output_weights_state_dict", lambda *_, **__: None)
