"""Layouts of queries, keys and values, as views ``[b, n, s, d]`` of them and back.

``SBND`` is that of megatron-core's attention modules; the others are those of the fused attention kernels for
Ascend devices. Packed sequences (``TND``) appear as one sample ``[1, n, t, d]``.
"""

from __future__ import annotations

from torch import Tensor

LAYOUTS = ("SBH", "BSH", "BNSD", "BSND", "TND", "SBND")
RANKS = {"SBH": 3, "BSH": 3, "TND": 3, "BNSD": 4, "BSND": 4, "SBND": 4}
_TO_BNSD = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "SBND": (1, 2, 0, 3)}


def to_bnsd(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """Return a view ``[b, n, s, d]``.

    Args:
        tensor: in ``layout``.
        layout: one of `LAYOUTS`, in capitals.
        heads: number of heads of this tensor, where the layout does not say it.
    """
    if layout == "TND":
        return tensor.transpose(0, 1).unsqueeze(0)
    if layout in ("SBH", "BSH"):
        tensor = tensor.unflatten(-1, (heads, -1))
        layout = layout[:2] + "ND"
    return tensor.permute(_TO_BNSD[layout])


def from_bnsd(tensor: Tensor, layout: str) -> Tensor:
    """Return ``[b, n, s, d]`` in a layout; merging heads and their width, where the layout does, copies."""
    if layout == "TND":
        return tensor.squeeze(0).transpose(0, 1)
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2)
    if layout == "BSH":
        return tensor.permute(0, 2, 1, 3).flatten(2)
    order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "SBND": (2, 0, 1, 3)}[layout]
    return tensor.permute(order)


def heads_of(tensor: Tensor, layout: str, width: int) -> int:
    """Return the number of heads of keys or values; ``width`` is used where the layout merges them."""
    if layout in ("SBH", "BSH"):
        return tensor.shape[2] // width
    return tensor.shape[{"BNSD": 1, "BSND": 2, "TND": 1, "SBND": 2}[layout]]
