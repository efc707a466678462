"""The tokens that count in a training step, known before its first micro-batch runs.

With ``--calculate-per-token-loss`` gradients are summed over micro-batches and ranks and divided, at the
end of the step, by the tokens that counted in all of them. What layers add to the gradient by themselves
(losses of experts, of further predictions) has to be multiplied by that number while micro-batches still
run. So the rank that computes the loss looks at the loss masks of a step's micro-batches when the step
begins, and one sum over all ranks tells everybody. The number by which gradients are divided later has to
be the same.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_megatron.losses import copied_later
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Batch, Run
    from mindspeed_core.session import Session

Read = Callable[[Any], "Batch"]

_CHECKED = "_mindspeed_tokens_checked"


@dataclass(frozen=True)
class Counted:
    """Sums over all micro-batches of a step and all data-parallel ranks, float32 scalars on the device.

    A model of which pipeline ranks hold several copies counts every copy: only ratios are meaningful.

    Attributes:
        tokens: that count in the loss.
        samples: of all micro-batches.
        micro_batches: their number.
        copies: how often one data-parallel rank is counted.
        further: tokens that count for each prediction of a further token, the nearest first.
    """

    tokens: torch.Tensor
    samples: torch.Tensor
    micro_batches: torch.Tensor
    copies: torch.Tensor
    further: Sequence[torch.Tensor]

    @property
    def divisor(self) -> torch.Tensor:
        """Return what gradients are divided by at the end of the step: 1 where no token counts."""
        return torch.where(self.tokens > 0, self.tokens, 1.0)


class StepTokens:
    """The count of the step that a session runs.

    Attributes:
        now: its count; None outside of a training step, and where gradients are not divided by tokens.
        shifted: tokens of further predictions that this rank has used in the step, the nearest first; empty
            outside of a training step.
        sums: of their losses; the last step's until the next one begins.
        counts: of their tokens, likewise.
    """

    def __init__(self) -> None:
        """Begin outside of any step."""
        self.now: Counted | None = None
        self.shifted: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        self.counts: list[torch.Tensor] = []
        self._mask: torch.Tensor | None = None
        self._labels_shifted = False
        self._unread: Callable[[], None] | None = None

    def begin(self, heads: int, device: torch.device) -> None:
        """Forget the step before."""
        zero = torch.zeros((), device=device)
        self.shifted, self.sums, self.counts = [zero] * heads, [zero] * heads, [zero] * heads
        self._labels_shifted = False

    def end(self) -> None:
        """Keep the sums of the step."""
        self.now, self.counts, self.shifted, self._mask = None, self.shifted or self.counts, [], None

    def shift(self, ahead: int, moved: torch.Tensor, total: torch.Tensor) -> None:
        """Remember the mask ``[b, s]`` of a prediction; its labels, which look alike, come first.

        Args:
            ahead: which prediction, from 1 on.
            moved: labels or mask.
            total: the sum of it that belongs to this rank.
        """
        self._labels_shifted = not self._labels_shifted
        if not self._labels_shifted and self.shifted:
            self._mask = moved
            self.shifted[ahead - 1] = self.shifted[ahead - 1] + total.detach()

    def add(self, ahead: int, losses: torch.Tensor) -> None:
        """Add the losses ``[b, s]`` of the prediction whose mask came last to what is reported."""
        if self._mask is not None and self.shifted:
            self.sums[ahead - 1] = self.sums[ahead - 1] + (losses.detach() * self._mask).float().sum()

    def check_last(self) -> None:
        """Compare the numbers of the step before, if its device was still working on them."""
        unread, self._unread = self._unread, None
        if unread is not None:
            unread()

    def check_later(self, session: Session, used: Sequence[torch.Tensor], said: Counted) -> None:
        """Compare the count with what was used; at the next step where a device is still working.

        Args:
            session: the open session.
            used: what gradients were divided by, then the tokens of each further prediction.
            said: the count.
        """
        pairs = zip(used, (said.tokens, *said.further))
        table = torch.stack(
            [torch.stack([one.float().reshape(()), other / said.copies]) for one, other in pairs]
        )
        read = copied_later(table, session.platform)
        self._unread = lambda: _compare(read())
        if table.device.type == "cpu":
            self.check_last()


def divides_by_tokens(config: Any) -> bool:
    """Return whether layers of a model add losses to gradients that are divided by the tokens of a step."""
    if not config.calculate_per_token_loss:
        return False
    return config.num_moe_experts is not None or bool(getattr(config, "mtp_num_layers", None))


@contextmanager
def counted_tokens(
    run: Run,
    config: Any,
    data_iterator: Any,
    num_microbatches: int,
    sizes: tuple[int, int],
    *,
    training: bool,
    read: Read | None = None,
) -> Iterator[Any]:
    """Count the tokens of a step where layers need them, and run its schedule in this block.

    Collective over all ranks in that case. Micro-batches are dictionaries or objects with ``loss_mask``
    ``[b, s]``; without one every token counts. Where a feature changes batches, each passes the stage
    `get_batch` for its mask, and once more when it runs.

    Args:
        run: the run.
        config: of its model.
        data_iterator: what the schedule is handed: an iterator, one for each chunk, or None.
        num_microbatches: of this rank.
        sizes: ``--micro-batch-size`` and ``--seq-length``.
        training: an evaluation needs none.
        read: makes the `Batch` that a chunk gets of an item of its iterator.

    Yields:
        What to hand the schedule instead of ``data_iterator``: nothing is missing from it.

    Raises:
        UserError: gradients of the step before were divided by another number than was counted.
    """
    state = run.session.state(StepTokens)
    heads = (getattr(config, "mtp_num_layers", None) or 0) if training and config is not None else 0
    if heads:
        state.begin(heads, run.dist.device)
    if not training or config is None or not divides_by_tokens(config):
        try:
            yield data_iterator
        finally:
            if heads:
                state.end()
        return
    state.check_last()
    if read is not None and not _change_batches(run.session):
        read = None
    numbers, data_iterator = _own_numbers(run, data_iterator, num_microbatches, sizes, heads, read)
    numbers = numbers.to(run.dist.device)
    if run.dist.world_size > 1:
        dist.all_reduce(numbers)
    tokens, samples, micro_batches, loss_ranks, *further = numbers.unbind()
    state.now = Counted(tokens, samples, micro_batches, loss_ranks / run.pg.dp.size(), further)
    _check_where_divided(run, state, config)
    try:
        yield data_iterator
    finally:
        state.end()


def _change_batches(session: Session) -> bool:
    """Return whether a feature changes batches otherwise than by splitting their sequences over ranks."""
    features = session.implementations("get_batch")[:-1]
    return any(name != session.plan.slots.get("context-parallel") for name in features)


def _own_numbers(
    run: Run,
    data_iterator: Any,
    num_microbatches: int,
    sizes: tuple[int, int],
    heads: int,
    read: Read | None,
) -> tuple[torch.Tensor, Any]:
    """Return what this rank adds to the count, float32, and the iterators as they were."""
    numbers = torch.zeros(4 + heads)
    chunk = _chunk_with_loss(run)
    if chunk is None or (run.pg.tp.rank() and not read):
        return numbers, data_iterator
    several = isinstance(data_iterator, (list, tuple))
    iterators = list(data_iterator) if several else [data_iterator]
    items: list[Any] = []
    if chunk < len(iterators) and iterators[chunk] is not None:
        items, iterators[chunk] = _looked_ahead(iter(iterators[chunk]), num_microbatches)
    if read is None:
        batches = items
    else:
        batches = [_read(run, chunk, index, item, read) for index, item in enumerate(items)]
    masks = [_mask(batch) for batch in batches]
    samples, length = sizes[0] * num_microbatches, sizes[1]
    first = not run.pg.cp.rank()
    whole = True
    if masks and all(mask is not None for mask in masks):
        samples = sum(mask.shape[0] if mask.dim() > 1 else 1 for mask in masks)
        # A loop of somebody's own may look at batches that are split already.
        whole = run.pg.cp.size() == 1 or (read is None and masks[0].shape[-1] == length)
        split = None if whole else run.pg.cp
        counts = [_counts(mask, heads, batch, split) for mask, batch in zip(masks, batches)]
        totals = torch.stack(counts).sum(dim=0)
    else:
        totals = torch.tensor([float(samples * max(length - ahead, 0)) for ahead in range(heads + 1)])
    if not run.pg.tp.rank():
        # Masks may be on the device, which nothing here waits for.
        numbers = numbers.to(totals.device)
        if first or not whole:
            numbers[0], numbers[4:] = totals[0], totals[1:]
        if first:
            numbers[1:4] = numbers.new_tensor([samples, num_microbatches, 1])
    return numbers, iterators if several else iterators[0]


def _counts(mask: torch.Tensor, heads: int, batch: Any, split: Any) -> torch.Tensor:
    """Return the tokens of a mask ``[b, s]`` that count for the loss and for each prediction, float32."""
    counts = [mask.sum()]
    for ahead in range(1, heads + 1):
        if split is None:
            counts.append(mask[..., ahead:].sum())
        else:
            from megatron.core.transformer.multi_token_prediction import roll_tensor

            mask, count = roll_tensor(
                mask, cp_group=split, packed_seq_params=getattr(batch, "packed_seq_params", None)
            )
            counts.append(count)
    return torch.stack([count.float() for count in counts])


def _read(run: Run, chunk: int, microbatch: int, item: Any, read: Read) -> Any:
    """Return the batch of an item that was looked at, in the context in which it will run."""
    context = run.context
    context.microbatch = microbatch
    context.vp_stage = getattr(unwrap(run.model[chunk]), "vp_stage", None)
    try:
        return read(item)
    finally:
        context.microbatch, context.vp_stage = -1, None


def _chunk_with_loss(run: Run) -> int | None:
    """Return which of this rank's chunks computes the loss; None for none."""
    for index, chunk in enumerate(run.model):
        if getattr(unwrap(chunk), "post_process", True):
            return index
    return None


def _looked_ahead(iterator: Iterator[Any], count: int) -> tuple[list[Any], Iterator[Any]]:
    """Return the next items, and an iterator that begins with them and holds each until it is asked for."""
    items = list(islice(iterator, count))

    def all_of_them() -> Iterator[Any]:
        waiting = deque(items)
        while waiting:
            yield waiting.popleft()
        # Not delegated to: whoever drops this iterator would end the other one.
        for item in iterator:  # noqa: UP028
            yield item

    return items, all_of_them()


def _mask(item: Any) -> Any:
    if isinstance(item, Mapping):
        return item.get("loss_mask")
    return getattr(item, "loss_mask", None)


def _check_where_divided(run: Run, state: StepTokens, config: Any) -> None:
    """Compare the numbers where a configuration's gradients are finished, from now on."""
    original, session = getattr(config, "finalize_model_grads_func", None), run.session
    if original is None or hasattr(original, _CHECKED):
        return

    @functools.wraps(original)
    def finalize(model: Any, num_tokens: torch.Tensor | None = None, *rest: Any, **named: Any) -> Any:
        said, used = state.now, list(state.shifted)
        result = original(model, num_tokens, *rest, **named)
        if said is not None and num_tokens is not None:
            if used and run.dist.world_size > 1:
                total = torch.stack(used)
                dist.all_reduce(total)
                # Tensor-parallel ranks have the same.
                used = list((total / run.pg.tp.size()).unbind())
            if not session.platform.dry_run:
                state.check_later(session, (num_tokens.detach().clone(), *used), said)
        return result

    setattr(finalize, _CHECKED, True)
    session.instances.set("losses of layers", config, "finalize_model_grads_func", finalize)


def _compare(pairs: Sequence[Sequence[float]]) -> None:
    for ahead, (used, said) in enumerate(pairs):
        # A loss function counts whole tokens in each micro-batch, and float32 whole ones up to 2**24.
        if abs(used - said) > 0.5 + 1e-5 * said:
            raise UserError(_message(ahead, used, said))


def _message(ahead: int, used: float, said: float) -> str:
    if ahead == 0:
        return (
            f"--calculate-per-token-loss: the loss function counted {used:g} tokens in a step whose "
            f"micro-batches say {said:g}, so that losses of experts or of further predictions would weigh "
            "something else than asked for; let micro-batches come from the data iterator with the loss_mask "
            "that the loss function uses and let it return the sum, the number of tokens and the report, or "
            "drop the flag"
        )
    return (
        f"--calculate-per-token-loss with --mtp-num-layers: {used:g} tokens counted for prediction {ahead} "
        f"in a step whose loss masks say {said:g}, so that it would weigh something else than asked for; "
        "pass the model the loss_mask of its micro-batch. Where documents are kept apart, drop the flag"
    )
