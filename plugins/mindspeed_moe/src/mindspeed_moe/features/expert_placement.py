"""The declaration of experts that move between ranks during training."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_moe.expert_ranks import expert_cuts, expert_ranks
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_moe.expert_map.rebalancing import Rebalancing

_FLAG, _STEPS = "--enable-expert-placement", "--expert-placement-freq"
_FINE, _THRESHOLD = "--enable-fine-grained-expert-placement", "--fine-grained-expert-placement-thre"
_PRINT = "--print-expert-load"
_DEFAULT_STEPS, _DEFAULT_THRESHOLD = 50, 0.08


class ExpertPlacement(Feature):
    """Experts move between ranks every some steps, so that ranks compute about as many rows."""

    name = "moe-expert-placement"
    family = "moe"
    summary = "Move experts between ranks during training to balance load"
    flags = (
        Flag(_FLAG, help="Move experts between ranks to balance their tokens."),
        Flag(_STEPS, type=int, default=_DEFAULT_STEPS, help="Steps between two placements of experts."),
        Flag(_FINE, help=f"Move experts of a layer only for a gain of {_THRESHOLD}."),
        Flag(
            _THRESHOLD,
            type=float,
            default=_DEFAULT_THRESHOLD,
            help="Least decrease of the coefficient of variation of rank loads.",
        ),
        Flag(_PRINT, help="Print rank loads before and after each placement."),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="there are no experts to move"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("allgather", "alltoall", "alltoall_seq"),
            reason="the flexible dispatcher knows no other places of experts",
        ),
        Requirement(
            flag="--optimizer",
            one_of=("adam", "sgd"),
            reason="what others keep of an expert does not move with it",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        Conflict(flag="--use-megatron-fsdp", reason="it cuts experts in its own way; drop one of the two"),
        Conflict(flag="--use-torch-fsdp2", reason="it cuts experts in its own way; drop one of the two"),
        Conflict(flag="--async-save", reason="experts would move while they are being written; drop it"),
        Conflict(
            flag="--use-precision-aware-optimizer",
            reason="it keeps scaled moments, which do not move; drop one of the two",
        ),
        Conflict(
            flag="--optimizer-cpu-offload",
            reason="it keeps further copies of parameters, which do not move; drop one of the two",
        ),
    )
    slots = ("expert-map",)
    docs = "mindspeed_moe:docs/moe-expert-placement.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (False, True)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.expert_map_proofs:PLACEMENT_PROOFS")

    _experts: Rebalancing | None = None

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether experts move, or a flag is given that means nothing without that."""
        return (
            bool(getattr(args, "enable_expert_placement", False))
            or bool(getattr(args, "enable_fine_grained_expert_placement", False))
            or bool(getattr(args, "print_expert_load", False))
            or getattr(args, "expert_placement_freq", _DEFAULT_STEPS) != _DEFAULT_STEPS
            or getattr(args, "fine_grained_expert_placement_thre", _DEFAULT_THRESHOLD) != _DEFAULT_THRESHOLD
        )

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse numbers that make no sense, experts of one rank, and flags without effect."""
        found = list(shared_experts_on_a_stream(_FLAG, args))
        steps, threshold = args.expert_placement_freq, args.fine_grained_expert_placement_thre
        if not args.enable_expert_placement:
            given = _FINE if args.enable_fine_grained_expert_placement else None
            given = given or (_PRINT if args.print_expert_load else None)
            given = given or (f"{_STEPS} {steps}" if steps != _DEFAULT_STEPS else f"{_THRESHOLD} {threshold}")
            found.append(f"{given} changes nothing where experts stay; add {_FLAG}, or drop it")
        if steps is None or steps < 1:
            found.append(f"{_STEPS} {steps} is no number of steps between two plans; use 1 or more")
        if threshold is None or not threshold > 0:
            found.append(f"{_THRESHOLD} {threshold} would move experts for nothing; use a number above 0")
        size = expert_ranks(args)
        if size < 2:
            found.append(
                f"{_FLAG} with --expert-model-parallel-size {size} has one rank for all experts; use 2 or "
                "more, or drop it"
            )
        elif getattr(args, "num_experts", None) == size:
            found.append(
                f"{_FLAG} with --num-experts {size} has one expert on each rank, whose loads no move "
                "changes; use more experts than ranks, or drop it"
            )
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return what a migration sends."""
        hidden = getattr(args, "hidden_size", None)
        width = getattr(args, "moe_ffn_hidden_size", None) or getattr(args, "ffn_hidden_size", None)
        if not hidden or not width:
            return ()
        weights = hidden * width * (3 if getattr(args, "swiglu", False) else 2) // expert_cuts(args)
        return (f"{_FLAG} sends at most {weights * 16 / 2**20:.3g} MiB for each expert and layer that moves",)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Run) -> Generator[None, Any, Any]:
        """Move experts after the update where it is time."""
        result = yield
        self._of(run).after_update()
        return result

    @hookimpl(wrapper=True)
    def before_save_checkpoint(self, run: Run) -> Generator[None, Any, Any]:
        """Bring experts to where checkpoints have them."""
        self._of(run).go_home()
        return (yield)

    @hookimpl(wrapper=True)
    def after_load_checkpoint(self, run: Run) -> Generator[None, Any, Any]:
        """Bring experts to where they were, or are in the run that is resumed."""
        result = yield
        self._of(run).return_from_home()
        return result

    @hookimpl
    def checkpoint_state(self, run: Run) -> Mapping[str, Any]:
        """Return loads and placements."""
        return {self.name: self._of(run).state()}

    @hookimpl
    def restore_checkpoint_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take loads and placements back."""
        if self.name in state:
            self._of(run).restore(state[self.name])

    def _of(self, run: Run) -> Rebalancing:
        if self._experts is None:
            from mindspeed_moe.expert_map.rebalancing import Frequency, rebalancing

            args = run.args
            fine = args.enable_fine_grained_expert_placement
            frequency = Frequency(
                args.expert_placement_freq,
                args.fine_grained_expert_placement_thre if fine else None,
                args.print_expert_load,
            )
            self._experts = rebalancing(run, frequency)
        return self._experts
