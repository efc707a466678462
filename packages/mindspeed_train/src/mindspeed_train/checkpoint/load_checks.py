"""Checks of a checkpoint before a run loads it: files, tensors, shapes, the kind of optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from mindspeed_core.errors import CheckpointError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.plan_resume import plan_change
from mindspeed_train.checkpoint import manifests
from mindspeed_train.checkpoint.index import Index
from mindspeed_train.checkpoint.model_arguments import compare_models, model_arguments

if TYPE_CHECKING:
    from mindspeed_core.run import Run

logger = logging.getLogger("mindspeed_core")


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint, compared with the parts of them that a run wants to load.

    Attributes:
        run: the run that loads it.
        path: the folder of its files.
        name: the folder or the address of it, for messages.
        manifest: None for checkpoints of other programs.
        index: its tensors and objects.
        common: its common state.
    """

    run: Run
    path: Path
    name: Any
    manifest: manifests.Manifest | None
    index: Index
    common: Mapping[str, Any]

    def check_optimizer_kind(self) -> None:
        """Refuse optimizer state that is missing, or that another kind of optimizer wrote."""
        if "optimizer" not in self.common:
            raise CheckpointError(
                f"{self.path}: holds no optimizer state (it was saved with --no-save-optim); --no-load-optim "
                "resumes without, --finetune starts at step 0"
            )
        saved = "distrib_optim_sharding_type" in (self.common.get("content_metadata") or {})
        now = bool(getattr(self.run.args, "use_distributed_optimizer", False))
        if saved != now:
            raise CheckpointError(
                f"{self.path}: was written {'with' if saved else 'without'} --use-distributed-optimizer, "
                f"this run is {'with' if now else 'without'}; use the same, or leave its state with "
                "--no-load-optim"
            )

    def check_shapes(self, template: dict[str, Any]) -> None:
        """Compare keys and shapes of this rank's template with the index."""
        tensors, objects = self.index.tensors, self.index.objects
        for shard in _shards(template):
            if isinstance(shard, ShardedObject):
                if shard.unique_key not in objects:
                    raise CheckpointError(f"{self.path}: holds no object {shard.unique_key!r}{self._why()}")
                continue
            if shard.key not in tensors:
                raise CheckpointError(f"{self.path}: holds no tensor {shard.key!r}{self._why()}")
            saved = tensors[shard.key].shape
            if saved != tuple(shard.global_shape) and not (
                shard.allow_shape_mismatch and self._same_vocabulary()
            ):
                raise CheckpointError(
                    f"{self.path}: tensor {shard.key!r} has shape {list(saved)} in the checkpoint and "
                    f"{list(shard.global_shape)} in this run{self._why()}"
                )

    def warn_of_unused(self, template: dict[str, Any]) -> None:
        """Name tensors that no part of the model takes. Collective."""
        wanted = set().union(
            *all_gather_values({shard.key for shard in _shards(template) if isinstance(shard, ShardedTensor)})
        )
        ignored = ("optimizer.", "features.", "rng_state", "chained_")
        # Converted weights have some tensors under the names of several layer specifications.
        listed = self.common.get("repeated_keys")
        repeated = {key for key in listed if isinstance(key, str)} if isinstance(listed, list) else set()
        unused = sorted(
            key
            for key in self.index.keys
            if key not in wanted | repeated and not key.startswith(ignored) and "_extra_state" not in key
        )
        if unused:
            warn(
                f"{self.name}: {len(unused)} tensors are not part of this model, first {unused[0]!r}"
                f"{self._why()}"
            )

    def _same_vocabulary(self) -> bool:
        """Return whether an embedding may have another number of rows: only the padding differs."""
        if self.manifest is None:
            return True
        return self.manifest.model.get("vocab_size") == model_arguments(self.run.args).get("vocab_size")

    def _why(self) -> str:
        if self.manifest is None:
            return "; compare the model's flags with those it was written with"
        differing = compare_models(self.manifest.model, model_arguments(self.run.args))
        if differing:
            return "; different flags: " + ", ".join(differing)
        change = plan_change(self.run.session, self.manifest.plan)
        if change.breaking or change.harmless:
            return "; different features: " + ", ".join((*change.breaking, *change.harmless))
        return "; the model's flags are the same, so another version or a feature changed the model"


def _shards(template: dict[str, Any]) -> Iterable[Any]:
    prepared, _, _ = load_preprocess(template)
    sharded, _ = extract_sharded_base(prepared)
    return list(nested_values(sharded))


def verify(path: Path, manifest: manifests.Manifest, how: str) -> None:
    """Refuse files that differ from their manifest. Collective."""
    problem = first_problem(path, manifest, how)
    if problem:
        raise CheckpointError(problem)


def first_problem(path: Path, manifest: manifests.Manifest, how: str) -> str:
    """Return the first difference between files and manifest, the same on every rank. Collective."""
    if how == "off":
        return ""
    share = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
    problems = list(manifests.check_files(path, manifest, share, contents=how == "hash"))
    found = [problem for part in all_gather_values(problems) for problem in part]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}; load an earlier checkpoint with --ckpt-step" if found else ""


def warn(text: str) -> None:
    """Warn once for all ranks."""
    if dist.get_rank() == 0:
        logger.warning("%s", text)
