"""The declarations, as the manual of hook interface 1.0 taught them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from mindspeed_core.feature import Feature, Flag, HookApi, Scenario, hookimpl

_TP2 = ("--tensor-model-parallel-size", "2")
_LOUDER = ("--acme-louder", "1.5")


class Beat(Feature):
    """Logs that the run is alive."""

    name = "acme-beat"
    family = "acme"
    summary = "Log a beat with every step"
    level = 0
    flags = (Flag("--acme-beat", help="Log a beat with every step."),)
    docs = "acme_first:docs/beat.md"

    @hookimpl(wrapper=True)
    def log_step(self) -> Generator[None, Any, Any]:
        """Add the beat."""
        numbers = yield
        return {**numbers, "beat": 1.0}


class Louder(Feature):
    """Multiplies the loss."""

    name = "acme-louder"
    family = "acme"
    summary = "Multiply the loss by a factor"
    flags = (Flag("--acme-louder", type=float, default=1.0, help="Multiply the loss by this factor."),)
    docs = "acme_first:docs/louder.md"
    verify = (
        Scenario("tp2", flags=(*_TP2, *_LOUDER), baseline=_LOUDER, world_size=2, baseline_world_size=1),
    )

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Any) -> Generator[None, Any, Any]:
        """Multiply the sum."""
        loss = yield
        return replace(loss, total=loss.total * run.args.acme_louder)


class Counted(Feature):
    """Reports which share of the tokens counts."""

    name = "acme-counted"
    family = "acme"
    summary = "Report the share of tokens that count"
    flags = (
        Flag("--acme-counted", help="Report the share of tokens that count."),
        Flag("--acme-counted-style", type=str, default="plain", help="How the share is written."),
    )
    docs = "acme_first:docs/counted.md"
    verify = (Scenario("single", flags=("--acme-counted",), tolerance=0.0),)

    @hookimpl(wrapper=True)
    def compute_loss(self, batch: Any) -> Generator[None, Any, Any]:
        """Report it beside the loss."""
        loss = yield
        import torch

        mask = batch.loss_mask
        share = torch.stack([mask.sum(), torch.full_like(mask.sum(), mask.numel())])
        return replace(loss, report={**loss.report, "counted share": share})


DECLARATIONS = (HookApi("1.0"), Beat, Louder, Counted)
