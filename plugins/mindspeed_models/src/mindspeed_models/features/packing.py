"""The declaration of packed samples: several a row, each by itself. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_core.feature import Feature, Flag, Proofs, Requirement, Scenario

_FLAG = "--pack-samples"


class PackSamples(Feature):
    """Rows of several samples that do not see one another."""

    name = "pack-samples"
    family = "models"
    summary = "Put several samples of instruction data in a row, by best fit"
    level = 0
    flags: ClassVar[Sequence[Flag]] = (
        Flag(
            _FLAG,
            help="Fill rows of --seq-length with whole samples, which do not see one another.",
            changes_training=True,
        ),
    )
    requires: ClassVar[Sequence[Requirement]] = (
        Requirement(
            feature="instruction-data",
            reason="what is packed are its samples",
            remedy="add --is-instruction-dataset",
        ),
        Requirement(
            any_of=("packed-documents", "context-parallel"),
            reason="nothing else keeps the samples of a row apart without a dense mask",
            remedy="install mindspeed-cp, and leave --reset-attention-mask and --reset-position-ids on",
        ),
    )
    hosts = ("standalone", "megatron-lm")
    docs = "mindspeed_models:docs/pack-samples.md"
    modes = ("train",)
    fake_tensors: ClassVar[bool | None] = False
    deterministic = True
    affects_checkpoint = False
    verify: ClassVar[Sequence[Scenario]] = Proofs(
        "mindspeed_models.features.instruction_proofs:PACKED_PROOFS"
    )

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Begin positions again at each sample, and keep attention within it."""
        if not getattr(args, "pack_samples", False):
            return {}
        return {"reset_attention_mask": True, "reset_position_ids": True}
