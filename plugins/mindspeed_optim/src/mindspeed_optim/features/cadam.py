"""The declaration of CAdam."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Gain, Scenario, hookimpl
from mindspeed_optim.features.layout_proofs import exactly_as, in_fsdp2, in_layouts, loaded_in, resumed_in
from mindspeed_optim.features.proofs import PLAIN, SHARDED

NAME = "opt-cadam"
_VALUE = "cadam"
_BETA, _LARGE_RATE, _SMALL_DECAY = 0.9, 3e-4, 0.1
"""What somebody trains with under Adam: its first factor, and bounds of rate and decay."""
_ELSEWHERE = "its state lies where no other optimizer finds it"
_CADAM = ("--optimizer", _VALUE)
_VERIFY = (
    *in_layouts(_CADAM),
    *exactly_as(_CADAM),
    in_fsdp2(_CADAM),
    *resumed_in(_CADAM),
    *loaded_in(_CADAM, warning="kept no exp_avg_sq"),
    Scenario(
        "bytes",
        flags=(*PLAIN, *SHARDED, *_CADAM),
        baseline=(*PLAIN, *SHARDED),
        world_size=2,
        steps=1,
        compare=("learning rates",),
        gains=(Gain("optimizer_bytes", at_most=0.2516),),
    ),
)


class CAdamOptimizer(Feature):
    """One moment of 16 bits, and the sign of it as the update."""

    name = NAME
    family = "optim"
    summary = "Update by the sign of one 16-bit moment: 2 bytes of state instead of 8"
    stability = "prototype"
    flags = (
        Flag(
            "--optimizer",
            type=str,
            default="adam",
            choices=(_VALUE,),
            help="cadam: the sign of one moment, kept in 16 bits.",
        ),
    )
    conflicts = (
        Conflict(flag="--use-precision-aware-optimizer", reason=_ELSEWHERE),
        Conflict(flag="--optimizer-cpu-offload", reason=_ELSEWHERE),
    )
    slots = ("optimizer",)
    docs = "mindspeed_optim:docs/opt-cadam.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "optimizer_bytes_per_parameter": "(6 + 1 / 128) / "
        "(data_parallel_size if use_distributed_optimizer else 1)",
    }
    verify = _VERIFY

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say what of the hyper-parameters looks like Adam's."""
        beta, rate, decay = (getattr(args, name, None) for name in ("adam_beta1", "lr", "weight_decay"))
        found = []
        if beta is not None and beta <= _BETA:
            found.append(f"--adam-beta1 {beta:g} (use 0.965)")
        if rate is not None and rate > _LARGE_RATE:
            found.append(f"--lr {rate:g} (use 3 to 10 times less than with Adam, and --min-lr likewise)")
        if decay is not None and 0 < decay <= _SMALL_DECAY:
            found.append(f"--weight-decay {decay:g} (use 3 to 10 times more than with Adam)")
        if not found:
            return ()
        return (f"--optimizer {_VALUE} moves every number by the whole rate; {'; '.join(found)}",)

    @hookimpl(wrapper=True)
    def build_optimizer(self, session: Any, model: Any, pg: Any) -> Generator[None, Any, Any]:
        """Put CAdam in the place of Adam."""
        optimizer = yield
        from mindspeed_core import put_inside
        from mindspeed_optim.rules.cadam import CAdam

        put_inside(session, optimizer, CAdam, owner=self.name, model=model, pg=pg)
        return optimizer
