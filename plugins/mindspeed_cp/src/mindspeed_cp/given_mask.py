"""A mask that a script gives to all attention, as one tensor for the whole sequence.

Where mindspeed-kernels is installed its store is the one that is used, so that one call serves attention over
whole and over split sequences.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class _Store:
    given: Tensor | None = None


def _store() -> Any:
    if find_spec("mindspeed_kernels") is None:
        return _Store
    from mindspeed_kernels.attention.mask_store import STORE

    return STORE


def set_attention_mask(mask: Tensor | None) -> None:
    """Let the attention of all layers hide what ``mask`` hides; None takes it back.

    It needs ``--attention-mask-type general``. Every rank sets the same one.

    Args:
        mask: ``[s, s]`` bool over the whole sequence, True hides.

    Raises:
        UserError: it is no such tensor.
    """
    import torch

    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != mask.shape[1]):
        raise UserError(
            f"an attention mask is a square bool tensor [s, s], got {mask.dtype} {tuple(mask.shape)}"
        )
    _store().given = mask


def given_mask() -> Tensor | None:
    """Return the mask that was set, True hides; None without."""
    mask: Tensor | None = _store().given
    return mask
