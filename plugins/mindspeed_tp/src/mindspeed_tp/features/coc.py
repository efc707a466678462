"""The declarations of products in parts (CoC), of fused products (MC2), and of their common spelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag
from mindspeed_tp.coc_config import ALLOWED_PARTS, CoCConfigError, unknown_shapes
from mindspeed_tp.coc_config import FLAG as CONFIG
from mindspeed_tp.features.core import PLANNED
from mindspeed_tp.features.formulas import DENSE
from mindspeed_tp.features.proofs import COC_PROOFS, MC2_PROOFS
from mindspeed_tp.options import AUTO, COC, IN_PARTS, MC2, ORIGINAL, REWRITTEN, coc_mode

_COC, _MC2, _TYPE = "--use-ascend-coc", "--use-ascend-mc2", "--comm-overlap-type"
_ONE_RANK = "changes nothing with --tensor-model-parallel-size 1: there is no communication to hide"
TRANSFORMER_ENGINE = Conflict(
    flag="--tp-comm-overlap",
    reason="it overlaps the same communication in TransformerEngine's linears; keep one of the two",
)


def overlap_presets(args: Any) -> Mapping[str, Any]:
    """Return the flags that a value of ``--comm-overlap-type`` stands for."""
    chosen = getattr(args, "comm_overlap_type", "default")
    names = {"coc": ("use_ascend_coc",), "coc_kernel": ("use_ascend_coc", "coc_fused_kernel")}
    return dict.fromkeys(names.get(chosen, ("use_ascend_mc2",) if chosen == "mc2" else ()), True)


class ChunkedProducts(Feature):
    """Products in parts: the communication of one part beside the product of another."""

    name = COC
    family = "tp"
    summary = (
        "Products of tensor parallelism in parts, the communication of one beside the product of another"
    )
    stability = "prototype"
    flags = (
        Flag(_COC, help="Hide communication of tensor parallelism behind products in parts."),
        Flag(
            "--coc-mode",
            type=int,
            default=AUTO,
            choices=(AUTO, ORIGINAL, REWRITTEN, IN_PARTS),
            help="0: megatron-core's linears; 1: planned linears without overlap; 2: in parts; -1 chooses.",
        ),
        Flag(
            "--coc-parallel-num",
            type=int,
            default=1,
            choices=ALLOWED_PARTS,
            help="In how many parts the rows of a product are worked on.",
        ),
        Flag("--coc-fused-kernel", help="Let a kernel multiply and communicate where the device has one."),
        Flag(
            CONFIG,
            type=str,
            per_rank=True,
            metavar="FILE",
            help="JSON file with a number of parts for shapes of products, {'[m, k, n]': 4}.",
        ),
        Flag(
            _TYPE,
            type=str,
            default="default",
            choices=("default", "mc2", "coc_kernel", "coc"),
            help=f"coc is {_COC}, coc_kernel adds --coc-fused-kernel, mc2 is {_MC2}.",
        ),
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
    tuning = {_COC: (False, True), "--coc-parallel-num": ALLOWED_PARTS}
    verify = COC_PROOFS

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return what ``--comm-overlap-type`` stands for."""
        return overlap_presets(args)

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether products are asked for that megatron-core's own linears do not compute."""
        if not getattr(args, "use_ascend_coc", False):
            return False
        try:
            return args.coc_fused_kernel or coc_mode(args) != ORIGINAL
        except CoCConfigError:
            return True

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
        """Say what changes nothing, and what a kernel's absence means."""
        if args.tensor_model_parallel_size == 1:
            return (f"{_COC} {_ONE_RANK}",)
        if args.coc_fused_kernel and getattr(args, "platform", "") != "npu":
            return ("--coc-fused-kernel: this device has no such kernel, rows are worked on in 4 parts",)
        return ()


class FusedProducts(Feature):
    """Product and communication in one kernel."""

    name = MC2
    family = "tp"
    summary = "Products of tensor parallelism and their communication in one kernel of the NPU"
    stability = "prototype"
    flags = (Flag(_MC2, help="Multiply and communicate in one kernel of the NPU."),)
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
    verify = MC2_PROOFS

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say where there is no kernel, and what it computes without sequence parallelism."""
        said = []
        if args.tensor_model_parallel_size == 1:
            said.append(f"{_MC2} {_ONE_RANK}")
        elif getattr(args, "platform", "") != "npu":
            said.append("this device has no kernel that communicates: products and collectives take turns")
        return said
