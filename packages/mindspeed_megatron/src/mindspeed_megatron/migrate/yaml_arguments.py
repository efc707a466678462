"""The flags of a YAML file of arguments, as Megatron-LM and MindSpeed read with ``--yaml-cfg``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_core.flags.flag_set import FlagSet
from mindspeed_megatron.config_flags import EXCLUDED, dest_of
from mindspeed_megatron.upstream.megatron_lm_flags import megatron_lm_flags
from mindspeed_megatron.upstream.yaml_file import read_mapping


def flags_of_file(path: Path, flag_set: FlagSet) -> list[str]:
    """Return what a file says as one would type it; values that are the defaults are left out.

    Args:
        path: the file; sections are read through, since their names mean nothing.
        flag_set: the flags there are.

    Raises:
        UserError: the file cannot be read, or is no mapping.
    """
    content = read_mapping(path)
    return [word for name, value in _entries(content) for word in _typed(name, value, flag_set)]


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _entries(value)
        elif value is not None:
            yield str(name), value


_DERIVED = frozenset(
    "consumed_train_samples consumed_valid_samples data_parallel_size rank world_size iteration "
    "transformer_pipeline_model_parallel_size model_type nnodes node_rank nproc_per_node".split()
)
"""Further keys of such a file, which Megatron-LM computes from other arguments."""
_ACTIVATIONS = {"swiglu": ["--swiglu"], "squaredrelu": ["--squared-relu"], "gelu": []}


@lru_cache(maxsize=1)
def _defaults() -> Mapping[str, Any]:
    """Return Megatron-LM's default of each argument that it records; such a file holds all of them."""
    found: dict[str, Any] = {}
    for facts in megatron_lm_flags()[1]:
        default = facts.get("default")
        switch = facts["value"] == "switch"
        found.setdefault(facts["dest"], not facts.get("sets") if switch and default is None else default)
    return found


def _typed(name: str, value: Any, flag_set: FlagSet) -> list[str]:
    """Return the words of one argument."""
    dest = name.lstrip("-").replace("-", "_")
    if dest == "activation_func" and value in _ACTIVATIONS:
        return _ACTIVATIONS[value]
    judged = f"--{dest.replace('_', '-')}" in flag_set
    if dest in _DERIVED or (dest in EXCLUDED and not judged and dest not in _defaults()):
        return []
    if dest in _defaults() and _defaults()[dest] == value:
        return []
    entry = next((e for e in flag_set.entries if e.flag.dest in (dest, dest_of(dest))), None)
    option = f"--{dest.replace('_', '-')}"
    if entry is not None and option not in flag_set:
        option = entry.flag.name
    if entry is None or option not in flag_set:
        empty = value is False or value == "" or value == []
        return [] if empty else [option] if value is True else [option, *_words(value)]
    flag = flag_set[option].flag
    if flag.is_switch:
        wanted = bool(flag.inverts) != bool(value)
        return [option] if wanted else []
    return [] if value == flag.default else [option, *_words(value)]


def _words(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]
