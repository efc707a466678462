"""Features whose proofs fail: those of acme-five, each with the mistake that its docstring names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from acme_five.features import Average, Exponential, GatedNorms, Lines, LionOptimizer, ZLoss
from mindspeed_core.feature import Feature, Flag, Scenario, hookimpl


class StaleAverage(Average):
    """The average takes parameters in before they are gathered."""

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Any) -> Any:
        average = self._kept(run)
        result = yield
        from acme_five.average import update

        class Incomplete:
            def complete_parameters(self) -> None:
                pass

        update(average, Incomplete(), run.args.acme_average)
        return result


class ForgottenAverage(Average):
    """A resumed run averages from its first weights on."""

    @hookimpl
    def restore_checkpoint_state(self) -> None:
        pass


class UnmarkedNorms(GatedNorms):
    """The gradient of a gate is that of a part of the sequence."""

    @hookimpl(wrapper=True)
    def build_model(self) -> Any:
        model = yield
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if name.endswith(".gate"):
                    parameter.sequence_parallel = False
        return model


class ZLossOfRanks(ZLoss):
    """The loss weighs as often as there are tensor-parallel ranks."""

    @hookimpl(wrapper=True)
    def compute_loss(self, session: Any, run: Any, batch: Any) -> Any:
        loss = yield
        from acme_five.z_loss import Squares, with_z_loss

        weight = run.args.acme_z_loss * run.pg.tp.size()
        return with_z_loss(loss, batch, session.state(Squares), weight)


class ForgetfulLion(LionOptimizer):
    """The momentum lives where no checkpoint looks."""

    @hookimpl(wrapper=True)
    def build_optimizer(self, session: Any) -> Any:
        optimizer = yield
        from forgetful_lion import ForgetfulLion

        from mindspeed_core import put_inside

        put_inside(session, optimizer, ForgetfulLion, owner=self.name)
        return optimizer


class LinesFromTheFirst(Lines):
    """A resumed run begins with the first line again."""

    @hookimpl
    def build_datasets(self, args: Any) -> Any:
        from acme_five.lines import datasets, short_first

        def from_the_first(sampling: Any) -> Any:
            return short_first(replace(sampling, consumed_samples=0))

        return replace(datasets(args.acme_lines, args.seq_length), batch_sampler=from_the_first)


class ExponentialOfCalls(Exponential):
    """A resumed run begins at the full rate again."""

    @hookimpl(wrapper=True)
    def build_scheduler(self, session: Any, args: Any) -> Any:
        scheduler = yield
        steps = set()

        def get_lr(group: Any) -> float:
            # A load may ask several times for the same step.
            steps.add(scheduler.num_steps)
            return args.lr * 0.9 ** len(steps)

        scheduler.lr_decay_style = "acme-exponential"
        session.instances.set(self.name, scheduler, "get_lr", get_lr)
        return scheduler


class RankState(Feature):
    """State that differs between ranks, although a checkpoint holds it once."""

    name = "toy-rank-state"
    family = "toys"
    summary = "Remembers its rank"
    flags = (Flag("--toy-rank-state", help="Remember the rank."),)
    verify = (
        Scenario(
            "dp2",
            flags=("--toy-rank-state",),
            baseline=("--toy-rank-state",),
            world_size=2,
            baseline_world_size=1,
            steps=1,
            same_feature=True,
        ),
    )

    @hookimpl
    def checkpoint_state(self, run: Any) -> Any:
        return {self.name: {"rank": run.dist.rank, "name": f"rank {run.dist.rank}"}}
