"""Attention by matrix products: the reference of other kernels, and the fallback where none of them serves.

It computes in float32 at least, knows every mask, bias and dropout, and never holds more than a bounded
number of scores at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_cp.engine.kernels.contract import BackwardBlock, BlockKernel
from mindspeed_cp.engine.kernels.rows import added, in_rows, kept, without_empty
from mindspeed_cp.engine.masks import CAUSAL
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task

MOST_SCORES = 1 << 26
"""Scores, of all samples and heads, that are held at once: 256 MiB in float32."""
_ROWS = (16, 512)


class ProductsKernel(BlockKernel):
    """Scores, weights and outputs as products of whole matrices."""

    name = "products"
    priority = -100

    def parts(self, task: Task, scores: Scores, heads: int) -> Sequence[Task]:
        """Return blocks of rows with a bounded number of scores."""
        columns = max(1, task.columns[1] - task.columns[0])
        most = min(max(MOST_SCORES // (heads * columns), _ROWS[0]), _ROWS[1])
        return in_rows(task, most)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task, scores: Scores) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        mask, empty = added(task, scores, q)
        products = _products(q, k, mask, task.kind == CAUSAL and mask is None, scores)
        logsum = torch.logsumexp(products, -1)
        weights = torch.exp(products - logsum.unsqueeze(-1)).nan_to_num_(0.0)
        stays = kept(task, scores, q.shape[0], q.device)
        if stays is not None and scores.dropout is not None:
            weights = weights * stays / (1.0 - scores.dropout.probability)
        return without_empty(weights @ repeated(v, q).to(weights.dtype), logsum, empty)

    def backward(self, block: BackwardBlock) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        outer, q, k, v, output, logsum, task, scores = block
        mask, _ = added(task, scores, q)
        products = _products(q, k, mask, task.kind == CAUSAL and mask is None, scores)
        weights = torch.exp(products - logsum.unsqueeze(-1).to(products.dtype))
        wide, outer_wide = weights.dtype, outer.to(weights.dtype)
        dweights = outer_wide @ repeated(v, q).to(wide).transpose(-1, -2)
        used = weights
        stays = kept(task, scores, q.shape[0], q.device)
        if stays is not None and scores.dropout is not None:
            factor = stays.to(wide) / (1.0 - scores.dropout.probability)
            used, dweights = weights * factor, dweights * factor
        delta = (outer_wide * output.to(wide)).sum(-1, keepdim=True)
        dproducts = weights * (dweights - delta) * scores.scale
        dq = dproducts @ repeated(k, q).to(wide)
        dk = summed(dproducts.transpose(-1, -2) @ q.to(wide), k)
        dv = summed(used.transpose(-1, -2) @ outer_wide, v)
        return dq, dk, dv


def _products(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scores: Scores) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    products = (q.to(wide) @ repeated(k, q).to(wide).transpose(-1, -2)) * scores.scale
    if mask is not None:
        return products + mask
    if causal:
        later = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        return products.masked_fill(later, float("-inf"))
    return products


def repeated(tensor: Tensor, like: Tensor) -> Tensor:
    """Repeat key heads, each as often as query heads share it."""
    times = like.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def summed(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of repeated heads."""
    if gradient.shape[1] == like.shape[1]:
        return gradient
    return gradient.view(like.shape[0], like.shape[1], -1, *gradient.shape[2:]).sum(2)


def padded(tensor: Tensor, width: int) -> Tensor:
    """Pad the last dimension with zeros up to a width, which flash kernels want everywhere alike."""
    missing = width - tensor.shape[-1]
    return tensor if missing <= 0 else torch.nn.functional.pad(tensor, (0, missing))
