"""Orthogonalization of matrices that tensor-parallel ranks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_optim.muon.matrices import Matrix
from mindspeed_optim.muon.newton_schulz import newton_schulz, scale_factor
from mindspeed_optim.muon.options import BLOCKWISE, DISTRIBUTED, MuonOptions


def orthogonalized(whole: torch.Tensor, matrix: Matrix, options: MuonOptions) -> torch.Tensor:
    """Orthogonalize and scale the matrices of a parameter. Collective over its tensor-parallel ranks.

    Args:
        whole: the parameter's momentum on this tensor-parallel rank, float32, in the parameter's shape.
        matrix: the parameter.
        options: of the rule.

    Returns:
        The update on this rank, before learning rate, in the same shape.
    """
    group = matrix.part.tensor_parallel_group
    shared = matrix.cut is not None and group is not None and group.size() > 1
    if not shared or options.tp_mode == BLOCKWISE:
        return matrix.join([_alone(piece, options) for piece in matrix.split(whole)])
    cut = matrix.cut
    assert cut is not None
    if matrix.gather_first:
        pieces = matrix.split(_gathered(whole, group, cut))
        return _own(matrix.join([_alone(piece, options) for piece in pieces]), group, cut)
    return matrix.join([_together(piece, group, cut, options) for piece in matrix.split(whole)])


def _alone(piece: torch.Tensor, options: MuonOptions) -> torch.Tensor:
    found = newton_schulz(piece, options.coefficients, precision=options.precision)
    return found * (scale_factor(piece.shape[0], piece.shape[1], options.scale_mode) * options.extra_scale)


def _together(piece: torch.Tensor, group: Any, cut: int, options: MuonOptions) -> torch.Tensor:
    size = group.size()
    if options.tp_mode != DISTRIBUTED or _cheaper_whole(piece.shape, cut, size):
        return _own(_alone(_gathered(piece, group, cut), options), group, cut)
    rows, columns = (length * (size if dim == cut else 1) for dim, length in enumerate(piece.shape))
    found = newton_schulz(piece, options.coefficients, precision=options.precision, group=group, cut=cut)
    return found * (scale_factor(rows, columns, options.scale_mode) * options.extra_scale)


def _cheaper_whole(shape: torch.Size, cut: int, ranks: int) -> bool:
    """Return whether every rank does less work on the whole matrix than on products over its part.

    Products over the part are of the other dimension squared, which may be the longer one.
    """
    own, other = shape[cut], shape[1 - cut]
    short, long = sorted((own * ranks, other))
    return short**2 * (2 * long + short) < other**2 * (2 * own + other)


def _gathered(piece: torch.Tensor, group: Any, cut: int) -> torch.Tensor:
    pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(pieces, piece.contiguous(), group=group)
    return torch.cat(pieces, dim=cut)


def _own(whole: torch.Tensor, group: Any, cut: int) -> torch.Tensor:
    return whole.chunk(group.size(), dim=cut)[group.rank()]
