"""Steps that would spoil the weights: a loss or gradient that is not finite, or a loss that spikes.

Such a step is found before the update, the ranks agree on it, and it either ends the run or is skipped. The
message names the first tensor that went bad: a weight, the output of a module, or a gradient.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.fully_sharded.torch_fsdp2 import local_part
from mindspeed_megatron.losses import copied_later
from mindspeed_megatron.padding import padding_options
from mindspeed_megatron.unwrap import unwrap
from mindspeed_train.checkpoint import rng_state

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import Batch, Run

logger = logging.getLogger("mindspeed_core")
T = TypeVar("T")

WINDOW = 100
"""Steps whose largest loss a spike is measured by; Megatron-LM compares with as many."""
FEWEST = 10
"""Steps before the first comparison: a run's first losses say nothing about what is usual."""
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
    read: Callable[[], float]


class UnseenLosses:
    """Losses of micro-batches whose values nobody has waited for yet."""

    def __init__(self) -> None:
        self.found: deque[_Unseen] = deque()


def check_loss(run: Run, batch: Batch, total: torch.Tensor, model_chunk: MegatronModule) -> None:
    """Look at the loss of one micro-batch: before backward where it is known, else at the next one's.

    Waiting for a device here would leave it without work in every micro-batch. The schedule's end
    looks at the last one.

    Raises:
        UserError: a loss is not finite, and such a step ends the run.
    """
    if not run.args.check_for_nan_in_loss_and_grad:
        return
    now = known_at_once(total)
    read = total.item if now else copied_later(total, run.session.platform)
    unseen = run.session.state(UnseenLosses).found
    unseen.append(_Unseen(run.context.microbatch, batch, model_chunk, read))
    look_at_losses(run, but=0 if now else 1)


def known_at_once(loss: torch.Tensor) -> bool:
    """Return whether looking at a loss waits for nothing."""
    return loss.device.type == "cpu"


def look_at_losses(run: Run, *, but: int = 0) -> None:
    """Look at the losses that nobody has looked at yet, the last ``but`` of them left out.

    Raises:
        UserError: one is not finite, and such a step ends the run.
    """
    unseen = run.session.state(UnseenLosses).found
    while len(unseen) > but:
        one = unseen.popleft()
        total = one.read()
        if not math.isfinite(total):
            unseen.clear()
            _report_loss(run, one, total)


def _report_loss(run: Run, one: _Unseen, total: float) -> None:
    where = f"micro-batch {one.microbatch} on rank {run.dist.rank}"
    origin = _guard(lambda: origin_of_loss(run, one.batch, one.model_chunk))
    text = f"the loss of step {run.iteration + 1}, {where}, is {total}; {origin}"
    if run.args.bad_step_action == "stop":
        raise UserError(
            f"{text}. Lower --lr or check the data; --bad-step-action skip leaves such steps out, "
            "--no-check-for-nan-in-loss-and-grad does not look"
        )
    logger.warning("%s", text)


def with_named_gradients(run: Run, schedule: Callable[[], T]) -> T:
    """Run the schedule; megatron-core's word that a bucket is not finite becomes the name of a parameter.

    Raises:
        UserError: a loss or a gradient of this rank is not finite.
    """
    run.session.state(UnseenLosses).found.clear()
    try:
        return schedule()
    except RuntimeError as error:
        if _FROM_BUCKETS not in str(error):
            raise
        # The loss was there before its gradients.
        look_at_losses(run)
        raise UserError(
            f"step {run.iteration + 1}, rank {run.dist.rank}: {_guard(lambda: bad_gradient(run))}. Lower "
            "--lr or check the data; --bad-step-action skip leaves such steps out"
        ) from error


def verdict(run: Run, losses: Mapping[str, float]) -> str:
    """Return why the update must not happen, or an empty string; the same on every rank. Collective.

    Without ``--bad-step-action skip`` and ``--check-for-spiky-loss`` nothing is looked at: what is not finite
    has ended the run before.

    Args:
        run: the run, gradients reduced.
        losses: of the step, the same on every rank.

    Raises:
        UserError: the step is bad and ends the run, or too many were skipped in a row.
    """
    args, seen = run.args, run.session.state(BadSteps)
    skips = args.bad_step_action == "skip"
    # Buckets of gradients are checked by megatron-core when they are reduced; shards are not.
    looks = skips or (_fully_sharded(run) and args.check_for_nan_in_loss_and_grad)
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
    local = not bool(finite)
    if local and rank == run.dist.rank and rank != 0:
        logger.warning("step %d: %s", run.iteration + 1, bad_gradient(run))
    return bad_gradient(run) if local else f"a gradient on rank {rank} is not finite"


def _gradients_finite(run: Run) -> torch.Tensor:
    """Return whether all gradients of this rank are finite, a boolean scalar on the device."""
    if _fully_sharded(run):
        shards = [local_part(p.grad) for _, p in _parameters(run) if p.grad is not None]
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


def bad_gradient(run: Run) -> str:
    """Name the first parameter of this rank whose gradient is not finite."""
    for name, parameter in _parameters(run):
        gradient = getattr(parameter, "main_grad", None)
        gradient = local_part(parameter.grad if gradient is None else gradient)
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            return f"the gradient of {name} {_describe(gradient)}"
    return "a gradient is not finite"


def _bad_weight(run: Run) -> str:
    """Say which weight of this rank is not finite; empty where all are."""
    for name, parameter in _parameters(run):
        weight = local_part(parameter)
        if not bool(torch.isfinite(weight).all()):
            return f"the weight {name} {_describe(weight)}: an earlier update spoiled it"
    return ""


def origin_of_loss(run: Run, batch: Batch, model_chunk: MegatronModule) -> str:
    """Say where a loss that is not finite comes from: a weight, or the first module that made it.

    Runs the micro-batch forward again, with a look at the output of every module. Where ranks with other
    data would have to take part (expert or context parallelism), only weights are looked at.
    """
    # The loss is that of all tensor-parallel ranks: where one of them has found a weight, none runs it again.
    found_by = all_gather_values(_bad_weight(run), run.pg.tp)
    for rank, text in enumerate(found_by):
        if text:
            return text if len(found_by) == 1 else f"on tensor-parallel rank {rank}, {text}"
    if _fully_sharded(run):
        return "this rank's parts of all weights are finite"
    if run.pg.cp.size() > 1 or (getattr(run.pg, "ep", None) is not None and run.pg.ep.size() > 1):
        return "all weights are finite"
    chunk = unwrap(model_chunk)
    found: list[str] = []

    def look(name: str, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not found and all(_finite(item) for item in inputs) and not _finite(output):
            found.append(
                f"the first bad tensor is the output of {name or 'the model'} ({type(module).__name__})"
            )

    handles = [
        module.register_forward_hook(
            lambda module, inputs, output, name=name: look(name, module, inputs, output)
        )
        for name, module in chunk.named_modules()
    ]
    states = rng_state.capture(run.session.platform)
    training = chunk.training
    chunk.eval()
    try:
        options = padding_options(run, batch, chunk)
        if batch.packed_seq_params is not None:
            options["packed_seq_params"] = batch.packed_seq_params
        with torch.no_grad():
            chunk(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels, **options)
    finally:
        chunk.train(training)
        rng_state.apply(states, run.session.platform)
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    if run.pg.pp.size() > 1:
        return "it is bad already where it arrives from an earlier pipeline stage"
    return "all weights and all modules' outputs are finite when the micro-batch is repeated without dropout"


def _parameters(run: Run) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for chunk in run.model:
        yield from unwrap(chunk).named_parameters()


def _fully_sharded(run: Run) -> bool:
    return bool(run.args.use_torch_fsdp2 or run.args.use_megatron_fsdp)


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, (tuple, list)):
        return all(_finite(item) for item in value)
    return True


def _describe(tensor: torch.Tensor) -> str:
    bad = int((~torch.isfinite(tensor)).sum())
    kind = "nan" if bool(torch.isnan(tensor).any()) else "inf"
    return f"holds {kind} in {bad} of {tensor.numel()} elements"


def _guard(look: Callable[[], str]) -> str:
    """Return what was found; an error while looking must not hide what went wrong in the run."""
    try:
        return look()
    except Exception as error:
        return f"its origin could not be found ({type(error).__name__}: {error})"
