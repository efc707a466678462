"""The length of a run and the batch of its steps, in steps and in samples.

A run is counted in steps (``--train-iters``) or in samples (``--train-samples``); with samples the batch may
grow at first (``--rampup-batch-size``) or change at given tokens (``--step-batch-size-schedule``). Everything
is a function of the arguments and of the samples consumed so far, so that a resumed run continues with the
batch it would have had.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_core.errors import ArgumentError
from mindspeed_train.arguments import batch_schedule
from mindspeed_train.arguments.batch_schedule import schedule_of
from mindspeed_train.arguments.errors import argument_error, option

_BY_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_BY_SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
_BATCHES = ("rampup_batch_size", "step_batch_size_schedule")
_MOST_SIZES = 10_000
"""Batch sizes of the longest ramp."""


@dataclass(frozen=True)
class StepBatch:
    """The batch of one step: samples over all ranks, and micro-batches on each rank."""

    samples: int
    microbatches: int


def batch_at(args: Namespace, consumed_samples: int) -> StepBatch:
    """Return the batch of the step that follows after ``consumed_samples``, ramps and schedules included."""
    schedule = schedule_of(args)
    if schedule is not None:
        size = batch_schedule.size_for(args, schedule, consumed_samples)
    elif args.rampup_batch_size:
        start, increment, samples = args.rampup_batch_size
        size = ramped_batch_size(args.global_batch_size, start, increment, samples, consumed_samples)
    else:
        return StepBatch(args.global_batch_size, args.num_microbatches)
    return StepBatch(size, size // (args.micro_batch_size * args.data_parallel_size))


def derive_batch(args: Namespace, *, own_schedule: bool = False) -> None:
    """Set ``global_batch_size`` and ``num_microbatches``, and check a ramp or a schedule.

    With a ramp they are those after it, with a schedule those of its last batch: validations have them.

    Args:
        args: the arguments.
        own_schedule: a feature brings the pipeline schedule, and knows which numbers of micro-batches go.

    Raises:
        ArgumentError: a batch size cannot be divided over the ranks or over the pipeline.
    """
    if args.micro_batch_size is None:
        args.micro_batch_size = 1
    unit = args.micro_batch_size * args.data_parallel_size
    sizes: list[tuple[int, str]] = []
    schedule = schedule_of(args)
    if schedule is not None:
        sizes = [(size, batch_schedule.FLAG) for size in batch_schedule.check_schedule(args, schedule)]
        args.global_batch_size = schedule.phases[-1][1]
    elif args.global_batch_size is None:
        args.global_batch_size = unit
    args.num_microbatches = args.global_batch_size // unit
    for size, flag in sizes or _batch_sizes(args):
        if size % unit:
            reason = (
                f"a batch of {size} is not divisible by micro-batch x data-parallel = "
                f"{args.micro_batch_size} x {args.data_parallel_size} = {unit}"
            )
            raise argument_error(args, flag, reason, f"use multiples of {unit}")
        pp = args.pipeline_model_parallel_size
        interleaved = args.virtual_pipeline_model_parallel_size is not None and not own_schedule
        if interleaved:
            _check_interleaving(args, size // unit, size, flag, unit * pp)


def _check_interleaving(args: Namespace, count: int, size: int, flag: str, multiple: int) -> None:
    """Check what megatron-core asks of the groups in which micro-batches go through a chunk."""
    pp = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or pp
    says = f"a batch of {size} gives {count} micro-batches; an interleaved pipeline needs"
    if group == pp:
        if count % pp:
            raise argument_error(args, flag, f"{says} a multiple of {pp}", f"use multiples of {multiple}")
        return
    name = "--microbatch-group-size-per-virtual-pipeline-stage"
    if not pp <= group <= count:
        reason = f"is not between the {pp} pipeline stages and the {count} micro-batches"
        raise argument_error(args, name, reason, f"use {pp}, or leave it out")
    if 0 < count % group < pp:
        reason = f"{says} groups of {group}, and a last one of {pp} or more"
        raise argument_error(args, flag, reason, f"leave out {name}, and use multiples of {multiple}")


def derive_schedule(args: Namespace) -> None:
    """Set ``train_iters`` and the lengths of the schedule in samples.

    These are ``lr_decay_steps``, ``lr_warmup_steps``, ``wd_incr_steps`` and ``wsd_decay_steps``, named as the
    parameters of megatron-core's scheduler.

    Raises:
        ArgumentError: a length is missing, counted in both ways, or does not fit the others.
    """
    if not args.train_iters and not args.train_samples:
        raise argument_error(
            args, "--train-iters", "is required", "say how many steps to train, or give --train-samples"
        )
    if args.train_iters and args.train_samples:
        raise argument_error(args, "--train-samples", "--train-iters is given too", "keep one")
    by_samples = bool(args.train_samples)
    for name in _BY_STEPS if by_samples else (*_BY_SAMPLES, *_BATCHES):
        if getattr(args, name):
            kind, other = ("--train-samples", "samples") if by_samples else ("--train-iters", "iters")
            remedy = (
                "count the run with --train-samples"
                if name in _BATCHES
                else f"use {option(name.rpartition('_')[0])}-{other}"
            )
            raise argument_error(args, option(name), f"the run is counted by {kind}", remedy)
    batch = 1 if by_samples else args.global_batch_size
    kind = "samples" if by_samples else "iters"
    if by_samples:
        args.train_iters, _ = _whole_run(args)
        if not args.train_iters:
            reason = f"is less than one batch of {args.global_batch_size}"
            raise argument_error(args, "--train-samples", reason, "give at least as many")
    length = args.train_samples if by_samples else args.train_iters
    decay = getattr(args, f"lr_decay_{kind}")
    if decay is None:
        decay = length
        setattr(args, f"lr_decay_{kind}", decay)
    warmup = getattr(args, f"lr_warmup_{kind}")
    if args.lr_warmup_fraction is not None:
        if warmup:
            raise argument_error(args, "--lr-warmup-fraction", f"--lr-warmup-{kind} is given too", "keep one")
        if not 0.0 <= args.lr_warmup_fraction < 1.0:
            raise argument_error(args, "--lr-warmup-fraction", "is not a share below 1", "use 0 for none")
        warmup = args.lr_warmup_fraction * decay
    if warmup >= decay:
        reason = f"must be below the {decay} {'samples' if by_samples else 'steps'} of the decay"
        remedy = f"lower it, or raise --lr-decay-{kind}"
        raise ArgumentError(f"--lr-warmup-{kind}", warmup, reason, remedy)
    last_phase = getattr(args, f"lr_wsd_decay_{kind}")
    if args.lr_decay_style == "WSD" and last_phase is None:
        raise argument_error(
            args, "--lr-decay-style", "needs the length of its last phase", f"add --lr-wsd-decay-{kind}"
        )
    args.lr_warmup_steps = warmup * batch
    args.lr_decay_steps = decay * batch
    args.wd_incr_steps = length * batch
    args.wsd_decay_steps = None if last_phase is None else last_phase * batch


def samples_wanted(args: Namespace) -> tuple[int, int | None, int]:
    """Return the samples of train, validation and test; None asks for one pass over the whole split."""
    batch = args.global_batch_size
    train = 0
    evaluations = 1
    if not args.skip_train:
        train = args.train_iters * batch
        if args.train_samples:
            # The last step of a ramp or of a schedule may begin before the end and reach beyond it.
            train = max(args.train_samples, _whole_run(args)[1])
        evaluations = args.train_iters // args.eval_interval + 1
    valid = None if args.full_validation else evaluations * args.eval_iters * batch
    return train, valid, args.eval_iters * batch


def _whole_run(args: Namespace) -> tuple[int, int]:
    """Return the steps of a run counted in samples, and the samples they consume; Megatron-LM's rule."""
    schedule = schedule_of(args)
    if schedule is not None:
        return schedule.whole_run(args.train_samples)
    steps = consumed = 0
    if args.rampup_batch_size:
        start, increment, samples = args.rampup_batch_size
        last = min(samples, args.train_samples)
        samples_of_a_size = samples / ((args.global_batch_size - start) // increment)
        while consumed <= last:
            batch = batch_at(args, consumed).samples
            end_of_size = min(samples_of_a_size * ((batch - start) // increment + 1), last)
            # As many steps as surely have this size; those around the next one follow singly.
            sure = max(1, int((end_of_size - consumed) / batch) - 1)
            consumed += sure * batch
            steps += sure
    constant = max(0, args.train_samples - consumed) // args.global_batch_size
    return steps + constant, consumed + constant * args.global_batch_size


def _batch_sizes(args: Namespace) -> Iterator[tuple[int, str]]:
    """Yield the sizes to divide: the run's, and the first two of a ramp, which decide for all others."""
    yield args.global_batch_size, "--global-batch-size"
    if not args.rampup_batch_size:
        return
    start, increment, samples = args.rampup_batch_size
    if start < 1 or increment < 1 or samples < 1:
        raise argument_error(args, "--rampup-batch-size", "has a number below 1", "use 1 or more")
    grown = args.global_batch_size - start
    if grown <= 0 or grown % increment:
        reason = (
            f"steps of {increment} do not lead from {start} to --global-batch-size {args.global_batch_size}"
        )
        remedy = "start below it, and choose an increment that divides the difference"
        raise argument_error(args, "--rampup-batch-size", reason, remedy)
    if grown // increment > _MOST_SIZES:
        reason = f"leads through {grown // increment} batch sizes, more than {_MOST_SIZES}"
        raise argument_error(args, "--rampup-batch-size", reason, "choose a larger increment")
    yield start, "--rampup-batch-size"
    if start + increment < args.global_batch_size:
        yield start + increment, "--rampup-batch-size"


def ramped_batch_size(target: int, start: int, increment: int, samples: int, consumed_samples: int) -> int:
    """Return the global batch size of the step that follows after ``consumed_samples``.

    Args:
        target: global batch size after the ramp.
        start: the first one, below ``target``.
        increment: by which it grows; divides the difference of the two.
        samples: samples over which it grows, in steps of equal length.
        consumed_samples: so far.
    """
    if consumed_samples > samples:
        return target
    steps = (target - start) // increment
    return min(start + int(consumed_samples / (samples / steps)) * increment, target)
