"""The map of one layer from the experts that the router chooses to the slots in which they are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_moe.expert_map.planning import Placement, contiguous_placement


class LayerMap:
    """Places of the experts of one layer; routers, their losses and checkpoints know nothing of it.

    Attributes:
        placement: the experts of each rank, by slot.
    """

    def __init__(self, experts: int, ranks: int) -> None:
        """Begin with megatron-core's placement.

        Args:
            experts: of the layer.
            ranks: that they are spread over.
        """
        self.home = contiguous_placement(experts, ranks)
        self.placement: Placement = self.home
        self._columns: Tensor | None = None
        self._counts: Tensor | None = None

    @property
    def is_home(self) -> bool:
        """Return whether every expert is where megatron-core puts it."""
        return self.placement == self.home

    def place(self, placement: Placement) -> None:
        """Take a placement over; the weights have been moved, or will be before they are used."""
        self.placement = [list(experts) for experts in placement]
        self._columns = None

    def columns_by_slot(self, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and map ``[tokens, experts]`` with a column for each slot."""
        if self.is_home:
            return probs, routing_map
        if self._columns is None:
            order = [expert for experts in self.placement for expert in experts]
            self._columns = routing_map.new_tensor(order, dtype=torch.int64)
        return probs.index_select(1, self._columns), routing_map.index_select(1, self._columns)

    def count(self, routing_map: Tensor) -> None:
        """Count the rows that this rank sends to each expert, of bool ``[tokens, experts]``."""
        rows = routing_map.detach().sum(0)
        self._counts = rows if self._counts is None else self._counts + rows

    def take_counts(self) -> Tensor | None:
        """Return int64 ``[experts]`` of the rows since the last call; None where the layer did not run."""
        counts, self._counts = self._counts, None
        return counts
