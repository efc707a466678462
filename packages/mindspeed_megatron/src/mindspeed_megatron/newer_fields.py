"""Configuration fields of megatron-cores after that of the suite: which act, and which are no flag.

A field acts (`ACTING`), is no flag (`config_flags.EXCLUDED`), or a host refuses its flag or lets it stand
down. Tests hold the newest recorded megatron-core to it, whichever is installed: no flag is made of a field
before somebody has read what it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from mindspeed_megatron.touch_points.record import index, known_version

CLASSES: Mapping[str, str] = {
    "megatron.core.transformer.MLATransformerConfig": "model",
    "megatron.core.optimizer.OptimizerConfig": "optimizer",
    "megatron.core.distributed.DistributedDataParallelConfig": "data parallelism",
}
"""Classes whose fields become flags, with the word for what they configure."""

NEWER = ">=0.17"
"""Versions whose further fields need a verdict, PEP 440; those of older ones are in the flags' pages."""

ACTING: Mapping[str, str] = {
    "mtp_use_repeated_layer": "megatron-core's prediction layers share the weights of one",
    "moe_router_force_biased": "the router adds a fixed random bias to its logits, for measurements",
    "moe_router_quantile_balancing_ema": "the memory of --moe-router-load-balancing-type quantile_balancing",
    "mlp_chunks_for_training": "the MLP of a layer runs over parts of the sequence, one after the other",
}
"""Newer fields that megatron-core's own layers read, and what they do there."""


@dataclass(frozen=True)
class NewerField:
    """One field that no megatron-core of the suite has.

    Attributes:
        name: its name.
        kind: what its class configures, of `CLASSES`.
        since: the first recorded version that has it.
    """

    name: str
    kind: str
    since: str


def newer_fields() -> Iterator[NewerField]:
    """Yield each field of a recorded megatron-core that older ones lack, in the order of the versions."""
    wanted = SpecifierSet(NEWER)
    seen: dict[str, set[str]] = {name: set() for name in CLASSES}
    for version in dict.fromkeys(index().values()):
        for name, kind in CLASSES.items():
            symbol = known_version(version).symbols.get(name)
            fields = symbol.fields if symbol is not None else ()
            if version in wanted:
                yield from (NewerField(field, kind, version) for field in fields if field not in seen[name])
            seen[name].update(fields)
