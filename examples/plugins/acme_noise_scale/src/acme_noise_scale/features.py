"""Declarations of acme-noise-scale; imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Conflict, Feature, Flag, HookApi, Resume, Scenario, dest_of, hookimpl

if TYPE_CHECKING:
    from mindspeed_core.run import Run, StepResult

_FLAGS = ("--acme-noise-scale", "0.9")
_TP2 = ("--tensor-model-parallel-size", "2")
_ONE = (
    ("--pipeline-model-parallel-size", "a stage runs several micro-batches before the first backward"),
    ("--context-parallel-size", "a rank sees a part of each sequence only"),
    ("--expert-model-parallel-size", "experts are averaged over other ranks than the rest"),
)


class NoiseScaleFeature(Feature):
    """Logs how large a batch would have to be before larger ones stop helping."""

    name = "acme-noise-scale"
    family = "acme"
    summary = "Log the simple noise scale of the gradient, in samples"
    stability = "prototype"
    level = 0
    flags = (
        Flag(
            "--acme-noise-scale",
            type=float,
            default=0.0,
            metavar="DECAY",
            help="Log the gradient noise scale; both estimates keep this share of their past. 0 logs none.",
        ),
    )
    conflicts = (
        Conflict(flag="--sequence-parallel", reason="gradients of norms are complete only after the step"),
        Conflict(flag="--calculate-per-token-loss", reason="micro-batches then weigh by their tokens"),
    )
    docs = "acme_noise_scale:docs/noise-scale.md"
    modes = ("train",)
    deterministic = True
    affects_checkpoint = False
    verify = (
        # It only looks: not one bit of the training may change.
        Scenario("single", flags=_FLAGS, tolerance=0.0),
        Scenario("tp2", flags=(*_TP2, *_FLAGS), baseline=_TP2, world_size=2, tolerance=0.0),
        Scenario(
            "dp2-distributed-optimizer",
            flags=("--use-distributed-optimizer", *_FLAGS),
            baseline=("--use-distributed-optimizer",),
            world_size=2,
            tolerance=0.0,
        ),
        # Its estimates travel with the checkpoint, also into another layout.
        Scenario("resume", flags=_FLAGS, resume=Resume(flags=(*_TP2, *_FLAGS), world_size=2)),
    )

    def __init__(self) -> None:
        """A session makes one instance: the state of the run lives here."""
        self._scale: Any = None
        self._small: Any = None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """The decay is a share, and every rank sees whole samples at once."""
        decay = args.acme_noise_scale
        found = [] if 0.0 <= decay < 1.0 else [f"--acme-noise-scale {decay} is not in [0, 1)"]
        for flag, reason in _ONE:
            size = getattr(args, dest_of(flag), 1) or 1
            if size > 1:
                found.append(f"--acme-noise-scale does not work with {flag} {size}: {reason}")
        return found

    @hookimpl(wrapper=True)
    def validate_arguments(self) -> Generator[None, Any, Any]:
        """There have to be two batch sizes to compare."""
        args = yield
        small, ranks = args.micro_batch_size, args.data_parallel_size
        if args.global_batch_size <= small * ranks:
            raise ArgumentError(
                "--acme-noise-scale",
                args.acme_noise_scale,
                f"a step of {args.global_batch_size} samples has one micro-batch per rank",
                f"use --global-batch-size {2 * small * ranks} or more",
            )
        return args

    @hookimpl(wrapper=True)
    def forward_step(self, run: Run) -> Generator[None, Any, Any]:
        """Measure the gradient norm of the first micro-batch when the second one begins."""
        if run.context.training and run.context.microbatch == 1:
            from mindspeed_core.megatron.gradient_norm import squared_norm_share

            self._small = squared_norm_share(run, finished=False)
        return (yield)

    @hookimpl(wrapper=True)
    def train_step(self, run: Run) -> Generator[None, StepResult, StepResult]:
        """Compare the norm of one micro-batch with that of the step."""
        result = yield
        small, self._small = self._small, None
        if small is None or result.grad_norm is None or result.skipped:
            return result
        from acme_noise_scale.estimator import NoiseScale
        from acme_noise_scale.micro_batch import micro_batch_squared_norm

        samples = result.tokens // run.args.seq_length
        squared = micro_batch_squared_norm(run, small, samples)
        if self._scale is None:
            self._scale = NoiseScale(run.args.acme_noise_scale)
        self._scale.update(squared, result.grad_norm**2, run.args.micro_batch_size, samples)
        run.metrics.add("micro-batch gradient norm", squared**0.5)
        run.metrics.add("gradient noise", self._scale.noise)
        run.metrics.add("gradient signal", self._scale.signal)
        if self._scale.signal > 0.0:
            run.metrics.add("noise scale", self._scale.noise / self._scale.signal)
        return result

    @hookimpl
    def checkpoint_state(self) -> Mapping[str, Any]:
        """Both estimates; the same on every rank."""
        state = (self._scale.signal, self._scale.noise) if self._scale is not None else (0.0, 0.0)
        return {self.name: {"signal": state[0], "noise": state[1]}}

    @hookimpl
    def restore_checkpoint_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Go on from the estimates of the checkpoint."""
        stored = state.get(self.name)
        if stored:
            from acme_noise_scale.estimator import NoiseScale

            self._scale = NoiseScale(run.args.acme_noise_scale, stored["signal"], stored["noise"])


DECLARATIONS = (HookApi("1.3"), NoiseScaleFeature)
