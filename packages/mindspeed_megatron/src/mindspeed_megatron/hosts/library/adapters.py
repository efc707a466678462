"""Between the forms that loops on megatron-core use and the records that stages pass.

A batch is a dictionary there, a loss function returns a tuple, an update returns another; features see the
records of `mindspeed_core.run`. What comes back to the caller has the form it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from mindspeed_core.run import Batch, Loss, OptimizerStep, StepResult
from mindspeed_megatron.loss import is_mean, loss_of

_NOT_CALLED = object()
_FIELDS = tuple(entry.name for entry in fields(Batch) if entry.name != "extra")


def batch_of(given: Mapping[str, Any] | Batch | None) -> Batch:
    """Make a batch of a dictionary: names that `Batch` does not know go into ``extra``."""
    if isinstance(given, Batch):
        return given
    values = dict(given or {})
    known = {name: values.pop(name) for name in _FIELDS if name in values}
    return Batch(**known, extra=values)


def sizes_of(batch: Batch) -> tuple[int, int] | None:
    """Return samples and length of a micro-batch, None without tokens, labels, loss mask and positions."""
    parts = (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
    shapes = [part.shape for part in parts if part is not None and part.dim() == 2]
    return (shapes[0][0], shapes[0][1]) if shapes else None


def mapping_of(batch: Batch, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch as a dictionary: the names it came with, and what features added."""
    found = {name: getattr(batch, name) for name in _FIELDS}
    return {
        **{name: value for name, value in found.items() if name in names or value is not None},
        **batch.extra,
    }


@dataclass
class LossAdapter:
    """A loss function of the caller, which returns ``(loss, report)`` or ``(loss, num_tokens, report)``.

    Attributes:
        function: the caller's.
        given: what it returned last, if a feature did not take its place.
    """

    function: Callable[[torch.Tensor], tuple[Any, ...]]
    given: Loss | None = field(default=None, init=False)

    def record(self, output_tensor: torch.Tensor) -> Loss:
        """Call the function."""
        self.given = loss_of(self.function(output_tensor))
        return self.given

    def tuple_of(self, loss: Loss) -> tuple[Any, ...]:
        """Return what megatron-core's schedules take: two values for a mean, three for a sum."""
        if is_mean(loss, self.given):
            return loss.total, loss.report
        return loss.total, loss.num_tokens.to(torch.int), loss.report


@dataclass
class UpdateAdapter:
    """The caller's ``optimizer.step``, megatron-core's with three results or torch's with none.

    Attributes:
        step: the bound method, with its arguments.
        result: what it returned, if a feature did not take its place.
    """

    step: Callable[[], Any]
    result: Any = field(default=_NOT_CALLED, init=False)

    def record(self) -> OptimizerStep:
        """Update once."""
        self.result = self.step()
        if not self._from_megatron:
            return OptimizerStep(successful=True, grad_norm=None, num_zeros=None)
        successful, norm, zeros = self.result
        return OptimizerStep(
            bool(successful), None if norm is None else float(norm), None if zeros is None else int(zeros)
        )

    def returned(self, update: OptimizerStep) -> Any:
        """Return what the caller's loop expects of ``step``."""
        if self._from_megatron or self.result is _NOT_CALLED:
            return update.successful, update.grad_norm, update.num_zeros
        return self.result

    @property
    def _from_megatron(self) -> bool:
        return isinstance(self.result, tuple) and len(self.result) == 3


@dataclass
class StepAdapter:
    """The caller's function of one training step, with whatever it returns.

    Attributes:
        step: the function, with its arguments.
        result: what it returned, if a feature did not take its place.
    """

    step: Callable[[], Any]
    result: Any = field(default=_NOT_CALLED, init=False)

    def record(self) -> StepResult:
        """Do the step."""
        self.result = self.step()
        if isinstance(self.result, StepResult):
            return self.result
        return StepResult(losses={}, skipped=False, grad_norm=None, num_zeros=None)

    def returned(self, result: StepResult) -> Any:
        """Return the caller's own result, or the record where it returned one."""
        instead = self.result is _NOT_CALLED or isinstance(self.result, StepResult)
        return result if instead else self.result
