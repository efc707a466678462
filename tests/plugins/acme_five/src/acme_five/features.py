"""Declarations of acme-five; imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.feature import Conflict, Feature, Flag, HookApi, Resume, Scenario, hookimpl

if TYPE_CHECKING:
    import torch

    from mindspeed_core.hooks import Done
    from mindspeed_core.run import Batch, Datasets, Loss, OptimizerStep, Run
    from mindspeed_core.session import Session

_SMALL = ("--num-layers", "2", "--micro-batch-size", "2")
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")
_SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


class Average(Feature):
    """Keeps a moving average of the parameters."""

    name = "acme-average"
    family = "acme"
    summary = "Keep a moving average of the parameters, also in checkpoints"
    stability = "prototype"
    flags = (Flag("--acme-average", type=float, metavar="DECAY", help="Share of the past in each step."),)
    docs = "acme_five:docs/average.md"
    affects_checkpoint = False
    verify: ClassVar[Sequence[Scenario]] = (
        Scenario(
            "dp2-sharded",
            flags=(*_SMALL, *_SHARDED, "--acme-average", "0.5"),
            baseline=(*_SMALL, "--acme-average", "0.5"),
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
        ),
        Scenario(
            "resume",
            flags=(*_SMALL, "--swiglu", "--acme-average", "0.5"),
            steps=2,
            resume=Resume(flags=(*_SMALL, "--swiglu", *_PP2, "--acme-average", "0.5"), world_size=2),
        ),
    )

    def __init__(self) -> None:
        """Begin without an average: a session makes one instance."""
        self._average: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._restored = False

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a decay that keeps nothing or everything."""
        decay = args.acme_average
        return () if 0.0 < decay < 1.0 else (f"--acme-average {decay} is not between 0 and 1",)

    @hookimpl(wrapper=True)
    def start_run(self, run: Run) -> Generator[None, Done, Done]:
        """Begin with the weights that training begins with, unless a checkpoint had an average."""
        if not self._restored:
            self._average = {}
        return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Run) -> Generator[None, OptimizerStep, OptimizerStep]:
        """Take in what an update left."""
        average = self._kept(run)
        result = yield
        if result.successful:
            from acme_five.average import update

            update(average, run, run.args.acme_average)
        return result

    @hookimpl
    def checkpoint_state(self, run: Run) -> Mapping[str, Any]:
        """Describe the average like the parameters."""
        from mindspeed_core.megatron.feature_state import like_parameters

        return {self.name: like_parameters(run, self._kept(run))}

    @hookimpl
    def restore_checkpoint_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Go on from the average of the checkpoint."""
        if self.name in state:
            from mindspeed_core.megatron.feature_state import restore_like_parameters

            restore_like_parameters(run, self._kept(run), state[self.name])
            self._restored = True

    def _kept(self, run: Run) -> dict[torch.nn.Parameter, torch.Tensor]:
        from acme_five.average import copies

        self._average = self._average or copies(run)
        return self._average


class GatedNorms(Feature):
    """Norms with a parameter that megatron-core's norms lack."""

    name = "acme-gated-norm"
    family = "acme"
    summary = "Multiply the output of a norm by 1 + a gate per channel"
    stability = "prototype"
    flags = (Flag("--acme-gated-norm", help="Norms with a gate for each channel."),)
    conflicts = (
        Conflict(
            flag="--transformer-impl",
            equals="transformer_engine",
            reason="its norms are parts of the linear modules behind them, where nothing replaces them",
        ),
    )
    slots = ("norm",)
    places_modules = True
    docs = "acme_five:docs/gated-norm.md"
    affects_checkpoint = True
    verify: ClassVar[Sequence[Scenario]] = (
        # Gates start closed: the first step is that of the plain model, but for the norm of all gradients.
        Scenario(
            "closed-gates",
            flags=(*_SMALL, "--clip-grad", "0", "--acme-gated-norm"),
            baseline=(*_SMALL, "--clip-grad", "0"),
            steps=1,
            extra_parameters=("*gate",),
        ),
        Scenario(
            "tp2-sp",
            flags=(*_SMALL, *_TP2, "--acme-gated-norm"),
            baseline=(*_SMALL, "--acme-gated-norm"),
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
        ),
        Scenario(
            "resume",
            flags=(*_SMALL, "--acme-gated-norm"),
            steps=2,
            resume=Resume(flags=(*_SMALL, *_PP2, "--acme-gated-norm"), world_size=2),
        ),
    )

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Session) -> Generator[None, Any, Any]:
        """Put the norms into every layer of this chunk, and behind the last one."""
        spec = yield
        from acme_five.gated_norm import place_gated_norms

        return place_gated_norms(session, spec, owner=self.name)


class ZLoss(Feature):
    """A further loss on logits, reported under a name of its own."""

    name = "acme-z-loss"
    family = "acme"
    summary = "Add the z-loss, which keeps logits small"
    stability = "prototype"
    flags = (Flag("--acme-z-loss", type=float, default=0.0, metavar="W", help="Weight of the z-loss."),)
    docs = "acme_five:docs/z-loss.md"
    affects_checkpoint = False
    verify: ClassVar[Sequence[Scenario]] = (
        # A weight that vanishes beside the loss changes no number but the one that is reported.
        Scenario(
            "nothing-weighs",
            flags=(*_SMALL, "--acme-z-loss", "1e-30"),
            baseline=_SMALL,
            extra_losses=("z loss",),
        ),
        Scenario(
            "tp2-sp",
            flags=(*_SMALL, *_TP2, "--acme-z-loss", "0.1"),
            baseline=(*_SMALL, "--acme-z-loss", "0.1"),
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
        ),
        Scenario(
            "resume",
            flags=(*_SMALL, "--acme-z-loss", "0.1"),
            steps=2,
            world_size=2,
            resume=Resume(flags=(*_SMALL, *_PP2, "--acme-z-loss", "0.1"), world_size=2),
        ),
    )

    @hookimpl(wrapper=True)
    def compute_token_losses(
        self, session: Session, run: Run, logits: torch.Tensor, head: int
    ) -> Generator[None, torch.Tensor, torch.Tensor]:
        """Keep the squares of this micro-batch, those of its predictions of further tokens left out."""
        losses = yield
        from acme_five.z_loss import Squares, squared_log_sums

        if head == 0:
            session.state(Squares).of_tokens = squared_log_sums(logits, run.pg.tp)
        return losses

    @hookimpl(wrapper=True)
    def compute_loss(self, session: Session, run: Run, batch: Batch) -> Generator[None, Loss, Loss]:
        """Add their mean."""
        loss = yield
        from acme_five.z_loss import Squares, with_z_loss

        return with_z_loss(loss, batch, session.state(Squares), run.args.acme_z_loss)


_LION = (
    *("--optimizer", "acme-lion", "--use-distributed-optimizer"),
    *(*_SMALL, "--lr", "1e-4", "--disable-bias-linear"),
)
_LION_COMPARED = ("losses", "parameters", "optimizer state")


class LionOptimizer(Feature):
    """Another update rule inside megatron-core's optimizer."""

    name = "acme-lion"
    family = "acme"
    summary = "Update parameters by the sign of their momentum"
    stability = "prototype"
    flags = (Flag("--optimizer", type=str, default="adam", choices=("acme-lion",), help="Lion."),)
    slots = ("optimizer",)
    docs = "acme_five:docs/lion.md"
    affects_checkpoint = False
    verify: ClassVar[Sequence[Scenario]] = (
        # The sign of a gradient that is zero but for rounding decides about a whole update of its element.
        Scenario(
            "dp2-sharded",
            flags=(*_LION, *_SHARDED),
            baseline=_LION,
            world_size=2,
            baseline_world_size=1,
            tolerance=1e-3,
            compare=_LION_COMPARED,
            same_feature=True,
        ),
        Scenario(
            "resume",
            flags=(*_LION, *_SHARDED),
            world_size=2,
            steps=2,
            tolerance=1e-3,
            compare=_LION_COMPARED,
            resume=Resume(flags=(*_LION, *_TP2), world_size=2),
        ),
    )

    @hookimpl(wrapper=True)
    def build_optimizer(self, session: Session) -> Generator[None, Any, Any]:
        """Put Lion where Adam was."""
        optimizer = yield
        from acme_five.lion import Lion
        from mindspeed_core import put_inside

        put_inside(session, optimizer, Lion, owner=self.name)
        return optimizer


_LINES = ("--acme-lines", "{files}/lines.jsonl")
_LINES_FILE = ("acme_five.proof_files:write_lines",)


class Lines(Feature):
    """A data source with an order of its own."""

    name = "acme-lines"
    family = "acme"
    summary = "Train on the lines of a file, short ones first"
    stability = "prototype"
    flags = (Flag("--acme-lines", type=str, metavar="FILE", help="A list of token numbers on each line."),)
    slots = ("data-source",)
    docs = "acme_five:docs/lines.md"
    affects_checkpoint = False
    verify: ClassVar[Sequence[Scenario]] = (
        Scenario(
            "dp2",
            flags=(*_SMALL, *_LINES),
            baseline=(*_SMALL, *_LINES),
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
            files=_LINES_FILE,
        ),
        Scenario(
            "resume",
            flags=(*_SMALL, *_LINES),
            steps=2,
            world_size=2,
            files=_LINES_FILE,
            resume=Resume(flags=(*_SMALL, *_PP2, *_LINES), world_size=2),
        ),
    )

    @hookimpl
    def build_datasets(self, args: Any) -> Datasets:
        """Read the file; there is no data for validation."""
        from acme_five.lines import datasets

        return datasets(args.acme_lines, args.seq_length)


_EXPONENTIAL = (*_SMALL, "--lr-decay-style", "acme-exponential", "--lr-decay-iters", "6")


class Exponential(Feature):
    """A schedule of the learning rate under a name of its own."""

    name = "acme-exponential"
    family = "acme"
    summary = "Decay the learning rate by the same factor in every step"
    stability = "prototype"
    flags = (
        Flag(
            "--lr-decay-style",
            type=str,
            default="linear",
            choices=("acme-exponential",),
            help="By the same factor in every step.",
        ),
    )
    docs = "acme_five:docs/exponential.md"
    affects_checkpoint = False
    verify: ClassVar[Sequence[Scenario]] = (
        Scenario(
            "resume",
            flags=_EXPONENTIAL,
            steps=2,
            resume=Resume(flags=(*_EXPONENTIAL, *_TP2), world_size=2),
        ),
    )

    @hookimpl(wrapper=True)
    def build_scheduler(self, session: Session) -> Generator[None, Any, Any]:
        """Let megatron-core's scheduler follow the function."""
        scheduler = yield
        from acme_five.schedule import exponential
        from mindspeed_core import follow_schedule

        return follow_schedule(session, scheduler, {"acme-exponential": exponential}, owner=self.name)


DECLARATIONS = (HookApi("1.3"), Average, GatedNorms, ZLoss, LionOptimizer, Lines, Exponential)
