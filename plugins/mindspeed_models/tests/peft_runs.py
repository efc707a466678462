"""Adapters of a tiny Hugging Face model in a world: logits with adapters of peft, and adapters for peft."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.unwrap import unwrap
from mindspeed_train import loop

BATCH = (
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--seq-length", "16", "--mock-data"),
    *("--num-workers", "0", "--eval-iters", "0", "--lr", "1e-2", "--lr-decay-style", "constant"),
    *("--train-iters", "4", "--attention-dropout", "0", "--hidden-dropout", "0", "--use-cpu-initialization"),
    *("--make-vocab-size-divisible-by", "1"),
)
TARGETS = tuple("--lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())


@contextmanager
def course(*flags: str):
    """Set a run up, and tear it down behind."""
    try:
        with activate([*BATCH, *flags], platform="cpu", host="standalone") as session:
            yield loop.setup(session)
    finally:
        destroy_megatron_state()


def logits(run: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits ``[b, s, v]`` of one pipeline stage; the model is left as it was."""
    (chunk,) = run.model
    chunk.eval()
    with torch.no_grad():
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        found = unwrap(chunk)(ids, positions, None)
        if run.pg.tp.size() > 1:
            found = gather_from_tensor_model_parallel_region(found, group=run.pg.tp)
    chunk.train()
    return found


def from_peft(
    base: str, adapters: dict[str, str], ids: torch.Tensor, *layout: str
) -> dict[str, torch.Tensor]:
    """Logits with the adapters of each directory."""
    found = {}
    for name, folder in adapters.items():
        with course("--load", base, "--lora-load", folder, *TARGETS, *layout) as run:
            found[name] = logits(run, ids)
    return found


def to_peft(base: str, folder: str, ids: torch.Tensor, *layout: str) -> dict[str, Any]:
    """Train adapters and save them; the logits with them, and those of the merged model."""
    from mindspeed_models.program import main

    flags = ("--load", base, *TARGETS, "--lora-r", "4", "--lora-alpha", "8", *layout)
    with course(*flags, "--save", f"{folder}/adapter") as run:
        for _ in range(2):
            run.session.call("train_step", run=run)
            run.iteration += 1
            run.consumed_train_samples += 2
        run.complete_parameters()
        found = {"trained": logits(run, ids)}
        run.session.call("save_checkpoint", run=run, reason="end")
    if dist.get_rank() == 0:
        adapter = ("--lora-load", f"{folder}/adapter")
        found["export"] = main(["export-lora", *adapter, "--model-config", base, "--save", f"{folder}/peft"])
        found["merge"] = main(["merge-lora", "--load", base, *adapter, "--save", f"{folder}/merged"])
    dist.barrier()
    return found


def merged_checkpoint(folder: Path, *flags: str) -> dict[str, Any]:
    """Logits of adapters beside a checkpoint, and of the checkpoint they are merged into."""
    from mindspeed_models.program import main

    ids = torch.arange(16).reshape(1, 16)
    base, adapter = f"{folder}/base", f"{folder}/adapter"
    with course(*flags, "--save", base) as run:
        run.session.call("save_checkpoint", run=run, reason="end")
    with course(*flags, "--load", base, *TARGETS, "--lora-r", "4", "--save", adapter) as run:
        run.session.call("train_step", run=run)
        run.iteration += 1
        run.complete_parameters()
        found = {"beside": logits(run, ids)}
        run.session.call("save_checkpoint", run=run, reason="end")
    found["said"] = main(["merge-lora", "--load", base, "--lora-load", adapter, "--save", f"{folder}/merged"])
    with course(*flags, "--finetune", "--load", f"{folder}/merged") as run:
        found["merged"] = logits(run, ids)
    return found
