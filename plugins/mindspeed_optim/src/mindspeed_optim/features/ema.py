"""The declaration of AdamW with averaged weights."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, hookimpl
from mindspeed_memory.optim.options import RELEASE, REUSE

NAME = "opt-ema"
_VALUE = "fused_ema_adamw"
_SELECTION, _DECAY = "--optimizer-selection", "--ema-decay"
_OWN = "averages are made of main parameters and gradients as megatron-core keeps them"


class EmaOptimizer(Feature):
    """An average of the parameters, updated with them."""

    name = NAME
    family = "optim"
    summary = "Keep an exponential moving average of the weights beside AdamW"
    flags = (
        Flag(
            _SELECTION,
            type=str,
            choices=(_VALUE,),
            help="The kernel of --optimizer adam; fused_ema_adamw averages the weights as well.",
        ),
        Flag(
            _DECAY,
            type=float,
            default=0.9999,
            help="Factor of the average of weights in an update, from 0 to 1.",
        ),
    )
    conflicts = (
        Conflict(flag="--use-precision-aware-optimizer", reason="the state lies inside Adam's own kernels"),
        Conflict(flag="--optimizer-cpu-offload", reason="the update is made on the host by its own Adam"),
        Conflict(feature=REUSE, reason=_OWN),
        Conflict(feature=RELEASE, reason=_OWN),
        Conflict(
            feature="moe-expert-placement",
            reason="experts that move take both moments of Adam along, and not their average",
        ),
    )
    slots = ("optimizer", "optimizer-state")
    docs = "mindspeed_optim:docs/opt-ema.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "optimizer_bytes_per_parameter": "16 / (data_parallel_size if use_distributed_optimizer else 1)",
    }
    verify = Proofs("mindspeed_optim.features.ema_proofs:EMA_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse another optimizer, and factors that average nothing."""
        found = []
        if args.optimizer != "adam":
            found.append(
                f"{_SELECTION} {_VALUE} is a kernel of Adam, and --optimizer is {args.optimizer}; drop one "
                "of the two"
            )
        if not 0 <= args.ema_decay <= 1:
            found.append(f"{_DECAY} {args.ema_decay:g} is no factor of an average; give one from 0 to 1")
        return found

    @hookimpl(wrapper=True)
    def build_optimizer(
        self, session: Any, args: Any, optimizer_config: Any, model: Any, pg: Any
    ) -> Generator[None, Any, Any]:
        """Put the averaging update where Adam was."""
        optimizer = yield
        from mindspeed_core import put_inside
        from mindspeed_optim.rules.ema_adamw import EmaAdamW

        decoupled = getattr(optimizer_config, "decoupled_weight_decay", True)
        put_inside(
            session,
            optimizer,
            lambda groups: EmaAdamW(groups, args.ema_decay, decoupled=decoupled),
            owner=self.name,
            model=model,
            pg=pg,
        )
        return optimizer
