"""Names of the linears that adapters are put beside: the seed's, megatron-core's and Hugging Face's.

megatron-core fuses linears that others keep apart: one adapter beside ``linear_qkv`` adapts queries, keys and
values together, one beside ``linear_fc1`` gate and up projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

SPECIFIED: Final = ("qkv", "proj", "fc1", "fc2", "q_proj", "q_up_proj", "kv_up_proj")
"""Roles of linears that a layer specification places."""
COMPRESSING: Final = ("q_down_proj", "kv_down_proj")
"""Those of latent attention, which builds them of megatron-core's own classes alone: adapted once built."""
OUTPUT: Final = "output_layer"
"""The output layer, which megatron-core builds without a specification."""
ROLES: Final = (*SPECIFIED, *COMPRESSING, OUTPUT)

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "linear_qkv": ("qkv",),
    "query_key_value": ("qkv",),
    "W_pack": ("qkv",),
    "q_proj": ("qkv", "q_proj"),
    "k_proj": ("qkv",),
    "v_proj": ("qkv",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_down_proj",),
    "q_a_proj": ("q_down_proj",),
    "linear_kv_down_proj": ("kv_down_proj",),
    "kv_a_proj_with_mqa": ("kv_down_proj",),
    "linear_q_up_proj": ("q_up_proj",),
    "q_b_proj": ("q_up_proj",),
    "linear_kv_up_proj": ("kv_up_proj",),
    "kv_b_proj": ("kv_up_proj",),
    "linear_proj": ("proj",),
    "dense": ("proj",),
    "o_proj": ("proj",),
    "linear_fc1": ("fc1",),
    "gate_proj": ("fc1",),
    "up_proj": ("fc1",),
    "dense_h_to_4h": ("fc1",),
    "proj": ("fc1",),
    "linear_fc2": ("fc2",),
    "dense_4h_to_h": ("fc2",),
    "down_proj": ("fc2",),
    "output_layer": (OUTPUT,),
    "lm_head": (OUTPUT,),
}
_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("word_embeddings", "embedding", "embed_tokens"),
        "an embedding is a table, not a linear; train it whole with --lora-modules-to-save word_embeddings",
    ),
    **dict.fromkeys(
        ("router", "gate"), "a router is not adapted; name linears of attention (linear_qkv, linear_proj)"
    ),
}
_MODULES: Final[Mapping[str, str]] = {
    "embedding": "word_embeddings",
    "word_embeddings": "word_embeddings",
    "embed_tokens": "word_embeddings",
    "output_layer": OUTPUT,
    "lm_head": OUTPUT,
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "pre_mlp_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "final_layernorm": "final_layernorm",
    "norm": "final_layernorm",
    "q_layernorm": "q_layernorm",
    "k_layernorm": "k_layernorm",
    "kv_layernorm": "kv_layernorm",
    "router": "router",
}
"""Modules that can be trained whole, by every name of theirs: a part of the path of their parameters."""


def roles_of(names: Sequence[str], *, latent: bool = False) -> tuple[str, ...]:
    """Return the roles of the linears that names stand for, in a fixed order.

    Args:
        names: as given.
        latent: the attention is multi-latent, which has no ``qkv``.

    Raises:
        ValueError: one sentence on each name that means nothing, or nothing that can be adapted.
    """
    found: set[str] = set()
    problems: list[str] = []
    absent = {"qkv"} if latent else {"q_proj", "q_up_proj", "kv_up_proj", *COMPRESSING}
    for name in names:
        if name in _REFUSED:
            problems.append(f"{name}: {_REFUSED[name]}")
        elif name not in _NAMES:
            problems.append(f"{name}: no linear has this name; {_nearest(name, _NAMES)}")
        elif absent.issuperset(_NAMES[name]):
            kind = "latent attention" if latent else "attention that is not latent"
            there = "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj" if latent else "linear_qkv"
            problems.append(f"{name}: {kind} has no such linear; its linears are {there} and linear_proj")
        else:
            found.update(_NAMES[name])
    if problems:
        raise ValueError("; ".join(problems))
    found -= absent
    return tuple(role for role in ROLES if role in found)


def lacking(roles: Iterable[str], *, low_rank: bool) -> str:
    """Return the first linear of latent attention that a model does not have; empty where it has them all.

    Args:
        roles: of `roles_of`, for latent attention.
        low_rank: queries are compressed (``--q-lora-rank``).
    """
    absent = {"q_proj"} if low_rank else {"q_down_proj", "q_up_proj"}
    return next((f"linear_{role}" for role in roles if role in absent), "")


def modules_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return parts of parameter paths that names of whole modules stand for.

    Raises:
        ValueError: one sentence on each name that means nothing.
    """
    problems = [
        f"{name}: no module has this name; {_nearest(name, _MODULES)}"
        for name in names
        if name not in _MODULES
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(dict.fromkeys(_MODULES[name] for name in names))


def fused(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return which of the given names are parts of a fused linear, by megatron-core's name of it."""
    parts = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_fc1": ("gate_proj", "up_proj")}
    given = set(names)
    return {
        whole: tuple(part for part in some if part in given)
        for whole, some in parts.items()
        if 0 < len(given.intersection(some)) < len(some)
    }


def _nearest(name: str, candidates: Mapping[str, Any]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, candidates, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"names are {', '.join(candidates)}"
