"""Declaration of throughput in floating-point operations, by formula and counted. No torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_megatron.instruments.compiled_functions import run_eagerly_when_observed
from mindspeed_profile.features.proofs import PP2, TP2, unchanged

MODES = MODEL, COUNTED, BOTH = ("model", "counted", "both")
_FLAG, _MODE, _PEAK = "--op-cal-tflops", "--flops-mode", "--peak-tflops"
_PROOF = (_FLAG, _PEAK, "1")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


class CountedThroughput(Feature):
    """MFU by the model's formula and HFU by what one step was seen to execute, in the log."""

    name = "tflops"
    family = "profile"
    summary = "Log MFU and HFU, from the formula and from one step that is counted"
    level = 2
    flags = (
        Flag(_FLAG, help="Log TFLOP/s per device with the shares of its peak, MFU and HFU."),
        Flag(
            _MODE,
            type=str,
            default=BOTH,
            choices=MODES,
            help="model: by the formula; counted: by the operators of one step; both.",
        ),
        Flag(
            _PEAK,
            type=float,
            per_rank=True,
            help="Peak TFLOP/s of a device in the training dtype; by default from its name, on CPU measured.",
        ),
    )
    docs = "mindspeed_profile:docs/tflops.md"
    modes = ("train",)
    affects_checkpoint = False
    fake_tensors = True
    deterministic = True
    verify = unchanged(_PROOF, {"single": (), "tp2-sp": TP2, "pp2-recompute": (*PP2, *_FULL)})

    _meter: Any = None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse to count where operators are not seen one by one."""
        peak = getattr(args, "peak_tflops", None)
        if peak is not None and not peak > 0:
            return (f"{_PEAK} {peak}: a peak is above 0",)
        if args.flops_mode == MODEL:
            return ()
        graphs = getattr(args, "cuda_graph_impl", None)
        captured = [
            flag for flag in ("enable_cuda_graph", "external_cuda_graph") if getattr(args, flag, False)
        ]
        if graphs not in (None, "none") or captured:
            given = f"--cuda-graph-impl {graphs}" if not captured else f"--{captured[0].replace('_', '-')}"
            return (
                f"{_FLAG} cannot count operators of captured graphs ({given}), which run without being "
                f"called; add {_MODE} {MODEL}",
            )
        return ()

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that a run drops other values, where this torch compiles no dropout that is counted."""
        dropout = getattr(args, "hidden_dropout", 0) and getattr(args, "bias_dropout_fusion", False)
        if args.flops_mode == MODEL or not dropout or not run_eagerly_when_observed():
            return ()
        return (
            f"{_FLAG}: with the installed torch, dropout that would be compiled runs as it is once it is "
            f"counted, which drops other values; a newer torch, --no-bias-dropout-fusion or {_MODE} {MODEL} "
            "drops the same ones with and without",
        )

    @hookimpl(wrapper=True)
    def train_step(self, session: Any, run: Any) -> Generator[None, Any, Any]:
        """Take the time of the step, or count its operators."""
        if session.platform.dry_run:
            return (yield)
        if self._meter is None:
            from mindspeed_profile.flop_meter import FlopMeter

            self._meter = FlopMeter(run, by_formula=self._does(run, MODEL), counted=self._does(run, COUNTED))
        with self._meter.step(run) as measured:
            result = yield
            measured.tokens = result.tokens
        return result

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Generator[None, Any, Any]:
        """Tell the operators of the update apart."""
        if self._meter is None:
            return (yield)
        with self._meter.update():
            return (yield)

    @hookimpl(wrapper=True)
    def log_step(self, run: Any) -> Generator[None, Any, Any]:
        """Add the figures."""
        numbers = yield
        return numbers if self._meter is None else {**numbers, **self._meter.figures(run)}

    @staticmethod
    def _does(run: Any, mode: str) -> bool:
        return run.args.flops_mode in (mode, BOTH)
