"""A gather of tensors of different lengths for backends that know only equal ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def gather_along_first_dim(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``_gather_along_first_dim``: pad different lengths to the longest and cut them again."""

    @functools.wraps(original)
    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1 or len(set(output_split_sizes)) == 1:
            return original(input_, group, output_split_sizes, *rest, **options)
        longest = max(output_split_sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:length] for part, length in zip(parts, output_split_sizes)])

    return gather
