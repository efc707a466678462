"""The declaration of buffer sizes and expansion modes of communicators."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Fallback, Feature, Flag, hookimpl
from mindspeed_megatron.group_options import OF_OWN_GROUPS
from mindspeed_tp.features.proofs import BOTH_OVERLAPS, SP, TP2, as_without, resumed
from mindspeed_tp.group_sizes import (
    WITHOUT_GROUP,
    adaptive_sizes,
    buffer_sizes,
    expansion_modes,
    group_numbers,
)

_SIZES, _ADAPTIVE = "--hccl-group-buffer", "--hccl-group-buffer-adaptive"
_FACTOR, _MODE = "--hccl-ep-group-buffer-adaptive-factor", "--hccl-op-mode"
_GIVEN = (_SIZES, "tp:16;dp:32", _MODE, "tp:2")


class GroupOptions(Feature):
    """Communicators of HCCL get buffers of the size that their messages need."""

    name = "hccl-group-options"
    family = "tp"
    summary = "Set buffer size and expansion mode of each HCCL communicator"
    flags = (
        Flag(
            _SIZES,
            type=group_numbers,
            metavar="GROUP:MIB;...",
            help="HCCL buffer size of process groups in MiB, such as 'dp:200;tp:300;exp:400'.",
        ),
        Flag(_ADAPTIVE, help="Size HCCL buffers of process groups by their largest message."),
        Flag(
            _FACTOR,
            type=float,
            default=-1.0,
            help=f"With {_ADAPTIVE}: tokens of the fullest expert's rank, in even shares; groups of experts "
            "keep HCCL's default without it.",
        ),
        Flag(
            _MODE,
            type=group_numbers,
            metavar="GROUP:MODE;...",
            help="CANN's op expansion mode of process groups, such as 'tp:3'.",
        ),
    )
    platforms = ("npu",)
    fallback = Fallback("buffers and modes are those of HCCL, which only NPUs have; nothing else changes")
    patches = (OF_OWN_GROUPS,)
    docs = "mindspeed_tp:docs/hccl-group-options.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = (
        as_without("tp2-sp", _GIVEN, *TP2, *SP),
        resumed(_GIVEN, *TP2, *SP, *BOTH_OVERLAPS),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a size or a mode is given."""
        names = ("hccl_group_buffer", "hccl_group_buffer_adaptive", "hccl_op_mode")
        return any(getattr(args, name, None) for name in names)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse sizes of messages that cannot be known."""
        names = ("seq_length", "micro_batch_size", "hidden_size", "num_attention_heads")
        missing = [name for name in names if not getattr(args, name, None)]
        if not args.hccl_group_buffer_adaptive or not missing:
            return ()
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        return (f"{_ADAPTIVE} needs {flags} to know the size of messages; give them, or {_SIZES}",)

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say which sizes messages have, and which entries reach no group."""
        said = []
        if args.hccl_group_buffer_adaptive:
            sizes = ", ".join(f"{name} {size}" for name, size in adaptive_sizes(args).items())
            said.append(f"{_ADAPTIVE}: MiB of groups, where they are created: {sizes}")
        for flag, given in ((_SIZES, args.hccl_group_buffer), (_MODE, args.hccl_op_mode)):
            without = [name for name, _ in given or () if name in WITHOUT_GROUP]
            if without:
                said.append(f"{flag}: there is no group {', '.join(without)} to change here")
        return said

    @hookimpl(wrapper=True)
    def prepare_process(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Give options to every group that is created from now on."""
        from mindspeed_tp.group_options import hccl_options

        if session.platform.dry_run:
            # Its groups have no communicators.
            return (yield)
        session.groups.choose_options(hccl_options(buffer_sizes(args), expansion_modes(args)))
        return (yield)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Refuse names of groups that nobody created, before anything is built."""
        from mindspeed_tp.group_options import check_names

        given = {_SIZES: dict(args.hccl_group_buffer or ()), _MODE: expansion_modes(args)}
        check_names(session, given)
        return (yield)
