"""Micro-batches of a list: a data-parallel rank's samples of a step in parts of different size.

The host reads micro-batches of ``--micro-batch-size`` as ever, so the samples of a step, of each rank and of
a resumed run are the same with and without a list. Here they are put together and cut by the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from mindspeed_core.errors import DataError, UserError
from mindspeed_core.run import Batch
from mindspeed_pp.microbatch_list import check_sum, given_list


def regrouped(batches: Iterator[Any], sizes: Sequence[int], each: int) -> Iterator[Any]:
    """Yield the samples of a step in micro-batches of given sizes.

    Args:
        batches: micro-batches of ``each`` samples: dictionaries of tensors ``[b, ...]``, or `Batch`.
        sizes: samples of each micro-batch.
        each: samples of those that are read.

    Raises:
        DataError: a micro-batch is no dictionary of tensors with a dimension of samples.
    """
    rest: Mapping[str, Any] = {}
    left = 0
    make: Callable[..., Any] = dict
    for size in sizes:
        pieces, wanted = [], size
        while wanted:
            if not left:
                sample = next(batches, None)
                make = Batch if isinstance(sample, Batch) else dict
                rest, left = _checked(sample, each), each
            taken = min(wanted, left)
            pieces.append({name: _cut(value, each - left, taken) for name, value in rest.items()})
            left -= taken
            wanted -= taken
        yield make(**{name: _joined([piece[name] for piece in pieces]) for name in pieces[0]})


def _checked(sample: Any, each: int) -> Mapping[str, Any]:
    if isinstance(sample, Batch):
        sample = {name: value for name, value in vars(sample).items() if name != "extra" or value}
    if not isinstance(sample, Mapping):
        raise DataError(
            f"a list of micro-batches: a micro-batch is a {type(sample).__name__}, and only dictionaries of "
            "tensors can be cut into samples; let the data yield those, or drop the list"
        )
    for name, value in sample.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if value is not None and (not shape or shape[0] != each):
            found = f"of shape {list(shape)}" if shape is not None else f"a {type(value).__name__}"
            raise DataError(
                f"a list of micro-batches: {name} of a micro-batch is {found}, which cannot be cut into "
                f"{each} samples; use equal micro-batches"
            )
    return sample


def _cut(value: Any, begin: int, count: int) -> Any:
    return None if value is None else value[begin : begin + count]


def _joined(values: Sequence[Any]) -> Any:
    if len(values) == 1 or values[0] is None:
        return values[0]
    return torch.cat(list(values))


@dataclass(frozen=True)
class Weighing:
    """Weights of the micro-batches of a list.

    Attributes:
        sizes: samples of each micro-batch.
        weighs: means of micro-batches are weighted by their samples.
    """

    sizes: tuple[int, ...]
    weighs: bool = True

    def weight(self, microbatch: int) -> float:
        """Return by how much the mean of a micro-batch counts, against the mean of all."""
        return self.sizes[microbatch] * len(self.sizes) / sum(self.sizes)

    def around(self, function: Callable[..., Any], microbatch: int, config: Any) -> Callable[..., Any]:
        """Return a schedule's ``forward_step_func`` whose loss counts by the samples of the micro-batch.

        A sum over tokens that is divided by all tokens of the step (``--calculate-per-token-loss``) counts by
        its tokens already.

        Raises (when the loss is computed):
            UserError: sizes differ, the loss function returns a mean, and nothing is to weigh it.
        """
        weight = self.weight(microbatch)

        def forward(*args: Any, **named: Any) -> tuple[Any, Any]:
            output, loss_function = function(*args, **named)

            def loss(tensor: Tensor, **options: Any) -> Any:
                made = loss_function(tensor, **options)
                if options.get("non_loss_data") or (len(made) == 3 and config.calculate_per_token_loss):
                    return made
                if not self.weighs:
                    if len(set(self.sizes)) > 1:
                        raise UserError(
                            "--no-dpp-loss-weighting: the loss function returns a mean over each "
                            "micro-batch, and samples of small ones would count more; drop the flag"
                        )
                    return made
                if len(made) == 3:
                    return made[0] * weight, *made[1:]
                return made[0] * weight, {name: _weighted(value, weight) for name, value in made[1].items()}

            return output, loss

        return forward

    def scale_further_losses(self, microbatch: int, config: Any, cp: int, device: torch.device) -> None:
        """Let losses of experts and of further predictions count by the samples of the micro-batch.

        Before its backward pass: megatron-core keeps one scale for all micro-batches.

        Args:
            microbatch: whose backward pass comes next.
            config: megatron-core's configuration of the model.
            cp: ranks that share a sequence.
            device: of the model.
        """
        if config.calculate_per_token_loss or not self.weighs:
            return
        experts = getattr(config, "num_moe_experts", None) is not None
        predictions = getattr(config, "mtp_num_layers", None) is not None
        if not (experts or predictions):
            return
        one = torch.ones(1, device=device)
        scale = one if config.grad_scale_func is None else config.grad_scale_func(one)
        scale = scale * (self.weight(microbatch) / len(self.sizes))
        if experts:
            MoEAuxLossAutoScaler.set_loss_scale(scale * cp)
        if predictions:
            MTPLossAutoScaler.set_loss_scale(scale)


def _weighted(value: Any, weight: float) -> Any:
    """Return a reported mean with its weight; ``[sum, count]`` has one."""
    return value * weight if isinstance(value, Tensor) and value.numel() == 1 else value


def weighing_of_step(args: Any, sizes: tuple[int, ...], samples: int) -> Weighing:
    """Return how the micro-batches of a step count.

    Args:
        args: the arguments.
        sizes: samples of each micro-batch.
        samples: of this data-parallel rank in the step.

    Raises:
        ArgumentError: the list has another sum.
    """
    given = given_list(args)
    assert given is not None
    check_sum(given[0], sizes, samples)
    return Weighing(sizes, bool(getattr(args, "dpp_loss_weighting", True)))
