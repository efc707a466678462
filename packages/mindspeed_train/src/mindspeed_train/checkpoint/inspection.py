"""``mindspeed-train inspect CHECKPOINT``: show the content, origin and health of a checkpoint.

Needs no process group, no model and no device. Nothing is unpickled, and tensors are only read with
``--values``.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import emit, first_line, shown
from mindspeed_megatron.tables import print_table
from mindspeed_megatron.tracker import directory_name
from mindspeed_train.checkpoint import manifests, publish
from mindspeed_train.checkpoint.inspected_store import local_copy_for_inspection
from mindspeed_train.checkpoint.source import where_files_are
from mindspeed_train.checkpoint.store_url import is_url

if TYPE_CHECKING:
    import torch

    from mindspeed_train.checkpoint.index import Index

_BATCH_BYTES = 256 << 20


def inspect(
    path: Path | str, *, step: int | None = None, verify: str = "hash", values: bool = False
) -> dict[str, Any]:
    """Describe a checkpoint.

    Args:
        path: a folder of checkpoints, or the directory of one; or the URL of either.
        step: this step instead of the latest; only with a folder.
        verify: ``hash`` reads every file, ``size`` compares sizes, ``off`` looks at nothing.
        values: also read every tensor and look for elements that are not finite.

    Returns:
        Plain values, ready for JSON: ``path``, ``iteration``, ``written_by``, ``manifest``, ``files``,
        ``tensors``, ``parts``, ``objects``, ``common`` and ``problems``.

    Raises:
        CheckpointError: there is no checkpoint, or its index cannot be read.
    """
    if isinstance(path, str) and is_url(path):
        with local_copy_for_inspection(path, step, whole=values or verify == "hash") as (copy, named):
            found: dict[str, Any] = named(inspect(copy, verify=verify, values=values))
            return found
    from mindspeed_train.checkpoint.index import check_places, read_index

    chosen, listed, warning = _choose(Path(path), step)
    directory, manifest = where_files_are(chosen, listed)
    problems = [warning] if warning else []
    problems += _verify(directory, manifest, verify)
    index = read_index(directory, with_files=False)
    try:
        check_places(directory, index)
    except CheckpointError as error:
        problems += [] if problems else [str(error)]
    tensors = list(_tensors(index))
    parts: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        part = parts.setdefault(tensor["part"], {"tensors": 0, "elements": 0, "bytes": 0})
        part["tensors"] += 1
        part["elements"] += math.prod(tensor["shape"])
        part["bytes"] += tensor["bytes"]
    common = _read_common(directory, problems)
    if values:
        problems += _bad_values(directory, index)
    return {
        "path": str(directory),
        "iteration": manifest.iteration if manifest is not None else common.get("iteration"),
        "written_by": "mindspeed-core" if manifest is not None else "another program (no manifest)",
        "manifest": None if manifest is None else _described(manifest),
        "files": {file.name: file.stat().st_size for file in sorted(directory.iterdir()) if file.is_file()},
        "verified": verify if manifest is not None else "off",
        "values_read": values,
        "parts": parts,
        "tensors": tensors,
        "objects": sorted(index.objects),
        "common": common,
        "problems": problems,
    }


def _choose(path: Path, step: int | None) -> tuple[Path, manifests.Manifest | None, str]:
    if any((path / name).is_file() for name in (".metadata", "index.json", manifests.MANIFEST)):
        manifest = manifests.read_manifest(path) if (path / manifests.MANIFEST).is_file() else None
        return path, manifest, ""
    if not path.is_dir():
        raise CheckpointError(f"{path}: is no directory")
    found = publish.find(path, step, accept_unpublished=True)
    if found is None:
        raise CheckpointError(f"{path}: holds no checkpoint (no {directory_name(0)[:5]}… directory)")
    return found.path, found.manifest, found.warning


def _verify(directory: Path, manifest: manifests.Manifest | None, how: str) -> list[str]:
    if manifest is None or how == "off":
        return []
    problems = list(
        manifests.check_files(directory, manifest, sorted(manifest.files), contents=how == "hash")
    )
    known = {*manifest.files, manifests.MANIFEST}
    extra = sorted(file.name for file in directory.iterdir() if file.name not in known)
    return problems + [f"{directory / name}: not in the manifest" for name in extra]


def _tensors(index: Index) -> Iterator[dict[str, Any]]:
    for key, entry in sorted(index.tensors.items()):
        yield {
            "key": key,
            "part": part_of(key),
            "shape": list(entry.shape),
            "dtype": entry.dtype,
            "bytes": entry.bytes,
            "shards": len(entry.chunks),
        }


def part_of(key: str) -> str:
    """Return the part of a checkpoint that a key belongs to: a feature, the optimizer, or the model."""
    if key.startswith("features."):
        return f"feature {key.split('.')[1]}"
    return "optimizer" if key.startswith(("optimizer.", "chained_")) else "model"


def _read_common(directory: Path, problems: list[str]) -> dict[str, Any]:
    from mindspeed_train.checkpoint.common_state import read_common

    try:
        state = read_common(directory)
    except CheckpointError as error:
        problems.append(str(error))
        return {}
    keys = ("iteration", "checkpoint_version", "consumed_train_samples", "consumed_valid_samples", "layout")
    found = {key: state[key] for key in keys if isinstance(state.get(key), (int, float, dict))}
    for key in ("opt_param_scheduler", "content_metadata"):
        if isinstance(state.get(key), Mapping):
            found[key] = {str(k): v for k, v in state[key].items() if isinstance(v, (bool, int, float, str))}
    args = state.get("args")
    if args is not None and hasattr(args, "__dict__"):
        plain = {k: v for k, v in sorted(vars(args).items()) if isinstance(v, (bool, int, float, str))}
        found["args"] = plain
    return found


def _described(manifest: manifests.Manifest) -> dict[str, Any]:
    plan = manifest.plan
    return {
        "features": [
            f"{feature['name']} {feature.get('version', '')}".strip()
            for feature in plan.get("features") or ()
        ],
        "plan": dict(plan),
        "versions": dict(manifest.versions),
        "layout": dict(manifest.layout),
        "model": dict(manifest.model),
        "feature_state": list(manifest.features),
        "job": manifest.job,
        "bytes": sum(size for size, _ in manifest.files.values()),
    }


def _bad_values(directory: Path, index: Index) -> list[str]:
    """Read tensors in groups that fit into memory and name those with elements that are not finite."""
    import torch
    from torch.distributed import checkpoint as dcp

    from mindspeed_train.checkpoint.shard_reader import ShardReader

    problems: list[str] = []
    group: dict[str, Any] = {}
    held = 0
    reader = ShardReader(directory, index)
    entries = sorted(index.tensors.items())
    for number, (key, entry) in enumerate(entries):
        group[key] = torch.empty(entry.shape, dtype=entry.torch_dtype)
        held += entry.bytes
        if held < _BATCH_BYTES and number + 1 < len(entries):
            continue
        try:
            with warnings.catch_warnings():
                # That there is no process group is the intention.
                warnings.simplefilter("ignore")
                dcp.load(group, storage_reader=reader, no_dist=True)
        except Exception as error:
            problems.append(
                f"{directory}: tensors from {shown(min(group))} on cannot be read ({first_line(error)})"
            )
        else:
            problems += [
                problem for name, value in group.items() if (problem := _bad(directory, name, value))
            ]
        group, held = {}, 0
    return problems


def _bad(directory: Path, name: str, value: torch.Tensor) -> str:
    if not value.is_floating_point():
        return ""
    bad = int((~value.float().isfinite()).sum())
    return f"{directory}: {shown(name)} holds {bad} elements that are not finite" if bad else ""


@click.command("inspect")
@click.argument("checkpoint")
@click.option("--step", type=int, help="This step instead of the latest.")
@click.option(
    "--verify",
    type=click.Choice(["hash", "size", "off"]),
    default="hash",
    show_default=True,
    help="How files are compared with the manifest.",
)
@click.option("--values", is_flag=True, help="Read every tensor and look for elements that are not finite.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def command(
    checkpoint: str, step: int | None, verify: str, values: bool, tensors: bool, as_json: bool
) -> int:
    """Show what CHECKPOINT (a --save folder, one iter_… directory, or a URL) holds, and its health."""
    found = inspect(checkpoint, step=step, verify=verify, values=values)
    if as_json:
        emit(json.dumps(found, indent=1, default=str))
    else:
        _print(found, tensors)
    return 1 if found["problems"] else 0


def _print(found: Mapping[str, Any], tensors: bool) -> None:
    emit(f"{found['path']}: step {found['iteration']}, written by {found['written_by']}")
    manifest = found["manifest"]
    if manifest is not None:
        emit(f"features: {', '.join(manifest['features']) or 'none'}")
        emit(f"plan: digest {manifest['plan'].get('digest', 'unknown')}")
        emit("versions: " + ", ".join(f"{name} {v}" for name, v in manifest["versions"].items()))
        emit("layout: " + ", ".join(f"{name} {size}" for name, size in manifest["layout"].items()))
        emit("model: " + ", ".join(f"{name} {value}" for name, value in manifest["model"].items()))
    samples = found["common"].get("consumed_train_samples")
    if samples is not None:
        emit(f"samples trained on: {samples:,}")
    rows = [
        (name, part["tensors"], f"{part['elements']:,}", _size(part["bytes"]))
        for name, part in found["parts"].items()
    ]
    print_table(("part", "tensors", "elements", "size"), rows)
    emit(f"files: {len(found['files'])}, {_size(sum(found['files'].values()))}")
    if tensors:
        shown = [
            (tensor["key"], "x".join(map(str, tensor["shape"])), tensor["dtype"], _size(tensor["bytes"]))
            for tensor in found["tensors"]
        ]
        print_table(("tensor", "shape", "dtype", "size"), shown)
    for problem in found["problems"]:
        emit(f"problem: {problem}")
    if not found["problems"]:
        how = {
            "hash": "all files unchanged",
            "size": "all files have their size",
            "off": "files not compared",
        }
        checked = how[found["verified"]] + (", all values finite" if found["values_read"] else "")
        emit(f"health: {checked}")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
