"""Keys of the state that modules of megatron-core save beside their tensors (``_extra_state``).

Loading asks for each of them. Those of layers with and without TransformerEngine are written, so that either
kind finds its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mindspeed_models.weights.table import Entry

_LINEAR = ("linear_", "eh_proj")
_ATTENTION = ".self_attention.linear_proj"


def state_keys(entries: Iterable[Entry]) -> list[str]:
    """Return the keys of a model with these tensors, as megatron-core spells objects with their place."""
    given = list(entries)
    count = 1 + max((each.expert for each in given if each.expert is not None), default=0)
    keys = {"output_layer._extra_state/shard_0_1": None}
    for entry in given:
        for module in _modules(entry.key):
            place = "0_1" if entry.expert is None else f"{entry.expert}_{count}"
            keys[f"{module}._extra_state/shard_{place}"] = None
    return list(keys)


def _modules(key: str) -> Iterator[str]:
    module, _, kind = key.rpartition(".")
    name = module.rpartition(".")[2]
    if kind != "weight" or not name.startswith(_LINEAR):
        return
    yield module
    if module.endswith(_ATTENTION):
        yield module.removesuffix("linear_proj") + "core_attention"
