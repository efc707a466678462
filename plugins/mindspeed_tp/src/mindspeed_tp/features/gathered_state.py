"""The declaration of optimizer state that is gathered without gloo."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Requirement, hookimpl
from mindspeed_tp.features.proofs import BOTH_OVERLAPS, SHARDED, as_without, resumed

_SLICE, _NO_GLOO = "--hccl-slice-size", "--disable-gloo-process-groups"
_DEFAULT = 10 * 1024 * 1024
_FLAGS = (_NO_GLOO, _SLICE, "1000")


class SlicedGather(Feature):
    """Formats of checkpoints that gather optimizer state do so in slices, over the device's own group."""

    name = "hccl-replace-gloo"
    family = "tp"
    summary = "Gather optimizer state for checkpoints over HCCL or NCCL instead of gloo"
    flags = (
        Flag(
            _SLICE,
            type=int,
            default=_DEFAULT,
            help="Elements gathered from every data-parallel rank at a time.",
        ),
        Flag(
            _NO_GLOO,
            aliases=("--disable-gloo-group",),
            inverts="enable_gloo_process_groups",
            help="Create no gloo groups beside those of the platform's backend.",
        ),
    )
    requires = (
        Requirement(
            flag="--use-distributed-optimizer",
            reason="it is the state of the distributed optimizer that is gathered; add it, or drop the flag",
        ),
    )
    docs = "mindspeed_tp:docs/hccl-replace-gloo.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = (
        as_without("dp2", _FLAGS, *SHARDED),
        resumed(_FLAGS, *BOTH_OVERLAPS),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a size is given, or a distributed optimizer has no groups of gloo."""
        without = not getattr(args, "enable_gloo_process_groups", True)
        sharded = bool(getattr(args, "use_distributed_optimizer", False))
        return getattr(args, "hccl_slice_size", _DEFAULT) != _DEFAULT or (without and sharded)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse slices of nothing."""
        if args.hccl_slice_size > 0:
            return ()
        return (f"{_SLICE} {args.hccl_slice_size}: a slice has at least one element; use a positive number",)

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say which formats do not gather."""
        return (
            "checkpoints that any layout loads hold what each rank has of the optimizer: only formats that "
            f"gather its state (--ckpt-format torch, dp_zero_gather_scatter) use {_SLICE}",
        )

    @hookimpl(wrapper=True)
    def build_process_groups(self, args: Any) -> Generator[None, Any, Any]:
        """Refuse groups of gloo that a program made before anybody was asked."""
        groups = yield
        if not args.enable_gloo_process_groups:
            from mindspeed_tp.gathered_state import check_without_gloo

            check_without_gloo()
        return groups

    @hookimpl(wrapper=True)
    def build_optimizer(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change how state is gathered and handed out."""
        optimizer = yield
        from mindspeed_tp.gathered_state import gather_in_slices

        gather_in_slices(session, optimizer, args.hccl_slice_size)
        return optimizer
