"""megatron-core's schedules, with the passes of two micro-batches side by side.

When its option ``overlap_moe_expert_parallel_comm`` is set, megatron-core asks for plans of forward passes
and runs two of them together: one forward, an earlier one backward. The plans here call the forward step as
it is, so that wrappers, hooks and modules are those of any other training, and run both passes by turns.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedules import custom_backward
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.utils import get_model_config
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_megatron.unwrap import unwrap
from mindspeed_moe.options import without_pairs
from mindspeed_moe.turns import Turns

if TYPE_CHECKING:
    from mindspeed_core.session import Session

T = TypeVar("T")
Step = Callable[..., Any]
"""Called with an iterator and a model chunk; returns the chunk's output and its loss function."""


class ForwardStep(AbstractSchedulePlan):
    """The forward pass of one micro-batch through one chunk, and later its backward pass.

    Attributes:
        event: recorded when the output was computed; megatron-core's loss function waits for it.
        vp_stage: of the chunk.
    """

    def __init__(self, step: Callable[[], tuple[Tensor, Step]], chunk: Any, schedule: PairedSchedule) -> None:
        """Prepare the pass; nothing is computed yet.

        Args:
            step: calls the forward step.
            chunk: the model without wrappers, which has its input from the stage before.
            schedule: that the pass belongs to.
        """
        self.event = schedule.session.platform.event()
        self.vp_stage: int | None = chunk.vp_stage
        self._step: Callable[[], tuple[Tensor, Step]] | None = step
        self._input: Tensor | None = None if chunk.pre_process else chunk.decoder.input_tensor
        self._schedule = schedule
        self._output: Tensor | None = None
        self._loss: Step | None = None

    def forward(self) -> Tensor:
        """Compute the chunk's output, ``[s, b, h]``, or losses ``[b, s]`` in the last stage."""
        assert self._step is not None
        step, self._step = self._step, None
        self._output, self._loss = step()
        self.event.record()
        return self._output

    def backward(self, gradient: Tensor) -> None:
        """Compute gradients from that of the output."""
        output, self._output = self._output, None
        assert output is not None
        if output.shape == gradient.shape:
            torch.autograd.backward(output, gradient)
        else:
            # megatron-core freed its storage when it had sent it.
            custom_backward(output, gradient)

    def loss(self, output: Tensor, **options: Any) -> Any:
        """Call the loss function that the forward step returned."""
        assert self._loss is not None
        return self._loss(output, **options)

    def gradient_of_input(self) -> Tensor | None:
        """Return what goes to the stage before, ``[s, b, h]``; None in the first one."""
        return None if self._input is None else self._input.grad

    @staticmethod
    def run(
        f_schedule_plan: ForwardStep | None,
        b_schedule_plan: ForwardStep | None,
        b_grad: Tensor | None = None,
        pre_forward: Callable[..., Any] | None = None,
        pre_backward: Callable[..., Any] | None = None,
        post_forward: Callable[..., Any] | None = None,
        post_backward: Callable[..., Any] | None = None,
    ) -> Tensor | None:
        """Compute one plan forward and another one backward, by turns where there are both.

        Args:
            f_schedule_plan: to compute forward.
            b_schedule_plan: to compute backward.
            b_grad: gradient of the output of ``b_schedule_plan``.
            pre_forward: waits for the input from the stage before.
            pre_backward: waits for the gradient from the stage behind.
            post_forward: sends the output.
            post_backward: sends the gradient of the input.

        Returns:
            The output of ``f_schedule_plan``.
        """
        ahead, behind = f_schedule_plan, b_schedule_plan
        if ahead is not None and pre_forward is not None:
            pre_forward(ahead.vp_stage)
        if behind is not None and pre_backward is not None:
            pre_backward(behind.vp_stage)
        output = None
        if ahead is not None and behind is not None:
            assert b_grad is not None
            output = behind._schedule.run_both(ahead, behind, b_grad)
        elif ahead is not None:
            output = ahead.forward()
        elif behind is not None:
            assert b_grad is not None
            behind.backward(b_grad)
        if ahead is not None and post_forward is not None:
            post_forward(output, ahead.vp_stage)
        if behind is not None and post_backward is not None:
            post_backward(behind.gradient_of_input(), behind.vp_stage)
        return output


class PairedSchedule:
    """A schedule of megatron-core in which the passes of two micro-batches take turns."""

    def __init__(self, session: Session, schedule: Callable[..., Any]) -> None:
        """Wrap a schedule.

        Args:
            session: the open one.
            schedule: of megatron-core.
        """
        self.session = session
        self._schedule = schedule
        functools.update_wrapper(self, schedule)

    def __call__(self, *, forward_step_func: Step, model: Any, **options: Any) -> Any:
        """Run the schedule over one batch, see megatron-core's ``get_forward_backward_func``.

        Raises:
            UserError: the model or the schedule pairs no micro-batches.
        """
        if options.get("forward_only"):
            return self._schedule(forward_step_func=forward_step_func, model=model, **options)
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        _check(chunks, config)
        with _told_to_pair(config):
            return self._schedule(
                forward_step_func=self._planning(forward_step_func, chunks), model=model, **options
            )

    def run_both(self, ahead: ForwardStep, behind: ForwardStep, gradient: Tensor) -> Tensor:
        """Compute one plan forward and another one backward by turns; returns the output of the first."""
        return _by_turns(self.session, ahead.forward, lambda: behind.backward(gradient))

    def _planning(self, step: Step, chunks: Sequence[Any]) -> Step:
        """Return the forward step that returns plans; it is handed a chunk without its wrappers."""
        wrapped = {id(unwrap(chunk)): chunk for chunk in chunks}

        def planning(data_iterator: Iterator[Any], chunk: Any, return_schedule_plan: bool = False) -> Any:
            plain = unwrap(chunk)
            whole = wrapped[id(plain)]
            if not return_schedule_plan:
                name = getattr(self._schedule, "__qualname__", type(self._schedule).__name__)
                raise UserError(
                    f"--moe-fb-overlap: the pipeline schedule {name} runs no two micro-batches side by side; "
                    "drop the flag, or the feature that brings the schedule"
                )
            plan = ForwardStep(lambda: step(data_iterator, whole), plain, self)
            return plan, plan.loss

        return planning


def paired(session: Session, schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the schedule with the passes of its pairs by turns.

    A schedule that knows its pairs itself has a method ``pair_with``, which takes a function of a forward and
    a backward pass; others are taken for megatron-core's.
    """
    whole: Any = inspect.unwrap(schedule, stop=lambda inner: hasattr(inner, "pair_with"))
    pair_with = getattr(whole, "pair_with", None)
    if pair_with is None:
        return PairedSchedule(session, schedule)
    pair_with(functools.partial(_by_turns, session))
    return schedule


def _by_turns(session: Session, forward: Callable[[], T], backward: Callable[[], None]) -> T:
    platform = session.platform
    stream = platform.current_stream()
    return session.state(Turns).run(forward, backward, launching=lambda: platform.use_stream(stream))


def _check(chunks: Sequence[Any], config: Any) -> None:
    stages = config.pipeline_model_parallel_size
    if stages > 1 and (config.virtual_pipeline_model_parallel_size or 1) == 1:
        raise UserError(without_pairs(stages))
    for chunk in chunks:
        plain = unwrap(chunk)
        if not isinstance(plain, GPTModel):
            raise UserError(
                f"--moe-fb-overlap: megatron-core pairs micro-batches of GPTModel, and this model is "
                f"{type(plain).__name__}; drop the flag"
            )
        if not parallel_state.is_initialized():
            raise UserError(
                "--moe-fb-overlap: megatron-core's schedule of two micro-batches reads its global groups; "
                "call parallel_state.initialize_model_parallel, or drop the flag"
            )


@contextmanager
def _told_to_pair(config: Any) -> Iterator[None]:
    """Set megatron-core's option while a schedule runs; nothing else is to see it."""
    before = config.overlap_moe_expert_parallel_comm
    config.overlap_moe_expert_parallel_comm = True
    try:
        yield
    finally:
        config.overlap_moe_expert_parallel_comm = before
