"""The declaration of a file of tokens per expert, layer and step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Requirement, Resume, Scenario, hookimpl
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED

_EMPTY = "mindspeed_moe.features.load_record:nothing"
_LOG = ("--moe-load-log", "{files}/loads.jsonl")
_EXPERTS = (*MODEL, *SHARED, *EP2)
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")


def nothing(folder: object) -> None:
    """Write no file into the folder that the log goes to."""


def _as_without(name: str, *both: str, ranks: int = 2) -> Scenario:
    return Scenario(
        name,
        flags=(*_EXPERTS, *both, *_LOG),
        baseline=(*_EXPERTS, *both),
        world_size=ranks,
        tolerance=0.0,
        files=(_EMPTY,),
    )


LOAD_RECORD_PROOFS = (
    _as_without("ep2"),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS),
    _as_without("bf16", "--bf16", "--moe-router-dtype", "fp32"),
    _as_without("recompute", "--recompute-granularity", "selective", "--recompute-modules", "moe"),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    Scenario(
        "resume",
        flags=(*_EXPERTS, *_BOTH_OVERLAPS, *_LOG),
        world_size=2,
        tolerance=1e-5,
        files=(_EMPTY,),
        resume=Resume(flags=(*MODEL, *SHARED, *_SHARDED), world_size=1, with_feature=False),
    ),
)


_FLAG, _EVERY = "--moe-load-log", "--moe-load-log-interval"


class LoadRecord(Feature):
    """Writes how many tokens each expert of each layer gets, for `mindspeed-features moe-report`."""

    name = "moe-load-log"
    family = "moe"
    summary = "Log tokens per expert, layer and step for mindspeed-features moe-report"
    level = 0
    flags = (
        Flag(_FLAG, type=str, metavar="FILE", help="Write tokens per expert and layer to this file."),
        Flag(_EVERY, type=int, default=1, help=f"Write {_FLAG} each so many steps."),
    )
    requires = (Requirement(flag="--num-experts", reason="without experts there are no loads"),)
    docs = "mindspeed_moe:docs/moe-load-log.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = LOAD_RECORD_PROOFS

    _recorder: Any = None
    _step = 0

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a file is given, or an interval, which needs one."""
        return (
            getattr(args, "moe_load_log", None) is not None or getattr(args, "moe_load_log_interval", 1) != 1
        )

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse an interval that is none, and one without a file."""
        if not args.moe_load_log:
            return (f"{_EVERY} {args.moe_load_log_interval} needs a file; add {_FLAG} FILE, or drop it",)
        if args.moe_load_log_interval < 1:
            return (f"{_EVERY} {args.moe_load_log_interval} is no number of steps; use 1 or more",)
        return ()

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any, config: Any, pg: Any) -> Generator[None, Any, Any]:
        """Count on the routers of the model."""
        chunks = yield
        from pathlib import Path

        from mindspeed_moe.load_recorder import LoadRecorder
        from mindspeed_moe.loaded_model import loaded_model

        layers = config.num_layers + (config.mtp_num_layers or 0)
        self._recorder = LoadRecorder(
            Path(args.moe_load_log),
            loaded_model(args, config, pg),
            layers,
            writes=not session.platform.dry_run,
        )
        session.at_close(self._recorder.watch(chunks))
        return chunks

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Any) -> Generator[None, Any, Any]:
        """Write the loads of the step that ends."""
        update = yield
        self._step = max(self._step, run.iteration) + 1
        if self._recorder is not None and self._step % run.args.moe_load_log_interval == 0:
            self._recorder.write(self._step)
        return update
