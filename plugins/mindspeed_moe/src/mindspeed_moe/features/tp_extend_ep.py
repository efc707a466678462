"""The declaration of experts that tensor parallelism spreads instead of cutting."""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_moe.expert_ranks import expert_ranks, tensor_ranks

_FLAG = "--moe-tp-extend-ep"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


class TensorRanksExtendExperts(Feature):
    """The ranks of tensor parallelism hold whole experts of their own instead of parts of the same ones."""

    name = "moe-tp-extend-ep"
    family = "moe"
    summary = "Spread experts over tensor-parallel ranks instead of sharding each"
    flags = (Flag(_FLAG, help="Spread whole experts over tensor-parallel ranks too."),)
    requires = (Requirement(flag="--num-experts", reason="without experts there is nothing to spread"),)
    docs = "mindspeed_moe:docs/moe-tp-extend-ep.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (False, True)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.tp_extend_ep_proofs:TP_EXTEND_EP_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse experts that are cut all the same, and experts that there are too few of."""
        found = []
        cut, experts = getattr(args, _ETP, None), getattr(args, "num_experts", None) or 0
        if cut not in (None, 1):
            found.append(
                f"{_FLAG} with --expert-tensor-parallel-size {cut}: experts would be spread and cut over the "
                "same ranks; drop one of the two"
            )
        if experts % expert_ranks(args):
            tensor, own = tensor_ranks(args), getattr(args, _EP, None) or 1
            found.append(
                f"{_FLAG}: num_experts ({experts}) must be divisible by tensor_model_parallel_size × "
                f"expert_model_parallel_size ({tensor} × {own}); use a multiple of {tensor * own}"
            )
        return found

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return that there are no other ranks to spread experts over."""
        return {_FLAG: "there is no tensor parallelism"} if tensor_ranks(args) == 1 else {}

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return the layout that the flag stands for."""
        if tensor_ranks(args) == 1:
            return ()
        return (
            f"{_FLAG} stands for --expert-model-parallel-size {expert_ranks(args)} "
            "--expert-tensor-parallel-size 1",
        )

    @hookimpl(wrapper=True)
    def validate_arguments_early(self, session: Any) -> Generator[None, Any, Any]:
        """Give hosts and megatron-core the sizes that they know."""
        args = copy.copy((yield))
        ranks, tensor = expert_ranks(args), tensor_ranks(args)
        _check_groups(session, ranks)
        stages = getattr(args, "pipeline_model_parallel_size", None) or 1
        world = session.place_in_world()[1]
        if world % (stages * ranks):
            own = ranks // tensor
            raise ArgumentError(
                _FLAG,
                None,
                f"pipeline × tensor × expert = {stages} × {tensor} × {own} does not divide the world size "
                f"{world}",
                "lower a size, or drop the flag",
            )
        setattr(args, _EP, ranks)
        setattr(args, _ETP, 1)
        # Said by the two sizes from here on.
        args.moe_tp_extend_ep = False
        return args


def _check_groups(session: Any, ranks: int) -> None:
    """Refuse groups that the flag comes too late for.

    Raises:
        ArgumentError: somebody else makes or has made the groups.
    """
    remedy = (
        f"give initialize_model_parallel expert_model_parallel_size={ranks} and "
        "expert_tensor_parallel_size=1, and drop the flag"
    )
    if session.host.name == "library":
        raise ArgumentError(_FLAG, None, "your program makes the process groups, not this session", remedy)
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return
    configured = state.get_expert_model_parallel_world_size()
    if configured != ranks:
        raise ArgumentError(
            _FLAG, None, f"the process groups exist already, with experts on {configured} ranks", remedy
        )
