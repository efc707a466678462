"""The declaration of AdamW in one launch for each group of parameters."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Conflict, Feature, Flag, Scenario, hookimpl
from mindspeed_optim.features.layout_proofs import CP2, FULL, INTERLEAVED
from mindspeed_optim.features.proofs import (
    BF16,
    EP2,
    EXPERTS,
    OVERLAPS,
    PLAIN,
    PP2,
    SHARDED,
    TP2,
    resumed,
)

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.session import Session

FUSED_ADAM = "fused_adam"
"""The value of ``--optimizer``."""
SELECTIONS = ("fused_adamw", "fused_torch_adamw")
"""Values of ``--optimizer-selection``; MindSpeed's two names of one computation."""
_RULE = ("--optimizer", FUSED_ADAM)


def as_adam(
    name: str, *layout: str, ranks: int = 2, model: tuple[str, ...] = PLAIN, tolerance: float = 1e-5
) -> Scenario:
    """Compare with megatron-core's Adam on the same ranks.

    Args:
        name: of the scenario.
        layout: flags of both sides.
        ranks: processes.
        model: further flags of both sides.
        tolerance: largest relative error.
    """
    return Scenario(
        name,
        flags=(*model, *_RULE, *layout),
        baseline=(*model, *layout),
        world_size=ranks,
        tolerance=tolerance,
    )


class FusedAdamWOptimizer(Feature):
    """Chooses torch's fused kernel for AdamW, also for the block-wise AdamW of mindspeed-memory."""

    name = "opt-fused-adamw"
    family = "optim"
    summary = "Update the parameters of a group in one launch of torch's fused AdamW"
    flags = (
        Flag(
            "--optimizer",
            type=str,
            default="adam",
            choices=(FUSED_ADAM,),
            help="fused_adam: AdamW in one launch for each group of parameters.",
        ),
        Flag(
            "--optimizer-selection",
            type=str,
            choices=SELECTIONS,
            help="The kernel of --optimizer adam; both names mean torch's fused one.",
        ),
    )
    conflicts = (
        Conflict(flag="--use-precision-aware-optimizer", reason="the state lies inside Adam's own kernels"),
        Conflict(flag="--optimizer-cpu-offload", reason="the update is made on the host by its own Adam"),
    )
    after = ("block-optimizer",)
    slots = ("optimizer",)
    modes = ("train",)
    docs = "mindspeed_optim:docs/opt-fused-adamw.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = (
        as_adam("dp2-distributed-optimizer", *SHARDED),
        as_adam("tp2-sp", *TP2),
        as_adam("pp2", *PP2),
        as_adam("interleaved", *INTERLEAVED),
        as_adam("cp2", *CP2, *SHARDED),
        as_adam("recompute", *FULL, ranks=1),
        as_adam("ep2", *SHARDED, *EP2, model=(*PLAIN, *EXPERTS)),
        as_adam("dp2-overlaps", *OVERLAPS),
        as_adam("bf16", *SHARDED, model=BF16, tolerance=1e-2),
        as_adam("fsdp2", "--use-torch-fsdp2", "--untie-embeddings-and-output-weights"),
        Scenario(
            "selection", flags=(*PLAIN, "--optimizer-selection", SELECTIONS[0]), baseline=PLAIN, world_size=1
        ),
        resumed("resume", _RULE, SHARDED, TP2 + SHARDED),
        as_adam("block-wise", *SHARDED, "--reuse-fp32-param", model=BF16, tolerance=1e-2),
    )

    @classmethod
    def enabled(cls, args: Namespace) -> bool:
        """Return whether one of the two flags asks for it."""
        return args.optimizer == FUSED_ADAM or getattr(args, "optimizer_selection", None) in SELECTIONS

    @classmethod
    def validate(cls, args: Namespace) -> Sequence[str]:
        """Refuse a kernel of AdamW for something else."""
        if args.optimizer in ("adam", FUSED_ADAM):
            return ()
        return (
            f"--optimizer-selection {args.optimizer_selection} chooses a kernel of Adam, and --optimizer is "
            f"{args.optimizer}; drop one of the two",
        )

    @hookimpl(wrapper=True)
    def build_optimizer(
        self, session: Session, optimizer_config: Any, model: Any, pg: Any
    ) -> Generator[None, Any, Any]:
        """Put the fused update where Adam was."""
        optimizer = yield
        from mindspeed_core import put_inside
        from mindspeed_optim.rules.fused_adamw import FusedAdamW

        put_inside(
            session,
            optimizer,
            lambda groups: FusedAdamW(
                groups, decoupled=getattr(optimizer_config, "decoupled_weight_decay", True)
            ),
            owner=self.name,
            model=model,
            pg=pg,
        )
        return optimizer
