"""Tensors on their way between pipeline stages during one step.

Receives of a channel are posted in the order of the sender, a few ahead of need; sends are started behind
the computation and their tensors kept until they are complete. Which group of ranks carries a channel is said
in `mindspeed_pp.channels`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_core.run import TensorSpec
from mindspeed_pp.actions import FORWARD
from mindspeed_pp.channels import Message, goes_up, messages, sent
from mindspeed_pp.schedule import Schedule

UP, DOWN = "pp.up", "pp.down"
Shapes = Callable[[int], Sequence[TensorSpec]]
"""From a micro-batch to the tensors that cross from stage to stage."""


@dataclass
class _Sent:
    works: list[Any]
    tensors: list[Tensor]
    freed: Callable[[], None]

    def complete(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Mail:
    """Messages that this rank sends and receives in one step.

    Attributes:
        most_posted: most receives that were posted at once.
        heard: called with every message of another rank when it is there.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        groups: dict[str, Any],
        shapes: Shapes,
        device: torch.device,
        ahead: dict[tuple[int, int], int],
    ) -> None:
        """Prepare a step; nothing travels yet.

        Args:
            schedule: of the step.
            rank: this pipeline rank.
            groups: `UP` and `DOWN`.
            shapes: of the tensors of each micro-batch.
            device: that receives them.
            ahead: receives to keep posted, by channel.
        """
        self._schedule, self._rank, self._groups, self._shapes = schedule, rank, groups, shapes
        self._device = device
        self._ahead = ahead
        self._sending = {
            to: deque(sequence) for (origin, to), sequence in messages(schedule).items() if origin == rank
        }
        self._todo = {
            origin: deque(sequence) for (origin, to), sequence in messages(schedule).items() if to == rank
        }
        self._posted: dict[int, dict[Message, tuple[list[Tensor], list[Any]]]] = {o: {} for o in self._todo}
        self._local: dict[Message, list[Tensor]] = {}
        self._sent: deque[_Sent] = deque()
        self._arrived: set[Message] = set()
        self.heard: Callable[[Message], object] = lambda message: None
        self.most_posted = 0
        for origin in self._todo:
            self._post(origin, None)

    def specs(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the tensors that cross from stage to stage for a micro-batch."""
        return self._shapes(microbatch)

    def receive(self, message: Message, origin: int) -> list[Tensor]:
        """Return the tensors of a message, waiting for them; those from this rank at once."""
        if origin == self._rank:
            return self._local.pop(message)
        if message not in self._posted[origin]:
            self._post(origin, message)
        tensors, works = self._posted[origin].pop(message)
        self._wait(works, f"{message.kind}{message.stage}.{message.microbatch} from pipeline rank {origin}")
        self._arrived.add(message)
        self.heard(message)
        self._post(origin, None)
        return tensors

    def send(self, message: Message, to: int, tensors: list[Tensor], freed: Callable[[], None]) -> None:
        """Send tensors, or keep them for this rank.

        Args:
            message: that they are.
            to: the pipeline rank.
            tensors: in the order of the schema.
            freed: called when the memory of the tensors is not needed here any more.
        """
        if message.kind == FORWARD:
            check_described(tensors, self._shapes(message.microbatch), message)
        if to == self._rank:
            self._local[message] = [tensor.detach() for tensor in tensors]
            freed()
            return
        expected = self._sending[to].popleft()
        if message != expected:
            # The receiver would take it for another one.
            raise RuntimeError(f"{message} is sent to pipeline rank {to}, which awaits {expected}")
        group = self._groups[UP if goes_up(self._rank, to, self._schedule.ranks) else DOWN]
        kept = [tensor.detach().contiguous() for tensor in tensors]
        works = [dist.isend(tensor, group=group, group_dst=to) for tensor in kept]
        self._sent.append(_Sent(works, kept, freed))

    def reap(self) -> None:
        """Free what has been sent completely."""
        while self._sent and self._sent[0].complete():
            self._sent.popleft().freed()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._sent:
            self._wait(self._sent[0].works, "its sends to be received")
            self._sent.popleft().freed()

    def reached(self) -> dict[int, int]:
        """Return of the ranks that send here the first item that they may not have finished."""
        found: dict[int, int] = {}
        for origin in self._todo:
            for item, action in enumerate(self._schedule.orders[origin]):
                local = [message for message, to in sent(action, self._schedule) if to == self._rank]
                if local and self._arrived.issuperset(local):
                    found[origin] = item + 1
        return found

    def left(self) -> Iterator[str]:
        """Yield what should be gone at the end of a step, and is not."""
        for origin, posted in self._posted.items():
            yield from (f"a receive of {message} from rank {origin}" for message in posted)
        yield from (f"an input {message}" for message in self._local)

    def _post(self, origin: int, until: Message | None) -> None:
        todo, posted = self._todo[origin], self._posted[origin]
        ahead = self._ahead.get((origin, self._rank), 1)
        while todo and (until not in posted if until is not None else len(posted) < ahead):
            message = todo.popleft()
            group = self._groups[UP if goes_up(origin, self._rank, self._schedule.ranks) else DOWN]
            tensors = [
                torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                for spec in self._shapes(message.microbatch)
                if message.kind == FORWARD or spec.requires_grad
            ]
            works = [dist.irecv(tensor, group=group, group_src=origin) for tensor in tensors]
            posted[message] = tensors, works
        self.most_posted = max(self.most_posted, sum(map(len, self._posted.values())))

    def _wait(self, works: list[Any], awaited: str) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise StuckError(awaited) from error


def check_described(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], message: Message) -> None:
    """Refuse to send what the next stage does not expect: it would read other bytes, or wait for ever."""
    place = f"a pipeline stage sends to stage {message.stage}, for micro-batch {message.microbatch},"
    if len(tensors) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise UserError(
            f"{place} {len(tensors)} tensors, and {len(specs)} are described ({names}); see "
            "--pipeline-tensor-shapes"
        )
    for tensor, spec in zip(tensors, specs):
        if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != spec.dtype:
            raise UserError(
                f"{place} {spec.name} of {tensor.dtype} {list(tensor.shape)}, and {spec.dtype} "
                f"{list(spec.shape)} is described; see --pipeline-tensor-shapes and --variable-seq-lengths"
            )


class StuckError(RuntimeError):
    """A transfer that does not come to its end; says what was waited for."""


def warm_up(
    schedule: Schedule, rank: int, groups: dict[str, Any], device: torch.device, used_channels: set[Any]
) -> None:
    """Send one element over every channel that is new, in an order that is the same on all ranks.

    Backends of devices create the communicator of two ranks with its first transfer, and ranks that create
    several in different orders wait for each other for ever.

    Args:
        schedule: that is to run.
        rank: this pipeline rank.
        groups: `UP` and `DOWN`.
        device: of the transfers.
        used_channels: channels that carried something before; grows.

    Raises:
        StuckError: another rank does not answer.
    """
    for channel in sorted(set(messages(schedule)) - used_channels):
        used_channels.add(channel)
        origin, to = channel
        group = groups[UP if goes_up(origin, to, schedule.ranks) else DOWN]
        try:
            if rank == origin:
                dist.send(torch.zeros(1, device=device), group=group, group_dst=to)
            elif rank == to:
                dist.recv(torch.zeros(1, device=device), group=group, group_src=origin)
        except RuntimeError as error:
            other = to if rank == origin else origin
            raise StuckError(f"the first message between it and pipeline rank {other}") from error
