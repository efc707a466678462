"""One micro-batch on its way through a pipeline stage: its tensors, and the loss that comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """One micro-batch as a pipeline stage sees it.

    Attributes:
        tokens: ``[b, s]`` int64, or None on stages without embedding.
        labels: ``[b, s]`` int64, or None on stages without loss.
        loss_mask: ``[b, s]`` float32, or None on stages without loss.
        padding_mask: ``[b, s]`` bool, True where a position fills up and is no token; None where all are
            tokens. Routers, losses of experts and counts of tokens leave such positions out.
        attention_mask: ``[b or 1, 1, s, s]`` bool (True is masked), or None where attention makes its own.
        position_ids: ``[b, s]`` int64, or None on stages without embedding.
        packed_seq_params: megatron-core's description of packed documents, or None.
        extra: what features add for themselves, by name.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    packed_seq_params: Any = None
    padding_mask: torch.Tensor | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Batch:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch on this rank.

    A step trains the mean of ``total / num_tokens`` over micro-batches and data-parallel ranks, or, with
    ``--calculate-per-token-loss``, the sum of all ``total`` divided by the sum of all ``num_tokens``. Add to
    a loss with `plus`, which is right in every host.

    Attributes:
        total: scalar, the sum of the per-token losses that count; backward starts here. The mean over this
            rank's tokens in a script or loop whose loss function returns two values.
        num_tokens: scalar integer tensor, how many tokens count; 1 where ``total`` is a mean.
        report: what is logged, by name: ``[sum, count]`` (reduced as a mean) per entry.
    """

    total: torch.Tensor
    num_tokens: torch.Tensor
    report: Mapping[str, torch.Tensor]
    _averaged: bool = False
    _weight: torch.Tensor | float = field(default=1.0, repr=False)
    _own_tokens: torch.Tensor | None = field(default=None, repr=False)

    @property
    def averaged(self) -> bool:
        """Return True where ``total`` is a mean. Nothing needs to ask: `plus` and `scaled` know."""
        return self._averaged

    def plus(self, name: str, sum: torch.Tensor, tokens: torch.Tensor | int, *, weight: float = 1.0) -> Loss:
        """Return the loss with another one added, which is reported under a name of its own.

        The mean of the addition counts ``weight`` times beside the mean of the loss. Over this rank's part of
        the micro-batch::

            total / num_tokens  becomes  total / num_tokens + weight * sum / tokens
            report[name]        is       [sum, tokens]

        Over the same tokens that adds ``weight * sum`` to a sum, and ``weight * sum / tokens`` to a mean. The
        value is reported without the weight.

        Args:
            name: under which it is logged; nothing else may report under it.
            sum: scalar, with gradient: the sum over this rank's tokens of what is added.
            tokens: how many tokens ``sum`` runs over, usually ``batch.loss_mask.sum()``.
            weight: coefficient of the addition in what is trained.

        Raises:
            ValueError: the name is reported already, ``sum`` is no scalar, or ``tokens`` is the 1 of a mean.
        """
        if name in self.report:
            raise ValueError(f"the loss reports {name!r} already; add to it under another name")
        if sum.numel() != 1:
            raise ValueError(
                f"{name!r}: the sum over the tokens that count is a scalar, this has the shape "
                f"{tuple(sum.shape)}; multiply by batch.loss_mask and call .sum()"
            )
        if tokens is self.num_tokens and self._averaged:
            raise ValueError(
                f"{name!r}: this loss is a mean, its num_tokens is 1; give the number of tokens that the sum "
                "runs over, batch.loss_mask.sum()"
            )
        import torch

        same = tokens is self.num_tokens
        own = self.num_tokens if self._own_tokens is None else self._own_tokens
        count = own if same else torch.as_tensor(tokens, device=sum.device)
        # Exactly 1 for a sum over the same tokens; where nothing counts nothing is added.
        share = 1.0 if same else torch.where(count > 0, own / count, 0.0)
        added = (sum * (share * weight * self._weight)).reshape(self.total.shape)
        reported = torch.stack([sum.detach().float().reshape(()), count.detach().float().reshape(())])
        return replace(self, total=self.total + added, report={**self.report, name: reported})

    def scaled(self, factor: torch.Tensor | float, num_tokens: torch.Tensor | None = None) -> Loss:
        """Return the loss with every token counting ``factor`` times, also those that `plus` adds later.

        For features that split a sequence over ranks. The report stays: it is of this rank's part.

        Args:
            factor: of the total.
            num_tokens: what the total is divided by from now on; by default as before.
        """
        own = self.num_tokens if self._own_tokens is None else self._own_tokens
        return replace(
            self,
            total=self.total * factor,
            num_tokens=self.num_tokens if num_tokens is None else num_tokens,
            _weight=self._weight * factor,
            _own_tokens=own,
        )
