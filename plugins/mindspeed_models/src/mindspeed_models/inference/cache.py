"""The cache of keys and values of one batch: its size by formula, its mask, and the rows that stay in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values

if TYPE_CHECKING:
    from mindspeed_models.inference.passes import Passes

_GIB = 1 << 30


class Cache:
    """The cached keys and values of a batch whose rows end together, in megatron-core's own context.

    Shorter prompts begin with padding, which a mask hides.

    Attributes:
        context: megatron-core's ``StaticInferenceContext``.
        padding: tokens of padding that each row begins with.
        length: tokens that are cached so far.
    """

    def __init__(
        self, padding: Sequence[int], capacity: int, device: torch.device, *, masks: bool = True
    ) -> None:
        """Make room for rows of ``capacity`` tokens; memory is taken by the first pass.

        Args:
            padding: tokens of padding of each row.
            capacity: tokens of a row at most.
            device: of the model.
            masks: attention takes masks; without, it has a window of its own and no row has padding.
        """
        from megatron.core.inference.contexts import StaticInferenceContext

        self.context: Any = StaticInferenceContext(len(padding), capacity)
        self.padding = torch.tensor(padding, device=device)
        self._padded = any(padding)
        self._masks = masks
        self.length = 0

    def positions(self, count: int) -> Tensor:
        """Return the positions ``[b, count]`` of the next tokens, each in its own row's text."""
        ahead = torch.arange(self.length, self.length + count, device=self.padding.device)
        return (ahead[None] - self.padding[:, None]).clamp_min(0)

    def mask(self, count: int) -> Tensor | None:
        """Return what the next tokens do not see ``[b | 1, 1, count, keys]``; None where megatron-core knows.

        A token of padding sees itself, so that no row of scores is empty.
        """
        if not self._masks or (not self._padded and (self.length == 0 or count == 1)):
            return None
        keys = torch.arange(self.length + count, device=self.padding.device)
        queries = keys[self.length :]
        later = keys[None, None] > queries[None, :, None]
        if self._padded:
            itself = keys[None, None] == queries[None, :, None]
            later = later | ((keys[None] < self.padding[:, None])[:, None] & ~itself)
        return later[:, None]

    def advance(self, count: int) -> None:
        """Count tokens that a pass has put into the cache."""
        self.context.increment_sequence_len_offset(count)
        self.length += count

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be kept several times."""
        if list(rows) == list(range(len(self.padding))):
            return
        index = torch.tensor(list(rows), device=self.padding.device)
        self.padding = self.padding.index_select(0, index)
        self._padded = bool(self.padding.any())
        kept = self.context.key_value_memory_dict
        for layer, (keys, values) in kept.items():
            kept[layer] = (keys.index_select(1, index), values.index_select(1, index))
        self.context.max_batch_size = len(rows)


def cache_bytes(chunk: torch.nn.Module, rows: int, length: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of ``rows`` texts of ``length`` tokens in a chunk.

    Each attention layer holds ``rows · length · groups / tp · (d_k + d_v)`` elements; multi-latent attention
    caches its decompressed heads.
    """
    elements = sum(groups * (keys + values) for groups, keys, values in _heads(chunk))
    return rows * length * elements * itemsize


def check_memory(passes: Passes, rows: int, length: int) -> None:
    """Refuse a batch whose cache does not fit, on all ranks of the model alike. Collective.

    Raises:
        UserError: names what it needs and what is free.
    """
    platform = passes.run.session.platform
    need = cache_bytes(passes.bare, rows, length, passes.config.params_dtype.itemsize)
    free = platform.total_memory() - platform.memory_used().bytes
    worst = (need - free, need, free)
    for group in (passes.tp, passes.pp):
        if group.size() > 1:
            worst = max(all_gather_values(worst, group))
    lacking, need, free = worst
    if lacking > 0:
        raise UserError(
            f"--max-new-tokens: the keys and values of {rows} texts of {length} tokens take "
            f"{need / _GIB:.2f} GiB, and {max(free, 0) / _GIB:.2f} GiB are free; ask for fewer tokens, lower "
            "--batch-size or --num-beams, or use more tensor-parallel ranks"
        )


def _heads(chunk: torch.nn.Module) -> Iterator[tuple[int, int, int]]:
    """Yield groups of a rank, and the widths of their keys and values, of each attention layer."""
    for module in chunk.modules():
        found: Any = module
        if hasattr(found, "key_hidden_size") and hasattr(found, "num_query_groups_per_partition"):
            yield (
                int(found.num_query_groups_per_partition),
                int(found.key_hidden_size),
                int(found.val_hidden_size),
            )
