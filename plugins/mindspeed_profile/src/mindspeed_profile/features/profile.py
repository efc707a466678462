"""Declaration of the profiler: its flags, what they need, its proof. No torch."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Conflict, Feature, Flag, dest_of, hookimpl
from mindspeed_profile.features.proofs import PP2, TP2, unchanged
from mindspeed_profile.options import ANALYSES, EXPORTS, LEVELS, METRICS, ProfileOptions, problems
from mindspeed_profile.recorder import StepRecorder

PROFILE_RANKS = Flag(
    "--profile-ranks",
    type=int,
    nargs="+",
    default=(0,),
    metavar="RANK",
    help="Recorded ranks; -1 for all.",
)
_OF_NPUS = ("--profile-export-type", "--profile-aic-metrics", "--profile-analyse")
"""Flags that torch's own profiler, of CPUs and CUDA, has no use for."""
_PROOF = (
    *("--profile", "--profile-step-start", "1", "--profile-step-end", "2", "--profile-ranks", "-1"),
    *("--profile-level", "level1", "--profile-with-cpu", "--profile-with-memory", "--profile-record-shapes"),
    *("--profile-save-path", "runs/profile-proof"),
)


class Profile(Feature):
    """Records chosen steps on chosen ranks."""

    name = "profile"
    family = "profile"
    summary = "Trace chosen steps on chosen ranks with the torch or torch_npu profiler"
    level = 2
    flags = (
        Flag("--profile", help="Record a trace of some steps."),
        Flag("--profile-step-start", type=int, default=10, help="First recorded step, counted from 0."),
        Flag("--profile-step-end", type=int, default=12, help="First step that is no longer recorded."),
        Flag(
            "--profile-level",
            type=str,
            default="level0",
            choices=LEVELS,
            help="level0: operators and kernels; level1: also the stages of a step; level2: also modules.",
        ),
        Flag("--profile-with-cpu", help="Record host operators too."),
        Flag("--profile-with-stack", help="Record Python stacks; needs --profile-with-cpu."),
        Flag("--profile-with-memory", help="Record allocations; needs --profile-with-cpu."),
        Flag("--profile-record-shapes", help="Record the shapes of operator inputs."),
        Flag(
            "--profile-save-path",
            type=str,
            default="./profile_dir",
            per_rank=True,
            help="Folder that receives one trace per recorded rank.",
        ),
        PROFILE_RANKS,
        Flag(
            "--profile-export-type",
            type=str,
            nargs="+",
            choices=EXPORTS,
            help="NPU: forms of the record; text holds the trace that Perfetto reads.",
        ),
        Flag(
            "--profile-aic-metrics",
            type=str,
            choices=METRICS,
            help="NPU: metrics of the cores, from level1 on; PipeUtilization by default.",
        ),
        Flag(
            "--profile-analyse",
            type=str,
            choices=ANALYSES,
            help="NPU: analyse the record in the training, beside it, or later; off above 8 recorded ranks.",
        ),
    )
    slots = ("profiler",)
    conflicts = (
        Conflict(
            flag="--use-pytorch-profiler",
            reason="--profile and --use-pytorch-profiler both own the profiler; drop one of them",
        ),
    )
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_profile:docs/profile.md"
    modes = ("train",)
    affects_checkpoint = False
    fake_tensors = True
    deterministic = True
    verify = unchanged(
        _PROOF,
        {"single": (), "tp2-sp": TP2, "pp2": PP2},
        further_steps=("--profile-step-end", "5"),
    )

    _recorder: StepRecorder | None = None
    _rank_is_recorded = True

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Check the flags against each other."""
        return problems(ProfileOptions.of(args))

    @hookimpl(wrapper=True)
    def validate_arguments(self, session: Any) -> Generator[None, Any, Any]:
        """Check the ranks against the world, and the steps against the run."""
        args = yield
        options = ProfileOptions.of(args)
        outside = options.outside(args.world_size)
        if outside:
            raise ArgumentError(
                "--profile-ranks",
                " ".join(map(str, options.ranks)),
                f"rank {outside[0]} is outside the world of {args.world_size}",
                f"name ranks from 0 to {args.world_size - 1}, or -1 for all",
            )
        given = [flag for flag in _OF_NPUS if getattr(args, dest_of(flag), None)]
        if given and session.platform.device_type != "npu":
            _warn(
                "%s has no effect on %s: torch's profiler writes one trace, which needs no analysis",
                ", ".join(given),
                session.platform.name,
            )
        iterations = getattr(args, "train_iters", None)
        if iterations is not None and options.end > iterations:
            _warn(
                "--profile-step-end %d lies behind the last step: the trace ends with --train-iters %d",
                options.end,
                iterations,
            )
        return args

    @hookimpl(wrapper=True)
    def start_run(self, run: Any) -> Generator[None, Any, Any]:
        """Say so when a resumed run begins behind the steps to record."""
        end = run.args.profile_step_end
        if run.iteration >= end:
            _warn(
                "--profile-step-end %d: the run starts at step %d, nothing will be recorded",
                end,
                run.iteration,
            )
        return (yield)

    @hookimpl(wrapper=True)
    def train_step(self, session: Any, run: Any) -> Generator[None, Any, Any]:
        """Record the step when it is one of the chosen."""
        if self._recorder is None:
            if not self._rank_is_recorded:
                return (yield)
            self._recorder = self._prepare(session, run)
            if self._recorder is None:
                return (yield)
        recorder, iteration = self._recorder, run.iteration
        recorder.before_step(iteration)
        try:
            with self._range("step", iteration), self._parts_of_step(session, run):
                result = yield
        except BaseException:
            recorder.close()
            raise
        recorder.after_step(iteration)
        return result

    @hookimpl(wrapper=True)
    def forward_step(self, run: Any) -> Generator[None, Any, Any]:
        """Name the forward pass of each micro-batch in the trace."""
        with self._stage_range(f"mb{run.context.microbatch}.fwd", run):
            return (yield)

    @hookimpl(wrapper=True)
    def finalize_gradients(self, run: Any) -> Generator[None, Any, Any]:
        """Name the end of the gradients in the trace."""
        with self._stage_range("finalize_gradients", run):
            return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Any) -> Generator[None, Any, Any]:
        """Name the update in the trace."""
        with self._stage_range("optimizer_step", run):
            return (yield)

    @hookimpl(wrapper=True)
    def finish_run(self) -> Generator[None, Any, Any]:
        """Write what was recorded when the run ends within the chosen steps."""
        try:
            if self._recorder is not None:
                self._recorder.close()
        finally:
            result = yield
        return result

    def _prepare(self, session: Any, run: Any) -> StepRecorder | None:
        options = ProfileOptions.of(run.args)
        self._rank_is_recorded = options.records(run.dist.rank)
        if not self._rank_is_recorded:
            return None
        from mindspeed_profile.backends import make_profiler

        dist = run.dist
        make = partial(make_profiler, options, session.platform.device_type, dist.rank, dist.world_size)
        return StepRecorder(options, make)

    @contextmanager
    def _parts_of_step(self, session: Any, run: Any) -> Iterator[None]:
        """Name in the trace what megatron-core times (passes, transfers, the update's parts), and waits."""
        recorder = self._recorder
        if recorder is None or recorder.options.level < 1 or not recorder.recording(run.iteration):
            yield
            return
        from mindspeed_megatron.instruments.communication_events import CommunicationEvents
        from mindspeed_megatron.timer_events import listening
        from mindspeed_profile.ranges import StepRanges

        ranges, events = StepRanges(), session.state(CommunicationEvents)
        try:
            with listening(run, ranges), events.listening(ranges, session.at_close):
                yield
        finally:
            ranges.close()

    def _stage_range(self, name: str, run: Any) -> AbstractContextManager[Any]:
        if self._recorder is None or self._recorder.options.level < 1:
            return nullcontext()
        return self._range(name, run.iteration)

    def _range(self, name: str, iteration: int) -> AbstractContextManager[Any]:
        if self._recorder is None or not self._recorder.recording(iteration):
            return nullcontext()
        from torch.profiler import record_function

        return record_function(name)


def _warn(message: str, *values: object) -> None:
    # Listing and planning load declarations without it.
    from logging import getLogger

    getLogger(__name__).warning(message, *values)
