"""Defaults of flags that name kernels which cannot be imported: changed where the user gave no value.

Megatron-LM's defaults expect TransformerEngine, Apex and its own CUDA extensions. Each value here is the one
that a message of Megatron-LM would ask for a moment later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.broken_packages import why_unusable

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform


@dataclass(frozen=True)
class Default:
    """Another default.

    Attributes:
        dest: the argument.
        value: its value.
        flag: how one would have typed it.
        missing: packages; the default holds where none of them is installed.
    """

    dest: str
    value: Any
    flag: str
    missing: tuple[str, ...]


TE_AND_APEX = ("transformer_engine", "apex")
"""Without either, megatron-core uses torch's own norms and optimizers."""
DEFAULTS = (
    Default("transformer_impl", "local", "--transformer-impl local", ("transformer_engine",)),
    Default("no_persist_layer_norm", True, "--no-persist-layer-norm", TE_AND_APEX),
    Default("apply_rope_fusion", False, "--no-rope-fusion", TE_AND_APEX),
    Default(
        "gradient_accumulation_fusion",
        False,
        "--no-gradient-accumulation-fusion",
        ("fused_weight_gradient_mlp_cuda",),
    ),
    Default(
        "masked_softmax_fusion",
        False,
        "--no-masked-softmax-fusion",
        ("scaled_upper_triang_masked_softmax_cuda",),
    ),
)


def installed(names: Iterable[str]) -> bool:
    """Return whether one of these packages can be imported; imports those that are there."""
    return any(not why_unusable(name) for name in names)


def apply_defaults(args: Any, provenance: Mapping[str, str], platform: type[Platform]) -> list[str]:
    """Change the arguments that were not given, and return the flags that stand for what was changed."""
    changed: list[str] = []
    rules = [rule for rule in DEFAULTS if not installed(rule.missing)]
    if "cuda" not in platform.kinds():
        backend = platform.backend
        rules.append(Default("distributed_backend", backend, f"--distributed-backend {backend}", ()))
    for rule in rules:
        given = provenance.get(rule.dest, "default") != "default"
        if given or not hasattr(args, rule.dest) or getattr(args, rule.dest) == rule.value:
            continue
        setattr(args, rule.dest, rule.value)
        changed.append(rule.flag)
    return changed
