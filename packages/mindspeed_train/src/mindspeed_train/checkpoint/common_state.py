"""The state that all ranks hold alike, ``common.pt``: read without unpickling, and checked field by field.

What a run takes from it decides how long it trains, on which samples and at which rate, so that a value of
the wrong type or out of range is refused where the file is read, by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import shown
from mindspeed_megatron.tracker import iteration_of
from mindspeed_train.checkpoint.archive import read_archive
from mindspeed_train.checkpoint.fields import Fields
from mindspeed_train.checkpoint.manifests import MOST_STEPS, Manifest
from mindspeed_train.checkpoint.opened_files import ANOTHER, Part, open_inside, read_json

NAME = "common.pt"
MOST_SAMPLES = 1 << 53
_MOST_RANKS = 1 << 24
_MOST_ENTRIES = 1 << 20
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_SIZES = ("tp", "pp", "cp", "dp", "ep", "vp")
_SHARDINGS = (
    "fully_reshardable",
    "fully_sharded_model_space",
    "fully_sharded_bucket_space",
    "dp_zero_gather_scatter",
    "dp_reshardable",
    "fsdp_dtensor",
)
_DESCRIPTION = {"sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version"}
_STEPS = "num_steps num_iters lr_warmup_steps lr_decay_steps wd_incr_steps wsd_decay_steps".split()
_RATES = "max_lr min_lr init_lr start_lr start_wd end_wd".split()
_NUMBERS = "lr max_lr min_lr initial_lr weight_decay lr_mult wd_mult eps betas momentum".split()
_SWITCHES = (
    "singleton_local_shards",
    "non_homogeneous_layers",
    "chained_optim_avoid_prefix",
    "distrib_optim_fully_reshardable_mem_efficient",
)
_AMONG_SHARDS = (
    "Megatron-LM with megatron-core 0.19 keeps this state among the shards, which is not read here: write it "
    "with core_v0.18 or older, or with mindspeed-train, whose checkpoints both read"
)


def read_common(directory: Path, *, trusted: bool = False) -> dict[str, Any]:
    """Read the common state of a checkpoint.

    Args:
        directory: the checkpoint.
        trusted: take unknown classes as records without behaviour.

    Raises:
        CheckpointError: it cannot be read, or a field is not what it has to be.
    """
    path = directory / NAME
    try:
        with open_inside(directory, NAME) as descriptor:
            whole = Part(descriptor, 0, os.fstat(descriptor).st_size)
            found = read_archive(whole, str(path), trusted=trusted)
    except CheckpointError as error:
        if path.exists() or not (directory / ".metadata").exists():
            raise
        raise CheckpointError(f"{error}; {_AMONG_SHARDS}") from error
    check_common(found, path, iteration_of(directory.name))
    return dict(found)


def check_common(state: Any, path: Path | str, step: int | None = None) -> None:
    """Check the fields of common state that a run takes over.

    Args:
        state: what the file holds.
        path: the file, for messages.
        step: the step in the name of the checkpoint, if it has one.

    Raises:
        CheckpointError: names file, field and value.
    """
    fields = Fields(path, state)
    if fields.has("iteration"):
        iteration = fields.integer("iteration", 0, MOST_STEPS)
        if step is not None and iteration != step:
            fields.refuse("iteration", iteration, f"{step}, as the checkpoint's folder says")
    for name in _COUNTERS:
        if fields.has(name):
            fields.integer(name, 0, MOST_SAMPLES)
    if fields.has("micro_batch_size"):
        fields.integer("micro_batch_size", 1, _MOST_RANKS)
    if fields.has("layout"):
        layout = fields.child("layout")
        for name in layout.content:
            layout.integer(name, 1, _MOST_RANKS)
    if fields.has("content_metadata"):
        described = fields.child("content_metadata")
        if described.has("distrib_optim_sharding_type"):
            described.choice("distrib_optim_sharding_type", _SHARDINGS)
        for name in _SWITCHES:
            if described.has(name):
                described.truth(name)
    if fields.has("features"):
        fields.child("features")
    if fields.has("bad_steps"):
        steps = fields.child("bad_steps")
        steps.integer("in_a_row", 0, MOST_STEPS)
        recent = steps.value("recent")
        if not isinstance(recent, (list, tuple)) or not all(type(each) in (int, float) for each in recent):
            steps.refuse("recent", recent, "a list of numbers")
    if fields.has("opt_param_scheduler"):
        _check_schedule(fields.child("opt_param_scheduler"))
    if fields.has("optimizer"):
        _check_optimizer(_numbered(fields, "optimizer"))
    if fields.has("args"):
        _check_arguments(fields)


def check_agrees(directory: Path, state: Mapping[str, Any], manifest: Manifest) -> None:
    """Compare what common state and manifest both say.

    Raises:
        CheckpointError: they differ.
    """
    said = {"iteration": manifest.iteration, "layout": dict(manifest.layout)}
    for name, value in said.items():
        if value != {} and state.get(name) not in (None, value):
            raise CheckpointError(
                f"{directory / NAME}: {name} is {shown(repr(state[name]), 80)}, and the manifest says "
                f"{shown(repr(value), 80)}; one of them is damaged or forged; {ANOTHER}"
            )


def _check_schedule(fields: Fields) -> None:
    """Check the fields of megatron-core's schedule; one that a feature brings has its own."""
    for name, value in fields.content.items():
        if value is None:
            continue
        if name in ("lr_decay_style", "wd_incr_style", "lr_wsd_decay_style"):
            fields.text(name)
        elif name in _STEPS:
            fields.number(name, 0, float(MOST_SAMPLES))
        elif name in _RATES:
            fields.number(name, -1e9, 1e9)


def _check_optimizer(fields: Fields, depth: int = 0) -> None:
    """Check parameter groups, wherever optimizers in optimizers keep them."""
    if "param_groups" in fields.content:
        groups = fields.value("param_groups")
        if not isinstance(groups, (list, tuple)) or len(groups) > _MOST_ENTRIES:
            fields.refuse("param_groups", groups, "a list of parameter groups")
        for at, group in enumerate(groups):
            _check_group(Fields(fields.path, group, f"{fields.within}.param_groups[{at}]"))
    for name, value in fields.content.items():
        if isinstance(value, Mapping) and depth < 4:
            _check_optimizer(_numbered(fields, name), depth + 1)


def _numbered(fields: Fields, name: str) -> Fields:
    """Return the fields of a field that has numbers as names, as chained optimizers number their parts."""
    content = fields.value(name)
    if isinstance(content, Mapping):
        content = {str(key) if type(key) is int else key: value for key, value in content.items()}
    return Fields(fields.path, content, ".".join(filter(None, (fields.within, name))))


def _check_group(fields: Fields) -> None:
    for name, value in fields.content.items():
        if name in _NUMBERS and value is not None:
            # Some optimizers have one of each, and some as many as they have averages.
            parts = value if isinstance(value, (list, tuple)) and 0 < len(value) <= 16 else [value]
            if not all(map(_is_number, parts)):
                fields.refuse(name, value, "a finite number, or a few of them")
        elif name == "step":
            if not _is_number(value) or not 0 <= float(value) <= MOST_STEPS:
                fields.refuse(name, value, f"a number from 0 to {MOST_STEPS}")
        elif name == "params" and (
            not isinstance(value, (list, tuple)) or not all(type(each) is int for each in value)
        ):
            fields.refuse(name, value, "a list of integers")


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and math.isfinite(float(value))
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_arguments(fields: Fields) -> None:
    """Check what is read of Megatron-LM's arguments, and that counters agree where both name them."""
    content = fields.value("args")
    args = Fields(fields.path, vars(content) if hasattr(content, "__dict__") else content, "args")
    for name in _COUNTERS:
        if args.has(name):
            count = args.integer(name, 0, MOST_SAMPLES)
            if fields.has(name) and fields.content[name] != count:
                args.refuse(name, count, f"{fields.content[name]}, as {name} says")
    for name in args.content:
        if name.endswith("_parallel_size") and args.has(name):
            args.integer(name, 1, _MOST_RANKS)


def check_description(directory: Path) -> None:
    """Check ``metadata.json``, megatron-core's own description of a checkpoint.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    fields = Fields(directory / "metadata.json", read_json(directory, "metadata.json"))
    fields.choice("sharded_backend", ("torch_dist",))
    fields.integer("sharded_backend_version", 0, 1 << 16, 1)
    fields.text("common_backend", "torch")
    fields.integer("common_backend_version", 0, 1 << 16, 1)
    unknown = sorted(fields.content.keys() - _DESCRIPTION)
    if unknown:
        fields.refuse(unknown[0], fields.content[unknown[0]], "left out: megatron-core does not know it")
