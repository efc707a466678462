"""Choice of the layers that recompute: by position within the chunk, or over all chunks of a pipeline rank.

Layers are numbered within their model chunk, also where stages hold different numbers of them. Those computed
again as a whole come first; parts (activation function, norms) are computed again in the following ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """Order of the layers of a pipeline rank.

    Attributes:
        whole: how many are computed again as a whole (``--recompute-num-layers`` with ``block``).
        chunks: model chunks of the rank.
        per_rank: numbers are of the rank, and its chunks take turns; otherwise they are of each chunk.
    """

    whole: int = 0
    chunks: int = 1
    per_rank: bool = False

    def place(self, index: int, chunk: int) -> int:
        """Return the place of a layer in the order of those that recompute.

        Args:
            index: of the layer within its chunk.
            chunk: number of the chunk.
        """
        return index * self.chunks + chunk if self.per_rank else index

    def is_whole(self, index: int, chunk: int) -> bool:
        """Return whether a layer is computed again as a whole."""
        return self.place(index, chunk) < self.whole

    def is_partial(self, index: int, chunk: int, count: int | None) -> bool:
        """Return whether a part of a layer is computed again.

        Args:
            index: of the layer within its chunk.
            chunk: number of the chunk.
            count: how many layers do so, behind those of `whole`; None for all of them.
        """
        place = self.place(index, chunk)
        return self.whole <= place and (count is None or place < self.whole + count)

    def whole_layers(self, chunk: int, layers: int) -> int:
        """Return how many layers of a chunk are computed again as a whole.

        Args:
            chunk: its number.
            layers: how many it has.
        """
        return sum(self.is_whole(index, chunk) for index in range(layers))
