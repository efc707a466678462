"""Steps that would spoil the weights: a loss or gradient that is not finite, or a loss that spikes.

Such a step is found before the update, the ranks agree on it, and it either ends the run or is skipped. The
message names the first tensor that went bad: a weight, the output of a module, or a gradient.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.fully_sharded.torch_fsdp2 import local_part
from mindspeed_megatron.losses import LateCopy, copied_later
from mindspeed_train.fault_tolerance.origin_of_bad_numbers import (
    bad_gradient,
    fully_sharded,
    guard,
    origin_of_loss,
    parameters,
)

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import Batch, Run

logger = logging.getLogger("mindspeed_core")
T = TypeVar("T")

WINDOW = 100
"""Steps whose largest loss a spike is measured by; Megatron-LM compares with as many."""
FEWEST = 10
"""Steps before the first comparison: a run's first losses say nothing about what is usual."""
_GOOD = 2**31 - 1
"""Above the number of every micro-batch: the losses of a rank are finite."""
_FROM_BUCKETS = "in local grad norm for bucket"


class BadSteps:
    """The recent losses of a run and how many bad steps it skipped in a row."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.in_a_row = 0

    def spikes(self, loss: float, factor: float) -> bool:
        """Return whether a finite loss is ``factor`` times the largest of the last steps."""
        return len(self.recent) >= FEWEST and loss >= factor * max(self.recent)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run judges the next losses as this one would."""
        return {"recent": list(self.recent), "in_a_row": self.in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave."""
        self.recent = deque(state["recent"], maxlen=WINDOW)
        self.in_a_row = int(state["in_a_row"])


@dataclass(frozen=True)
class _Unseen:
    """A loss that is on its way to the host."""

    microbatch: int
    batch: Batch
    model_chunk: MegatronModule
    value: LateCopy

    def finite(self) -> bool:
        """Return whether it is a number to go on with; waits for it."""
        return math.isfinite(self.value())


class UnseenLosses:
    """Losses of this step's micro-batches whose values nobody has looked at yet.

    Attributes:
        found: of this rank.
        agreed: whether the ranks have looked at those of this step together.
    """

    def __init__(self) -> None:
        self.found: deque[_Unseen] = deque()
        self.agreed = False


def forget_losses(run: Run) -> None:
    """Begin a step: nobody has looked at its losses."""
    state = run.session.state(UnseenLosses)
    state.found.clear()
    state.agreed = False


def check_loss(run: Run, batch: Batch, total: torch.Tensor, model_chunk: MegatronModule) -> None:
    """Look at the loss of one micro-batch: before its backward pass where it is known, else with the step's.

    Waiting for a device here would let the host launch nothing meanwhile. There, losses that have arrived and
    are finite are forgotten with their batches, and `agree_on_losses` looks at the others.

    Raises:
        UserError: the loss is known and not finite, and such a step ends the run.
    """
    if not run.args.check_for_nan_in_loss_and_grad:
        return
    unseen = run.session.state(UnseenLosses).found
    value = copied_later(total, run.session.platform)
    unseen.append(_Unseen(run.context.microbatch, batch, model_chunk, value))
    if known_at_once(run):
        _look_here(run)
        return
    while unseen and unseen[0].value.arrived() and unseen[0].finite():
        unseen.popleft()


def known_at_once(run: Run) -> bool:
    """Return whether looking at a loss waits for nothing; the same on every rank."""
    return run.session.platform.dry_run or run.dist.device.type == "cpu"


def _look_here(run: Run) -> None:
    """Look at the losses of this rank without asking others.

    Raises:
        UserError: one is not finite, and such a step ends the run.
    """
    one = _first_bad(run)
    if one is not None:
        origin = guard(lambda: origin_of_loss(run, one.batch, one.model_chunk))
        _report_loss(run, _described(run, one, origin))


def _first_bad(run: Run) -> _Unseen | None:
    """Return the first loss of this rank that is not finite, and forget all."""
    unseen = run.session.state(UnseenLosses).found
    if unseen:
        # The last one comes last: the others need no wait after it.
        unseen[-1].value()
    bad = next((one for one in unseen if not one.finite()), None)
    unseen.clear()
    return bad


def agree_on_losses(run: Run) -> None:
    """Tell every rank the first loss of the step that is not finite, whosever it is. Collective, once a step.

    Called before gradients are reduced: there, a rank that stopped by itself would leave the others in a
    collective. Nothing happens where losses are known at once.

    Raises:
        UserError: a loss is not finite, and such a step ends the run; the same on every rank.
    """
    state = run.session.state(UnseenLosses)
    if state.agreed or not run.args.check_for_nan_in_loss_and_grad or known_at_once(run):
        return
    state.agreed = True
    own = _first_bad(run)
    numbers = _first_numbers(run, own)
    bad = {rank: number for rank, number in enumerate(numbers) if number != _GOOD}
    if not bad:
        return
    first = min(bad, key=lambda rank: (bad[rank], rank))
    parts = [0] if run.dist.world_size == 1 else dist.get_process_group_ranks(run.pg.tp)
    text = ""
    if first in parts:
        # Looking for the origin is collective over the ranks that compute one loss together.
        alike = all(bad.get(rank) == bad[first] for rank in parts)
        origin = "the other ranks of its tensor-parallel group see another loss"
        if own is not None and alike:
            origin = guard(lambda: origin_of_loss(run, own.batch, own.model_chunk))
        text = "" if own is None else _described(run, own, origin)
    texts = all_gather_values(text)
    if len(bad) > 1:
        others = len(bad) - 1
        texts[first] += f"; a loss of {others} other rank{'s' if others > 1 else ''} is not finite either"
    _report_loss(run, texts[first], logged=run.dist.rank == first)


def _first_numbers(run: Run, own: _Unseen | None) -> list[int]:
    """Return the number of every rank's first micro-batch whose loss is not finite, `_GOOD` where all are."""
    number = _GOOD if own is None else own.microbatch
    if run.dist.world_size == 1:
        return [number]
    numbers = torch.full((run.dist.world_size,), _GOOD, dtype=torch.int32, device=run.dist.device)
    numbers[run.dist.rank] = number
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
    found: list[int] = numbers.tolist()
    return found


def _described(run: Run, one: _Unseen, origin: str) -> str:
    where = f"micro-batch {one.microbatch} on rank {run.dist.rank}"
    return f"the loss of step {run.iteration + 1}, {where}, is {one.value()}; {origin}"


def _report_loss(run: Run, text: str, *, logged: bool = True) -> None:
    if run.args.bad_step_action == "stop":
        raise UserError(
            f"{text}. Lower --lr or check the data; --bad-step-action skip leaves such steps out, "
            "--no-check-for-nan-in-loss-and-grad does not look"
        )
    if logged:
        logger.warning("%s", text)


def let_gradients_wait(run: Run) -> None:
    """Let `verdict` look at gradients where a look at each bucket would hold up the backward pass.

    megatron-core looks at a bucket before it is reduced, which with ``--overlap-grad-reduce`` is within the
    backward pass: the host would wait for the device once for every bucket, and a rank that stopped there
    would leave the others in a collective.
    """
    if _gradients_look_later(run):
        for chunk in run.model:
            config = getattr(chunk, "ddp_config", None)
            if config is not None:
                config.check_for_nan_in_grad = False


def _gradients_look_later(run: Run) -> bool:
    return bool(run.args.overlap_grad_reduce) and not known_at_once(run)


def with_named_gradients(run: Run, schedule: Callable[[], T]) -> T:
    """Run the schedule; megatron-core's word that a bucket is not finite becomes the name of a parameter.

    Raises:
        UserError: a loss or a gradient of this rank is not finite.
    """
    try:
        return schedule()
    except RuntimeError as error:
        if _FROM_BUCKETS not in str(error):
            raise
        # The loss was there before its gradients.
        _look_here(run)
        raise UserError(
            f"step {run.iteration + 1}, rank {run.dist.rank}: {guard(lambda: bad_gradient(run))}. Lower "
            "--lr or check the data; --bad-step-action skip leaves such steps out"
        ) from error


def verdict(run: Run, losses: Mapping[str, float]) -> str:
    """Return why the update must not happen, or an empty string; the same on every rank. Collective.

    Without ``--bad-step-action skip`` and ``--check-for-spiky-loss`` little is looked at: mostly what is not
    finite has ended the run before.

    Args:
        run: the run, gradients reduced.
        losses: of the step, the same on every rank.

    Raises:
        UserError: the step is bad and ends the run, or too many were skipped in a row.
    """
    args, seen = run.args, run.session.state(BadSteps)
    skips = args.bad_step_action == "skip"
    # Buckets of gradients are checked by megatron-core when they are reduced; shards are not.
    looks = skips or (
        args.check_for_nan_in_loss_and_grad and (fully_sharded(run) or _gradients_look_later(run))
    )
    if not looks and not args.check_for_spiky_loss:
        return ""
    reason = ""
    loss = losses.get("lm loss")
    if loss is not None:
        number = torch.tensor(loss)
        if not bool(torch.isfinite(number)):
            reason = f"its loss is {loss}"
        elif args.check_for_spiky_loss and seen.spikes(loss, args.loss_spike_factor):
            reason = (
                f"its loss {loss:.6g} is more than {args.loss_spike_factor:g} times {max(seen.recent):.6g}, "
                f"the largest of the last {len(seen.recent)} steps"
            )
    if not reason and looks and args.check_for_nan_in_loss_and_grad:
        reason = _agreed_gradient(run)
    if not reason:
        seen.in_a_row = 0
        if loss is not None:
            seen.recent.append(loss)
        return ""
    if not skips:
        raise UserError(
            f"step {run.iteration + 1}: {reason}; lower --lr, check the data, raise --loss-spike-factor, or "
            "leave such steps out with --bad-step-action skip"
        )
    seen.in_a_row += 1
    if seen.in_a_row > args.bad_step_limit:
        raise UserError(
            f"step {run.iteration + 1}: {reason}; {args.bad_step_limit} steps before it were skipped too "
            "(--bad-step-limit)"
        )
    if run.dist.rank == 0:
        logger.warning("step %d is skipped: %s", run.iteration + 1, reason)
    return reason


def _agreed_gradient(run: Run) -> str:
    # One answer from the device in a good step: the first rank with a bad gradient.
    good = torch.full((), run.dist.world_size, device=run.dist.device)
    finite = _gradients_finite(run)
    first = torch.where(finite, good, run.dist.rank)
    if run.dist.world_size > 1:
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if run.session.platform.dry_run:
        return ""
    rank = int(first)
    if rank == run.dist.world_size:
        return ""
    # Any rank may be the first: all say what it found.
    found = all_gather_values("" if bool(finite) else bad_gradient(run))
    return found[rank] if len(found) == 1 else f"{found[rank]} on rank {rank}"


def _gradients_finite(run: Run) -> torch.Tensor:
    """Return whether all gradients of this rank are finite, a boolean scalar on the device."""
    if fully_sharded(run):
        shards = [local_part(p.grad) for _, p in parameters(run) if p.grad is not None]
        return _all_finite(run, shards)
    buffers = [
        buffer.grad_data
        for chunk in run.model
        for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ()))
        if hasattr(buffer, "grad_data")
    ]
    # A sum over everything is one pass without a mask in memory; one bad element makes it bad.
    return _all_finite(run, buffers)


def _all_finite(run: Run, tensors: list[torch.Tensor]) -> torch.Tensor:
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]
    sums.append(torch.zeros((), dtype=torch.float32, device=run.dist.device))
    return torch.isfinite(torch.stack(sums)).all()
