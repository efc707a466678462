"""The schedule of a step and the context in which its micro-batches run, the same on every host."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.pipeline_sends import forget_sends, wait_for_sends
from mindspeed_megatron.token_losses import check_passed
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


@dataclass
class _MicroBatches:
    """Micro-batches of the current step.

    Attributes:
        begun: how many each chunk has begun, by virtual pipeline stage.
        announced: virtual pipeline stage, micro-batch and its samples of the pass that a schedule runs.
    """

    begun: dict[int | None, int] = field(default_factory=dict)
    announced: tuple[int | None, int, int | None] | None = None


@hookimpl(trylast=True)
def get_forward_backward() -> Callable[..., Any]:
    """Return megatron-core's schedule for the sizes in use; a single chunk per rank is not interleaved."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() == 1:
        # megatron-core would interleave it, and end in a NameError.
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            return schedules.forward_backward_pipelining_without_interleaving
        return schedules.forward_backward_no_pipelining
    return schedules.get_forward_backward_func()


@contextmanager
def scheduled(run: Run, *, training: bool) -> Iterator[None]:
    """Run a schedule in this block: micro-batches count from 0, and the context ends with it."""
    restart_microbatches(run)
    context = run.context
    context.training = training
    forget_sends(run.session)
    try:
        yield
        wait_for_sends(run.session)
        check_passed(run)
    finally:
        context.microbatch, context.vp_stage, context.training, context.samples = -1, None, True, None


def restart_microbatches(run: Run) -> None:
    """Count the micro-batches of every chunk from 0 again."""
    run.session.state(_MicroBatches).begun.clear()


def begin_microbatch(run: Run, model_chunk: Any) -> None:
    """Set the run's context to the next micro-batch of a chunk."""
    state, context = run.session.state(_MicroBatches), run.context
    if state.announced is not None:
        context.vp_stage, context.microbatch, context.samples = state.announced
        return
    context.vp_stage = getattr(unwrap(model_chunk), "vp_stage", None)
    context.microbatch = state.begun.get(context.vp_stage, 0)
    state.begun[context.vp_stage] = context.microbatch + 1


@contextmanager
def announced(run: Run, vp_stage: int | None, microbatch: int, samples: int | None = None) -> Iterator[None]:
    """Say which forward pass a schedule runs in this block, in whatever order and however often.

    Args:
        run: the run in progress.
        vp_stage: virtual pipeline stage of the chunk, None without interleaving.
        microbatch: index within the step.
        samples: of this micro-batch, where it has another number than ``--micro-batch-size``.
    """
    state = run.session.state(_MicroBatches)
    state.announced = vp_stage, microbatch, samples
    try:
        yield
    finally:
        state.announced = None


def interleaves_natively(session: Session, args: Any) -> bool:
    """Return whether the schedule is megatron-core's interleaved one, which knows one shape by itself."""
    interleaved = (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) > 1
    return interleaved and "pipeline-schedule" not in session.plan.slots


def boundary_options(run: Run, args: Namespace, config: TransformerConfig) -> dict[str, Any]:
    """Return the options of a schedule for tensors that features change between pipeline stages.

    Args:
        run: the run in progress.
        args: the arguments, with the sizes of this step's micro-batches.
        config: the model's.

    Returns:
        ``adjust_tensor_shapes_fn`` where the tensors are not the usual ones, otherwise nothing: most
        schedules of megatron-core refuse the option. Interleaved stages that tell each other shapes
        (``config.variable_seq_lengths``) need none.

    Raises:
        UserError: the schedule is megatron-core's interleaved one, which knows one shape alone.
    """
    session = run.session
    implemented = session.implementations("boundary_schema")
    if run.pg is None or run.pg.pp.size() == 1 or len(implemented) == 1:
        return {}
    run.boundary = session.call("boundary_schema", args=args, config=config)
    wanted = [spec.shape for spec in run.boundary.tensors]
    usual = [spec.shape for spec in session.default("boundary_schema", args=args, config=config).tensors]
    if wanted == usual:
        return {}
    if interleaves_natively(session, args):
        if config.variable_seq_lengths:
            return {}
        changing = [name for name in session.plan.names if name in implemented]
        raise UserError(
            f"{', '.join(changing) or 'a feature'}: changes the tensors between pipeline stages, which "
            "megatron-core's interleaved schedule cannot; build the model without virtual stages (drop "
            "--num-layers-per-virtual-pipeline-stage), or use a feature with its own schedule"
        )
    return {"adjust_tensor_shapes_fn": lambda receive, send: (list(wanted), list(wanted))}
