"""Names of the modules of a layer whose saved tensors can be swapped; no torch."""

from __future__ import annotations

MODULES = {
    "input_norm": "input_layernorm",
    "self_attention": "self_attention",
    "post_attention_norm": "pre_mlp_layernorm",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "pre_mlp_layernorm",
    "mlp": "mlp",
}
"""Attribute of the layer by name: those of MindSpeed, and megatron-core's own."""


def modules_of(text: str) -> list[str]:
    """Return the names in a list ``"input_norm,self_attention"``, each attribute once.

    Raises:
        ValueError: a name is none; the message says which there are.
    """
    found: dict[str, str] = {}
    for name in filter(None, map(str.strip, text.split(","))):
        if name not in MODULES:
            raise ValueError(f"{name!r} is no module of a layer; there are {', '.join(MODULES)}")
        found.setdefault(MODULES[name], name)
    if not found:
        raise ValueError(f"names no module; there are {', '.join(MODULES)}")
    return list(found.values())


def models_of(text: str) -> dict[str, int]:
    """Return numbers of layers by sub-model, from a list ``"decoder,4;vision_model,2"``.

    Raises:
        ValueError: a part is no pair of name and number, or names a sub-model twice.
    """
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, _, number = (piece.strip() for piece in part.partition(","))
        if not name or not number.isdecimal():
            raise ValueError(f"{part!r} is no name and number of layers; write decoder,4;vision_model,2")
        if name in found:
            raise ValueError(f"{name} is named twice")
        found[name] = int(number)
    if not found:
        raise ValueError("names no sub-model; write decoder,4")
    return found
