"""Adapters in files: of checkpoints of runs, and in peft directories, both as whole tensors by key.

A key is that of the linear's weight in megatron-core's checkpoints, ``decoder.layers.3.mlp.linear_fc1``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_core.errors import CheckpointError, UserError
from mindspeed_models.lora.options import NAME, A, B
from mindspeed_models.lora.peft_files import CONFIG, WEIGHTS, PeftConfig, config_json, read_config
from mindspeed_models.lora.stored_tensors import StoredTensors

if TYPE_CHECKING:
    from mindspeed_models.recipe import ModelPlan
    from mindspeed_models.weights.table import Entry

_PREFIX = "base_model.model."
_PARTS = {"lora_A": A, "lora_B": B}
_NO_LAYER = -1


@dataclass(frozen=True)
class Pair:
    """The update ``scale · B A`` of one linear.

    Attributes:
        a: ``[r, k]``.
        b: ``[n, r]``.
    """

    a: Tensor
    b: Tensor

    def delta(self, scale: float) -> Tensor:
        """Return the update ``[n, k]`` in float32."""
        return scale * (self.b.float() @ self.a.float())


@dataclass(frozen=True)
class Adapters:
    """All adapters of a model.

    Attributes:
        pairs: by key of the linear.
        scale: factor of every update.
        rank: of the updates, ``--lora-r``.
        alpha: numerator of the factor.
        dropout: of their inputs.
        base: digest of the base; empty where it is not known.
        whole: further weights that were trained, by their key.
        where: the folder, for messages.
    """

    pairs: Mapping[str, Pair]
    scale: float
    rank: int
    alpha: float
    dropout: float = 0.0
    base: str = ""
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    where: str = ""


def read_adapters(folder: Path, step: int | None = None) -> Adapters:
    """Read the adapters of a run's checkpoint: whole tensors, in one process.

    Raises:
        CheckpointError: there is no checkpoint, or it holds no adapters.
    """
    stored = StoredTensors.find(folder, step)
    state = (stored.common.get("features") or {}).get(NAME)
    facts = ((stored.common.get("features") or {}).get("mindspeed_model") or {}).get("facts") or {}
    if not isinstance(state, dict) or not {"lora_r", "lora_alpha"} <= set(facts):
        raise CheckpointError(
            f"{stored.path}: holds no adapters; name the --save folder of a run with adapters"
        )
    pairs: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for key in stored.layer_keys():
        linear, _, part = key.rpartition(".")
        tensor = stored.read(key)
        if part in (A, B):
            pairs.setdefault(linear, {})[part] = tensor
        else:
            whole[key] = tensor
    broken = [linear for linear, parts in pairs.items() if len(parts) != 2]
    if broken:
        raise CheckpointError(
            f"{stored.path}: {broken[0]} has one half of an adapter; load another checkpoint"
        )
    rank, alpha = int(facts["lora_r"]), float(facts["lora_alpha"])
    return Adapters(
        {linear: Pair(parts[A], parts[B]) for linear, parts in pairs.items()},
        alpha / rank,
        rank,
        alpha,
        base=str(state.get("base", "")),
        whole=whole,
        where=str(folder),
    )


def names_of(entries: Mapping[tuple[str, int | None], Entry], key: str) -> Entry:
    """Return the row of the weight table for a linear.

    Raises:
        UserError: the table of the model's family has none.
    """
    entry = entries.get((f"{key}.weight", None))
    if entry is None:
        raise UserError(f"{key}: Hugging Face's files of this family have no such linear")
    return entry


def write_peft(
    adapters: Adapters,
    folder: Path,
    entries: Mapping[tuple[str, int | None], Entry],
    plan: ModelPlan,
    *,
    base: str = "",
    name: str = "default",
) -> tuple[str, ...]:
    """Write a peft directory.

    A fused linear's ``B`` is cut into those of its parts, which share its ``A``.

    Args:
        adapters: with one rank.
        folder: created; a subfolder ``name`` of it, as peft does, unless that is ``default``.
        entries: the weight table of the model.
        plan: of the model.
        base: ``base_model_name_or_path``.
        name: of the adapter.

    Returns:
        ``target_modules``.

    Raises:
        UserError: a linear has no name in Hugging Face's files, or adapters have several ranks.
    """
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    odd = {pair.a.shape[0] for pair in adapters.pairs.values()} - {adapters.rank}
    if odd:
        raise UserError(
            f"{adapters.where}: adapters of rank {', '.join(map(str, sorted(odd)))} beside those of rank "
            f"{adapters.rank}: they were made of several adapters; merge them (mindspeed-models merge-lora)"
        )
    for key, pair in adapters.pairs.items():
        entry = names_of(entries, key)
        for source, part in zip(entry.sources, entry.inverse(pair.b, plan), strict=True):
            module = source.removesuffix(".weight")
            targets.add(module.rpartition(".")[2])
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = pair.a.clone().contiguous()
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = part.contiguous()
    modules: set[str] = set()
    for key, tensor in adapters.whole.items():
        row = entries.get((key, None))
        if row is None or len(row.sources) != 1:
            raise UserError(
                f"{key}: trained beside the adapters, and without a name of its own in peft's format"
            )
        module = row.sources[0].removesuffix(".weight")
        modules.add(module.rpartition(".")[2])
        tensors[f"{_PREFIX}{module}.weight"] = tensor.contiguous()
    target = folder if name == "default" else folder / name
    target.mkdir(parents=True, exist_ok=True)
    config = config_json(
        rank=adapters.rank,
        alpha=adapters.alpha,
        dropout=adapters.dropout,
        targets=tuple(targets),
        base=base,
        modules=tuple(sorted(modules)),
    )
    written = target / f".{WEIGHTS}.part"
    save_file(tensors, written, metadata={"format": "pt"})
    os.replace(written, target / WEIGHTS)
    # Behind the weights: a folder with a configuration is complete.
    part_file = target / f".{CONFIG}.part"
    part_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(part_file, target / CONFIG)
    return tuple(sorted(targets))


def read_peft(
    folder: Path, entries: Mapping[tuple[str, int | None], Entry], plan: ModelPlan
) -> tuple[Adapters, PeftConfig]:
    """Read a peft directory.

    Parts of a fused linear that have different ``A`` become one adapter of their ranks together, whose ``B``
    has each part's columns in that part's rows alone: exactly the same updates.

    Raises:
        UserError: it is damaged, of another model, or holds what is no adapter of this one.
    """
    config = read_config(folder)
    found = _tensors(folder)
    pairs: dict[str, Pair] = {}
    whole: dict[str, Tensor] = {}
    for (weight, expert), entry in entries.items():
        modules = [source.removesuffix(".weight") for source in entry.sources]
        halves = [_pair_of(found, module) for module in modules]
        if any(halves) and expert is None and weight.endswith(".weight"):
            pairs[weight.removesuffix(".weight")] = _joined(entry, halves, plan, folder)
        elif len(modules) == 1 and modules[0] + ".weight" in found:
            whole[weight] = found.pop(modules[0] + ".weight")
    if found:
        raise UserError(
            f"{folder / WEIGHTS}: {len(found)} tensors are of no linear of this model, first "
            f"{min(found)!r}; its base "
            "is another model"
        )
    if not pairs:
        raise UserError(f"{folder / WEIGHTS}: holds no adapter")
    alpha = config.scale * config.rank
    return (
        Adapters(pairs, config.scale, config.rank, alpha, config.dropout, whole=whole, where=str(folder)),
        config,
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a peft directory, without prefix and name of the adapter."""
    path = folder / WEIGHTS
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = key.removeprefix(_PREFIX)
                # Models in memory have the adapter's name between the two: lora_A.default.weight.
                for half in _PARTS:
                    before, mark, behind = name.partition(f".{half}.")
                    if mark:
                        name = f"{before}.{half}.weight" if behind.endswith("weight") else name
                found[name] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return found


def _pair_of(found: dict[str, Tensor], module: str) -> Pair | None:
    a, b = (found.pop(f"{module}.{half}.weight", None) for half in _PARTS)
    if a is None and b is None:
        return None
    if a is None or b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise UserError(f"{module}: lora_A and lora_B are no pair; the file is damaged")
    return Pair(a, b)


def _joined(entry: Entry, halves: Iterable[Pair | None], plan: ModelPlan, folder: Path) -> Pair:
    parts = list(halves)
    there = [part for part in parts if part is not None]
    if len(parts) == 1:
        return there[0]
    shared = len(there) == len(parts) and all(torch.equal(part.a, there[0].a) for part in there)
    if shared:
        return Pair(there[0].a, entry.forward([part.b for part in there], plan))
    rows = _rows_of(entry, there, parts, plan, folder)
    columns = sum(part.a.shape[0] for part in there)
    blocks, at = [], 0
    for part, count in zip(parts, rows, strict=True):
        block = torch.zeros(count, columns, dtype=there[0].b.dtype)
        if part is not None:
            width = part.a.shape[0]
            if part.b.shape[0] != count:
                raise UserError(
                    f"{folder / WEIGHTS}: {entry.sources}: {part.b.shape[0]} rows instead of {count}"
                )
            block[:, at : at + width] = part.b
            at += width
        blocks.append(block)
    return Pair(torch.cat([part.a for part in there]), entry.forward(blocks, plan))


def _rows_of(
    entry: Entry, there: list[Pair], parts: list[Pair | None], plan: ModelPlan, folder: Path
) -> list[int]:
    """Return the rows of each part of a fused linear, some of which have no adapter."""
    if len(parts) == 3:
        heads, groups, size = plan.heads, plan.groups, plan.head_dim
        return [heads * size, groups * size, groups * size]
    return [there[0].b.shape[0]] * len(parts)


def state_for(pairs: Mapping[str, Pair]) -> dict[str, Any]:
    """Return adapters as tensors by their key in checkpoints."""
    return {
        f"{key}.{half}": getattr(pair, half[-1].lower()) for key, pair in pairs.items() for half in (A, B)
    }
