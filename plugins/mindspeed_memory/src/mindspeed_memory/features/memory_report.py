"""The declaration of the report of a step's memory."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs, hookimpl
from mindspeed_megatron.instruments.compiled_functions import run_eagerly_when_observed

_FLAG, _PATH = "--memory-report", "--memory-report-path"


class MemoryReport(Feature):
    """Report of the bytes of a training step, and of the flags that take them away."""

    name = "memory-report"
    family = "memory"
    summary = "Report memory by kind in the second step, with the largest tensors"
    level = 0
    flags = (
        Flag(_FLAG, help="Report memory of the second step by kind, and write it to files."),
        Flag(
            _PATH,
            type=str,
            default="./memory_report",
            per_rank=True,
            help="Folder that receives the reports of all ranks.",
        ),
    )
    docs = "mindspeed_memory:docs/memory-report.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_memory.features.optimizer_proofs:REPORT_PROOFS")

    _recorder: Any = None

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that a run drops other values, where this torch compiles no dropout that is followed."""
        if not (getattr(args, "hidden_dropout", 0) and getattr(args, "bias_dropout_fusion", False)):
            return ()
        if not run_eagerly_when_observed():
            return ()
        return (
            f"{_FLAG}: with the installed torch, dropout that would be compiled runs as it is once it is "
            "followed, which drops other values; a newer torch, or --no-bias-dropout-fusion, drops the same "
            "ones with and without",
        )

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Follow tensors from the first parameter on."""
        from mindspeed_memory.report.recorder import Recorder

        if self._recorder is None:
            self._recorder = Recorder(session)
        return (yield)

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Generator[None, Any, Any]:
        """Report the second step."""
        with self._recorder.step(run, run.args.memory_report_path):
            return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Any) -> Generator[None, Any, Any]:
        """Tell the update apart."""
        self._recorder.begin_update(run)
        return (yield)
