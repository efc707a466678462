"""Proofs of compressed tensors: a model trains as without, in fewer bytes."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_memory.features.proofs import (
    EXPERTS,
    FUSED_LLAMA,
    INTERLEAVED,
    OVERLAPPED,
    PP2,
    RING,
    SHARDED,
    TP2,
    as_without,
    fully_sharded,
)

_BF16 = ("--bf16",)
_SMALL = ("--compress-min-elements", "1024")
_ACTIVATION = ("--compress-activation", "0", *_SMALL)
_DENSE = ("--compress-dense", "level0", *_SMALL)
_LEVEL1 = ("--compress-dense", "level1", *_SMALL)
_FEWER = (Gain("forward_bytes", 0.95), Gain("compression ratio", value_at_most=0.8))


def _layouts(flags: tuple[str, ...]) -> tuple[Scenario, ...]:
    return (
        as_without("tp2-sequence-parallel", flags, *_BF16, *TP2, ranks=2, model=FUSED_LLAMA),
        as_without("pp2", flags, *_BF16, *PP2, ranks=2, model=FUSED_LLAMA),
        as_without("interleaved", flags, *_BF16, *INTERLEAVED, ranks=2, model=FUSED_LLAMA),
        as_without(
            "dp2-overlapped",
            flags,
            *(*_BF16, *OVERLAPPED),
            ranks=2,
            model=FUSED_LLAMA,
            baseline=(*_BF16, *SHARDED),
        ),
        as_without("cp2-ring", flags, *_BF16, *RING, ranks=2, model=FUSED_LLAMA),
        *fully_sharded(flags, *_BF16, model=FUSED_LLAMA),
        # In 16 bits another number of ranks rounds otherwise.
        Scenario(
            "resume",
            flags=(*FUSED_LLAMA, *_BF16, *OVERLAPPED, *flags),
            world_size=2,
            tolerance=0.0,
            resume=Resume(flags=(*FUSED_LLAMA, *_BF16, *SHARDED), world_size=2, with_feature=False),
        ),
    )


ACTIVATION_PROOFS = (
    as_without("all-layers", _ACTIVATION, *_BF16, model=FUSED_LLAMA, gains=_FEWER),
    as_without("gelu", _ACTIVATION, *_BF16),
    as_without("some-layers", ("--compress-activation", "1-2,4", *_SMALL), *_BF16, model=FUSED_LLAMA),
    *_layouts(_ACTIVATION),
    as_without("experts", _ACTIVATION, *_BF16, model=EXPERTS),
)
DENSE_PROOFS = (
    as_without("level0", _DENSE, *_BF16, model=FUSED_LLAMA, gains=_FEWER),
    as_without(
        "level1",
        _LEVEL1,
        *_BF16,
        model=FUSED_LLAMA,
        gains=(
            Gain("forward_bytes", 0.9),
            Gain("compression ratio", value_at_most=0.3),
            Gain("host_buffers", exactly=0),
        ),
    ),
    as_without("gelu", _DENSE, *_BF16, gains=(Gain("forward_bytes", 0.97),)),
    *_layouts(_LEVEL1),
)
