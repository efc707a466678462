"""megatron-core's interleaved schedule, with layers computed again while gradients are on their way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from mindspeed_core.errors import UserError
from mindspeed_memory.recompute.early import EarlyPasses
from mindspeed_memory.recompute.interleaving import (
    Pass,
    events,
    passes_to_drop,
    received,
    warmup_passes,
)

if TYPE_CHECKING:
    import torch.distributed as dist

    from mindspeed_core.run import Run


class EarlyReceives(P2PCommunicator):
    """Communication between pipeline stages that has something to do where it waits for a gradient."""

    def __init__(
        self, pp_group: dist.ProcessGroup, config: Any, order: Iterator[Pass], then: Callable[[Pass], None]
    ) -> None:
        """Take what is received in which order.

        Args:
            pp_group: the pipeline.
            config: of the model.
            order: the passes whose gradients are received.
            then: called with each of them before the wait.
        """
        super().__init__(pp_group=pp_group, config=config)
        self._order, self._then = order, then

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send a gradient and receive the next one; see megatron-core's."""
        gradient, handles = super().send_backward_recv_backward(
            input_tensor_grad, recv_next, tensor_shape, overlap_p2p_comm=True
        )
        expected = next(self._order) if recv_next else None
        if overlap_p2p_comm:
            if expected is not None:
                handles["recv_next"] = _Awaited(handles["recv_next"], self._then, expected)
            return gradient, handles
        if expected is not None:
            self._then(expected)
        for handle in (handles or {}).values():
            handle.wait()
        return gradient

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Receive a gradient; see megatron-core's."""
        if is_last_stage:
            return super().recv_backward(tensor_shapes, is_last_stage)
        return self.send_backward_recv_backward(None, True, tensor_shapes)


class _Awaited:
    """A message under way, and what is done before anybody waits for it."""

    def __init__(self, handle: Any, then: Callable[[Pass], None], expected: Pass) -> None:
        self._handle, self._then, self._expected = handle, then, expected

    def wait(self) -> None:
        self._then(self._expected)
        self._handle.wait()


class EarlySchedule:
    """The interleaved schedule, whose ranks compute layers again instead of waiting."""

    def __init__(
        self, run: Run, schedule: Callable[..., Any], passes: EarlyPasses, *, flag: str, in_bubble: bool
    ) -> None:
        """Wrap the schedule.

        Args:
            run: the run in progress.
            schedule: megatron-core's interleaved one.
            passes: the layers that are computed again.
            flag: that asks for it.
            in_bubble: only the passes drop their activations that are too many for a rank.

        Raises:
            UserError: it is another schedule.
        """
        if schedule is not schedules.forward_backward_pipelining_with_interleaving:
            name = getattr(schedule, "__qualname__", type(schedule).__name__)
            raise UserError(
                f"{flag}: layers are computed again at the waits of megatron-core's interleaved schedule, "
                f"and this is {name}; use virtual stages (--num-virtual-stages-per-pipeline-rank), and drop "
                "what brings another schedule"
            )
        self._run, self._schedule, self._passes = run, schedule, passes
        self._flag, self._in_bubble = flag, in_bubble
        functools.update_wrapper(self, schedule)

    def __call__(self, *, model: Any, num_microbatches: int, **options: Any) -> Any:
        """Run one batch; see megatron-core's ``get_forward_backward_func``.

        Raises:
            UserError: the exchange between stages is not overlapped, or the caller brings its own.
        """
        if options.get("forward_only"):
            return self._schedule(model=model, num_microbatches=num_microbatches, **options)
        config = get_model_config(model[0])
        if not config.overlap_p2p_comm or config.batch_p2p_comm:
            raise UserError(
                f"{self._flag}: a batched exchange has no wait in which layers could be computed again; drop "
                "--no-overlap-p2p-communication"
            )
        if options.pop("p2p_communicator", None) is not None:
            raise UserError(
                f"{self._flag} brings the communicator of the schedule; call it without p2p_communicator"
            )
        group = self._run.pg.pp
        table = schedules.get_schedule_table(
            num_microbatches, len(model), config.microbatch_group_size_per_vp_stage
        )
        last = group.rank() == group.size() - 1
        order = iter(received(table, len(model), last_rank=last))
        options |= {
            "p2p_communicator": EarlyReceives(group, config, order, self._passes.compute_again),
            "pg_collection": self._run.pg,
        }
        with self._passes.step(self._dropped(table, len(model), config)):
            return self._schedule(model=model, num_microbatches=num_microbatches, **options)

    def _dropped(self, table: Any, chunks: int, config: Any) -> frozenset[Pass] | None:
        if not self._in_bubble:
            return None
        ranks, rank = self._run.pg.pp.size(), self._run.pg.pp.rank()
        warmup = warmup_passes(ranks, rank, chunks, config.microbatch_group_size_per_vp_stage, len(table))
        return passes_to_drop(events(table, chunks, warmup), ranks * chunks)
