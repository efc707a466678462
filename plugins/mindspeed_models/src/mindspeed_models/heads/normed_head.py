"""NormHead: an output layer whose rows have length one, ``logits = x · (w / ‖w‖)ᵀ`` (Baichuan 2).

Rows are what tensor parallelism cuts, so each rank normalizes its own. The parameter stays what it is, in
checkpoints and exports too: only the product takes the normalized rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from mindspeed_core.errors import UserError
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.session import Session

FLAG = "--lm-norm-weight"


class _NormedRows:
    """The part of a column-parallel linear that normalizes the rows of its weight."""

    opaque = True
    """See `mindspeed_megatron.linear_layout`: the product is not that of the weight itself."""

    def forward(
        self: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply ``[s, b, h]``, or this rank's rows of it; return logits ``[s, b, v / t]``."""
        rows = normalized(self.weight if weight is None else weight)
        result: tuple[Tensor, Tensor | None] = super().forward(input_, rows, runtime_gather_output)  # type: ignore[misc]
        return result


def normalized(weight: Tensor) -> Tensor:
    """Return rows ``[v, h]`` of length one, in the weight's dtype; lengths are taken in float32.

    Rows of zeros, which pad a vocabulary, stay zeros.
    """
    return F.normalize(weight.float(), dim=-1).to(weight.dtype)


def normalize_heads(session: Session, chunks: Sequence[Any], owner: str) -> None:
    """Let the output layers of built chunks normalize their rows.

    Args:
        session: counts what is changed.
        chunks: of this rank, not wrapped for data parallelism yet.
        owner: the feature.

    Raises:
        UserError: another feature computes the logits, or the gradient of the weight, itself.
    """
    found = 0
    for chunk in chunks:
        layer: Any = getattr(unwrap(chunk), "output_layer", None)
        if layer is None:
            continue
        if "forward" in vars(layer) or "_forward_impl" in vars(layer):
            raise UserError(
                f"{FLAG}: another feature computes the logits or their gradient itself (--lm-loss-chunks, "
                "--pipeline-w-output-layer); drop one of the two"
            )
        # Kernels that add a gradient in place look for a parameter's buffer, and normalized rows have none.
        layer.gradient_accumulation_fusion = False
        kind: Any = type(layer)
        layer.__class__ = _normed(kind)
        found += 1
    session.place(owner, found)


@cache
def _normed(base: Any) -> Any:
    return type(f"Normed{base.__name__}", (_NormedRows, base), {})
