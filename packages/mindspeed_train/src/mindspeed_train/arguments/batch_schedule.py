"""The batch of a run that grows or shrinks at given tokens (``--step-batch-size-schedule``).

The rule is that of megatron-core from 0.18 on: ``"0:384 200B:768 400B:1152"`` are batches of 384 samples from
the start, of 768 from the step on before which 200 billion tokens were consumed, and so on.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from mindspeed_core.errors import ArgumentError
from mindspeed_train.arguments.errors import argument_error

FLAG = "--step-batch-size-schedule"
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSchedule:
    """Batch sizes, each from a number of consumed samples on.

    Attributes:
        phases: first sample and batch size of each phase, the first from sample 0 on.
    """

    phases: tuple[tuple[int, int], ...]

    def size_at(self, consumed_samples: int) -> int:
        """Return the batch size of the step that follows after ``consumed_samples``."""
        return next(size for first, size in reversed(self.phases) if consumed_samples >= first)

    def whole_run(self, samples: int) -> tuple[int, int]:
        """Return the steps until ``samples`` are consumed, and what they consume: the last may reach beyond.

        This is Megatron-LM's count; a constant batch leaves out a last incomplete one instead.
        """
        steps = consumed = 0
        ends = [*(first for first, _ in self.phases[1:]), samples]
        for (_, size), end in zip(self.phases, ends, strict=True):
            # A phase that a large batch has leapt over has no step.
            of_phase = max(0, math.ceil((min(end, samples) - consumed) / size))
            steps += of_phase
            consumed += of_phase * size
        return steps, consumed


def schedule_of(args: Namespace) -> BatchSchedule | None:
    """Return the schedule of a run, None for one without.

    Raises:
        ArgumentError: it is no list of tokens and sizes in growing order from 0 on.
    """
    words = args.step_batch_size_schedule
    if not words:
        return None
    return _read(" ".join(words), args.seq_length)


@lru_cache(maxsize=8)
def _read(text: str, seq_length: int) -> BatchSchedule:
    phases = sorted(_phases(text, seq_length))
    if not phases or phases[0][0] != 0:
        raise _error(text, "says no batch for the start", "begin with 0:SIZE")
    for (earlier, _), (first, _) in pairwise(phases):
        if first == earlier:
            reason = f"has two batches from sample {first} of {seq_length} tokens on"
            raise _error(text, reason, "keep one of them")
    return BatchSchedule(tuple(phases))


def _phases(text: str, seq_length: int) -> Iterator[tuple[int, int]]:
    for entry in text.replace(",", " ").split():
        tokens, colon, size = entry.partition(":")
        if not colon:
            raise _error(text, f"has {entry!r}, which is no TOKENS:SIZE", "write 0:384 200B:768")
        found = _number(text, size)
        if found < 1:
            raise _error(text, f"has a batch of {size} samples", "use 1 or more")
        yield _number(text, tokens) // seq_length, found


def _number(text: str, word: str) -> int:
    found = _NUMBER.fullmatch(word)
    if found is None:
        raise _error(text, f"has {word!r}, which is no number", "write digits, and K, M, B or T behind them")
    digits, suffix = found.groups()
    return int(float(digits) * _FACTORS[suffix.upper()])


def _error(text: str, reason: str, remedy: str) -> ArgumentError:
    return ArgumentError(FLAG, text, reason, remedy)


def check_schedule(args: Namespace, schedule: BatchSchedule) -> Iterator[int]:
    """Yield the batch sizes that have to be divided over the ranks.

    A run that loads a checkpoint may have more ranks than it began with, so that its first batches do not
    come out even any more; `size_for` looks at the one where it goes on.

    Raises:
        ArgumentError: another flag says how batches grow, or the run is counted in steps.
    """
    for name, flag in (
        ("global_batch_size", "--global-batch-size"),
        ("rampup_batch_size", "--rampup-batch-size"),
    ):
        if getattr(args, name):
            reason = f"{FLAG} {' '.join(args.step_batch_size_schedule)} says how many samples a step has"
            raise argument_error(args, flag, reason, "keep one of the two")
    unit = args.micro_batch_size * args.data_parallel_size
    sizes = [size for _, size in schedule.phases]
    while args.load and len(sizes) > 1 and sizes[0] % unit:
        del sizes[0]
    yield from sizes


def size_for(args: Namespace, schedule: BatchSchedule, consumed_samples: int) -> int:
    """Return the batch size of a step, which the ranks of this run share evenly.

    Raises:
        ArgumentError: they do not: a checkpoint is resumed on more ranks before its batch is large enough.
    """
    size = schedule.size_at(consumed_samples)
    unit = args.micro_batch_size * args.data_parallel_size
    if size % unit:
        reason = (
            f"has a batch of {size} after {consumed_samples} samples, which is not divisible by micro-batch "
            f"x data-parallel = {args.micro_batch_size} x {args.data_parallel_size} = {unit}"
        )
        raise argument_error(args, FLAG, reason, "go on with fewer ranks until the batch is larger")
    return size
