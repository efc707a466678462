"""Small features of every kind that changes the training, each with its proof and a broken twin.

A twin has the name, the flags and the proof of the sound feature, and the mistake that its docstring names.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

from mindspeed_core.feature import Feature, Flag, Resume, Scenario, hookimpl

SMALL = ("--num-layers", "2", "--micro-batch-size", "2")
TP2 = ("--tensor-model-parallel-size", "2")


def small(*flags: str) -> tuple[str, ...]:
    return (*SMALL, *flags)


class GatedNorms(Feature):
    """Norms with a parameter that megatron-core's norms lack."""

    name = "toy-gated-norm"
    family = "toys"
    summary = "Norms with a gate for each channel"
    flags = (Flag("--toy-gated-norm", help="Norms with a gate."),)
    slots = ("norm",)
    places_modules = True
    verify = (
        Scenario(
            "tp2-sp",
            flags=small(*TP2, "--sequence-parallel", "--toy-gated-norm"),
            baseline=small("--toy-gated-norm"),
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
        ),
        # Gates start at zero: the first step is that of the plain model, but for the norm of all gradients.
        Scenario(
            "closed-gates",
            flags=small("--clip-grad", "0", "--toy-gated-norm"),
            baseline=small("--clip-grad", "0"),
            steps=1,
            extra_parameters=("*gate",),
        ),
    )
    _marked = True

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any) -> Any:
        spec = yield
        from gated_norm import place_gated_norms

        return place_gated_norms(session, spec, self.name, marked=self._marked)


class UnmarkedNorms(GatedNorms):
    """The gradient of a gate is that of a part of the sequence."""

    _marked = False


class ZLoss(Feature):
    """A further loss, reported under a name of its own."""

    name = "toy-z-loss"
    family = "toys"
    summary = "Adds the square of every token's loss"
    flags = (Flag("--toy-z-loss", type=float, default=0.0, help="Its weight."),)
    verify = (
        Scenario(
            "nothing-weighs", flags=small("--toy-z-loss", "1e-30"), baseline=SMALL, extra_losses=("z loss",)
        ),
        Scenario(
            "dp2",
            flags=small("--toy-z-loss", "0.1"),
            baseline=small("--toy-z-loss", "0.1"),
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
        ),
    )
    _by_rank = False

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Any, batch: Any, output_tensor: Any) -> Any:
        loss = yield
        import torch

        square = (output_tensor.float() ** 2 * batch.loss_mask).sum() * run.args.toy_z_loss
        if self._by_rank:
            square = square * run.pg.dp.size()
        report = {**loss.report, "z loss": torch.stack([square.detach(), loss.num_tokens])}
        return replace(loss, total=loss.total + square, report=report)


class ZLossOfRanks(ZLoss):
    """The loss weighs as often as there are data-parallel ranks."""

    _by_rank = True


class Lines(Feature):
    """A data source: numbers of a JSON file, one sample a line."""

    name = "toy-lines"
    family = "toys"
    summary = "Trains on the lines of a file"
    flags = (Flag("--toy-lines", type=str, help="The file."),)
    verify = (
        Scenario(
            "resume",
            flags=small("--toy-lines", "{files}/lines.jsonl"),
            world_size=2,
            steps=2,
            files=("proof_toys:write_lines",),
            resume=Resume(flags=small("--toy-lines", "{files}/lines.jsonl")),
        ),
    )
    _in_order = False

    @hookimpl
    def build_datasets(self, args: Any) -> Any:
        from line_dataset import LineDataset

        from mindspeed_core.run import Datasets

        return Datasets(LineDataset(args.toy_lines, args.seq_length, in_order=self._in_order))


class LinesInOrder(Lines):
    """Whatever sample is asked for, the next line comes."""

    _in_order = True


def write_lines(folder: Any) -> None:
    lines = [[(7 * line + 3 * token * (line % 5)) % 128 for token in range(33)] for line in range(40)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Halving(Feature):
    """A schedule: the learning rate halves with every step."""

    name = "toy-halving"
    family = "toys"
    summary = "The learning rate halves with every step"
    flags = (Flag("--toy-halving", help="Halve the learning rate with every step."),)
    verify = (
        Scenario(
            "resume",
            flags=small("--toy-halving"),
            steps=2,
            resume=Resume(flags=small(*TP2, "--toy-halving"), world_size=2),
        ),
    )
    _counts_calls = False

    @hookimpl(wrapper=True)
    def build_scheduler(self, session: Any, args: Any) -> Any:
        scheduler = yield
        calls = []

        def get_lr(group: Any) -> float:
            calls.append(group)
            if self._counts_calls:
                return args.lr * 0.5 ** len(calls)
            return args.lr * 0.5 ** (scheduler.num_steps / args.global_batch_size)

        session.instances.set(self.name, scheduler, "get_lr", get_lr)
        return scheduler


class HalvingOfCalls(Halving):
    """A resumed run begins at the full rate again."""

    _counts_calls = True


class SignUpdates(Feature):
    """An optimizer: updates are signs of a momentum."""

    name = "toy-signs"
    family = "toys"
    summary = "Updates by the sign of a momentum"
    flags = (Flag("--toy-signs", help="Update by the sign of a momentum."),)
    slots = ("optimizer",)
    verify = (
        Scenario(
            "resume",
            flags=small("--lr", "1e-4", "--toy-signs"),
            steps=2,
            # The sign of an element that is zero but for rounding decides about a whole step.
            tolerance=1e-3,
            compare=("losses", "parameters", "optimizer state"),
            resume=Resume(flags=small("--lr", "1e-4", *TP2, "--toy-signs"), world_size=2),
        ),
    )
    _state_name = "exp_avg"

    @hookimpl(wrapper=True)
    def build_optimizer(self) -> Any:
        optimizer = yield
        from sign_optimizer import put_signs_into

        return put_signs_into(optimizer, keeps_state=self._keeps_state)

    _keeps_state = True


class ForgetfulSigns(SignUpdates):
    """The momentum lives where no checkpoint looks."""

    _keeps_state = False


class Average(Feature):
    """An average of weights that the training itself never sees."""

    name = "toy-average"
    family = "toys"
    summary = "Keeps an average of the weights"
    flags = (Flag("--toy-average", help="Average the weights."),)
    verify = (
        Scenario(
            "resume",
            flags=small("--toy-average"),
            steps=2,
            resume=Resume(flags=small(*TP2, "--toy-average"), world_size=2),
        ),
    )
    _restores = True

    def __init__(self) -> None:
        self._kept: Any = None

    @hookimpl(wrapper=True)
    def build_model(self) -> Any:
        model = yield
        from mindspeed_toy_needs import parameter_average

        self._kept = parameter_average.copies(model)
        return model

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Any) -> Any:
        result = yield
        from mindspeed_toy_needs import parameter_average

        parameter_average.update(self._kept, run.model, 0.5)
        return result

    @hookimpl
    def checkpoint_state(self, run: Any) -> Any:
        from mindspeed_toy_needs import parameter_average

        # Loading fills the tensors that are described: those of a copy are nobody's.
        kept = self._kept if self._restores else copy.deepcopy(self._kept)
        return {self.name: parameter_average.sharded(kept, run.model)}

    @hookimpl
    def restore_checkpoint_state(self, state: Any) -> None:
        from mindspeed_toy_needs import parameter_average

        if self._restores:
            parameter_average.restore(self._kept, state.get(self.name, {}))


class RankState(Feature):
    """State that differs between ranks, although a checkpoint holds it once."""

    name = "toy-rank-state"
    family = "toys"
    summary = "Remembers its rank"
    flags = (Flag("--toy-rank-state", help="Remember the rank."),)
    verify = (
        Scenario(
            "dp2",
            flags=small("--toy-rank-state"),
            baseline=small("--toy-rank-state"),
            world_size=2,
            baseline_world_size=1,
            steps=1,
            same_feature=True,
        ),
    )

    @hookimpl
    def checkpoint_state(self, run: Any) -> Any:
        return {self.name: {"rank": run.dist.rank, "name": f"rank {run.dist.rank}"}}


class ForgottenAverage(Average):
    """A resumed run averages from its first weights on."""

    _restores = False
