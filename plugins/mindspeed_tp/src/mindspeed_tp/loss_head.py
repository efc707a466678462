"""The last part of a built model: the output layer hands its input to the loss, which makes logits."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mindspeed_core.errors import SessionError
from mindspeed_megatron.linear_layout import is_opaque
from mindspeed_megatron.unwrap import unwrap
from mindspeed_megatron.vocabulary import KEPT
from mindspeed_tp.chunked_loss import ChunkedLoss, LossPlan
from mindspeed_tp.partition import Partition
from mindspeed_tp.rows import Rows

if TYPE_CHECKING:
    import torch

    from mindspeed_core.session import Session

OWNER = "chunked-lm-loss"


class _Head:
    """The output layer of one model, and whether it is asked for logits or for a loss."""

    def __init__(self, model: Any, chunks: int, sequence: Partition | None) -> None:
        self.model, self.layer = model, model.output_layer
        self.chunks, self.sequence = chunks, sequence
        self.defers = False
        self.weight: Tensor | None = None
        self.plain_layer, self.plain_part = self.layer.forward, model._postprocess

    def last_part(self, _: Any, *args: Any, labels: Tensor | None = None, **named: Any) -> Any:
        """Stand in for ``_postprocess``: with labels nobody wants logits."""
        self.defers = labels is not None
        try:
            return self.plain_part(*args, labels=labels, **named)
        finally:
            self.defers, self.weight = False, None

    def output(
        self, _: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:
        """Stand in for the output layer's ``forward``."""
        if not self.defers:
            return self.plain_layer(input_, weight, runtime_gather_output)
        self.weight = self.layer.weight if weight is None else weight
        return input_, None

    def losses(self, _: Any, labels: Tensor, hidden: Tensor) -> Tensor:
        """Stand in for ``compute_language_model_loss``; return losses ``[b, s]``."""
        layer = self.layer
        rows = Rows(layer.tp_group, self.sequence) if layer.sequence_parallel else None
        plan = LossPlan(
            self.chunks, layer.tp_group, rows, layer.gradient_accumulation_fusion, getattr(layer, KEPT, None)
        )
        result: Tensor = ChunkedLoss.apply(hidden, self.weight, labels, plan)
        return result


def defer_logits(
    session: Session, model: Sequence[torch.nn.Module], chunks: int, sequence: Partition | None
) -> None:
    """Let the models of these chunks compute losses without the logits of a whole sequence.

    Args:
        session: records the changes.
        model: the chunks.
        chunks: parts of the sequence.
        sequence: parts in which ranks hold it, where they are not equal.

    Raises:
        SessionError: another feature needs the logits.
    """
    readers = session.implementations("compute_token_losses")[:-1]
    if readers:
        raise SessionError(
            f"--lm-loss-chunks {chunks} makes no logits for {', '.join(readers)} to read; drop one of the two"
        )
    for chunk in model:
        bare: Any = unwrap(chunk)
        if not (getattr(bare, "post_process", False) and hasattr(bare, "_postprocess")):
            continue
        if is_opaque(bare.output_layer):
            raise SessionError(
                f"--lm-loss-chunks {chunks}: the output layer is {type(bare.output_layer).__name__}, "
                "which computes more than the product with its weight; drop the flag"
            )
        if bare.output_layer.bias is not None:
            raise SessionError(f"--lm-loss-chunks {chunks}: the output layer has a bias; drop the flag")
        head = _Head(bare, chunks, sequence)
        session.instances.set(OWNER, bare, "_postprocess", MethodType(head.last_part, bare))
        session.instances.set(OWNER, bare, "compute_language_model_loss", MethodType(head.losses, bare))
        session.instances.set(OWNER, bare.output_layer, "forward", MethodType(head.output, bare.output_layer))
