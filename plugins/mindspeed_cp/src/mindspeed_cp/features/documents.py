"""The declaration of documents that do not see one another in whole sequences. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_core.feature import Proofs
from mindspeed_cp import attention_flags
from mindspeed_cp.checked_flag import problems
from mindspeed_cp.features.context_parallel import ContextParallel
from mindspeed_cp.mask_flags import DOCUMENT_FLAGS


class PackedDocuments(ContextParallel):
    """Documents of a whole sequence apart, without a mask for every two tokens."""

    name = "packed-documents"
    summary = "Keep attention within packed documents without a dense mask"
    flags = DOCUMENT_FLAGS
    slots = ("core-attention",)
    conflicts = ()
    # Where documents end decides which blocks are computed.
    fake_tensors = False
    tuning: ClassVar[Mapping[str, Sequence[Any]]] = {}
    docs = "mindspeed_cp:docs/packed-documents.md"
    verify = Proofs("mindspeed_cp.features.document_proofs:WHOLE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether documents of whole sequences are kept apart without a dense mask."""
        if getattr(args, "context_parallel_size", 1) > 1 or ContextParallel.enabled(args):
            return False
        if getattr(args, "create_attention_mask_in_dataloader", False):
            return False
        return bool(args.reset_attention_mask or args.fix_sub_seq_length != -1)

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Change nothing: a dense mask that was asked for keeps documents apart too."""
        return {}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Return which documents would not be kept apart, and what attention is not computed here."""
        return [*problems(DOCUMENT_FLAGS, args), *attention_flags.problems(args)]
