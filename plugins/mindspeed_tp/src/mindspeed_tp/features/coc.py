"""The declarations of products in parts (CoC), of fused products (MC2), and of their common spelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs
from mindspeed_tp.coc_config import ALLOWED_PARTS, CoCConfigError, unknown_shapes
from mindspeed_tp.coc_config import FLAG as CONFIG
from mindspeed_tp.features.core import PLANNED
from mindspeed_tp.features.formulas import DENSE
from mindspeed_tp.options import AUTO, COC, IN_PARTS, MC2, ORIGINAL, REWRITTEN, coc_mode

_COC, _MC2, _TYPE = "--use-ascend-coc", "--use-ascend-mc2", "--comm-overlap-type"
_MODE, _PARTS, _KERNEL = "--coc-mode", "--coc-parallel-num", "--coc-fused-kernel"
_USEFUL_PARTS = 2
"""Parts where nobody says how many: MindSpeed's default of 1 would be no parts at all."""
_ONE_RANK = "there is no communication to hide with --tensor-model-parallel-size 1"
TRANSFORMER_ENGINE = Conflict(
    flag="--tp-comm-overlap",
    reason="it overlaps the same communication in TransformerEngine's linears; keep one of the two",
)


OVERLAP_TYPE = Flag(
    _TYPE,
    type=str,
    default="default",
    choices=("default", "mc2", "coc_kernel", "coc"),
    help=f"coc is {_COC}, coc_kernel adds {_KERNEL}, mc2 is {_MC2}.",
)
"""Of both features that it asks for."""


def overlap_presets(args: Any) -> Mapping[str, Any]:
    """Return the flags that a value of ``--comm-overlap-type`` stands for."""
    chosen = getattr(args, "comm_overlap_type", "default")
    names = {"coc": ("use_ascend_coc",), "coc_kernel": ("use_ascend_coc", "coc_fused_kernel")}
    return dict.fromkeys(names.get(chosen, ("use_ascend_mc2",) if chosen == "mc2" else ()), True)


class ChunkedProducts(Feature):
    """Products in parts: the communication of one part beside the product of another."""

    name = COC
    family = "tp"
    summary = "Overlap tensor-parallel communication with GEMMs in chunks (CoC)"
    stability = "prototype"
    flags = (
        Flag(_COC, help="Overlap tensor-parallel communication with chunked GEMMs."),
        Flag(
            _MODE,
            type=int,
            default=AUTO,
            choices=(AUTO, ORIGINAL, REWRITTEN, IN_PARTS),
            help="0: megatron-core's linear layers; 1: planned without overlap; 2: chunked; -1: automatic.",
        ),
        Flag(
            _PARTS,
            type=int,
            default=1,
            choices=ALLOWED_PARTS,
            help=f"Chunks of a GEMM's rows; with {_COC} {_USEFUL_PARTS} by default.",
        ),
        Flag(_KERNEL, help="Use a kernel that fuses GEMM and communication where the device has one."),
        Flag(
            CONFIG,
            type=str,
            per_rank=True,
            metavar="FILE",
            help="JSON file with the number of chunks by GEMM shape, {'[m, k, n]': 4}.",
        ),
        OVERLAP_TYPE,
    )
    requires = (PLANNED,)
    conflicts = (
        Conflict(feature=MC2, reason="both execute the same products; keep one of the two"),
        TRANSFORMER_ENGINE,
    )
    slots = ("tp-executor",)
    docs = "mindspeed_tp:docs/coc.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {"bytes_sent": DENSE}
    tuning = {_COC: (False, True), _PARTS: ALLOWED_PARTS}
    verify = Proofs("mindspeed_tp.features.proofs:COC_PROOFS")

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return what ``--comm-overlap-type`` stands for, and parts where products are cut into some."""
        found = dict(overlap_presets(args))
        asked = getattr(args, "use_ascend_coc", False) or found.get("use_ascend_coc", False)
        whole = getattr(args, "coc_mode", AUTO) not in (AUTO, IN_PARTS)
        fused = getattr(args, "coc_fused_kernel", False) or found.get("coc_fused_kernel", False)
        if asked and not whole and not fused and getattr(args, "coc_config", None) is None:
            found["coc_parallel_num"] = _USEFUL_PARTS
        return found

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether products in parts are asked for."""
        return bool(getattr(args, "use_ascend_coc", False))

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return why products are those of megatron-core's own linears."""
        if args.coc_fused_kernel or coc_mode(args) != ORIGINAL:
            return ""
        if args.coc_mode == ORIGINAL:
            return f"{_MODE} {ORIGINAL} asks for megatron-core's linears; {_MODE} {IN_PARTS} works in parts"
        return f"{_PARTS} 1 leaves products whole; use 2, 4 or 8"

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a file that cannot be used, and shapes that no product of the model has."""
        path = args.coc_config
        if path is None:
            return ()
        try:
            unknown = unknown_shapes(path, args)
        except CoCConfigError as error:
            return (f"{CONFIG} {path} {error}",)
        if not unknown:
            return ()
        return (
            f"{CONFIG} {path} names {', '.join(unknown)}, which no product of this model has; m are the rows "
            "of all ranks, k is the summed width, n the width of a rank's result: mend or drop the entry",
        )

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say what a kernel's absence means."""
        alone = args.tensor_model_parallel_size == 1
        if args.coc_fused_kernel and getattr(args, "platform", "") != "npu" and not alone:
            return (f"{_KERNEL}: this device has no such kernel, rows are worked on in 4 parts",)
        return ()

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return what one rank, a kernel or whole products leave without effect."""
        if args.tensor_model_parallel_size == 1:
            return dict.fromkeys((_COC, _MODE, _PARTS, _KERNEL, CONFIG, _TYPE), _ONE_RANK)
        if args.coc_fused_kernel:
            return dict.fromkeys((_MODE, _PARTS, CONFIG), f"{_KERNEL} decides how products are computed")
        if coc_mode(args) == REWRITTEN:
            return dict.fromkeys((_PARTS, CONFIG), f"{_MODE} {REWRITTEN} leaves products whole")
        return {}


class FusedProducts(Feature):
    """Product and communication in one kernel."""

    name = MC2
    family = "tp"
    summary = "Fuse tensor-parallel GEMMs and communication in one NPU kernel (MC2)"
    stability = "prototype"
    flags = (Flag(_MC2, help="Fuse GEMM and communication in one NPU kernel."), OVERLAP_TYPE)
    requires = (PLANNED,)
    conflicts = (TRANSFORMER_ENGINE,)
    slots = ("tp-executor",)
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_tp:docs/mc2.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {"bytes_sent": DENSE}
    tuning = {_MC2: (False, True)}
    verify = Proofs("mindspeed_tp.features.proofs:MC2_PROOFS")

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say where there is no kernel."""
        if args.tensor_model_parallel_size == 1 or getattr(args, "platform", "") == "npu":
            return ()
        return ("this device has no kernel that communicates: products and collectives take turns",)

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return that one rank has nothing to hide."""
        alone = args.tensor_model_parallel_size == 1
        return dict.fromkeys((_MC2, _TYPE), _ONE_RANK) if alone else {}
