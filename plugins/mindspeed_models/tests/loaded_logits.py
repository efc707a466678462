"""Logits of models that are loaded from folders, in one world for many layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BASE = (
    *("--seq-length", "16", "--micro-batch-size", "2", "--train-iters", "1", "--lr", "1e-3"),
    *("--mock-data", "--num-workers", "0", "--eval-iters", "0", "--transformer-impl", "local"),
    *("--make-vocab-size-divisible-by", "16"),
)


def logits_of(cases: list[tuple[str, list[str]]], load: bool = True) -> list[Any]:
    """Load each folder with its flags; return logits where the last stage is, else None, or a message.

    Without ``load`` the flags say what is loaded, and the folder only has the reference.
    """
    found = []
    for folder, flags in cases:
        reference = torch.load(Path(folder) / "reference.pt")
        given = ["--load", folder] if load else []
        found.append(_logits([*BASE, *given, *flags], reference["ids"]))
    return found


def _logits(flags: list[str], ids: torch.Tensor) -> torch.Tensor | str | None:
    from mindspeed_core.activation import prepare
    from mindspeed_core.errors import UserError
    from mindspeed_train.loop import setup, teardown

    try:
        session = prepare(flags, host="standalone")
    except UserError as error:
        return str(error)
    with session:
        try:
            run = setup(session)
            return forward(run, ids)
        except UserError as error:
            return str(error)
        finally:
            teardown(session)


def predictions_of(cases: list[tuple[str, list[str]]]) -> list[Any]:
    """Load each folder with its flags, as `logits_of`; return what the last stage computes, else None.

    It is the logits, those of the module that predicts further on, and on one rank the loss of that module as
    it is reported, else None.
    """
    from mindspeed_core.activation import prepare
    from mindspeed_train.loop import setup, teardown

    found = []
    for folder, flags in cases:
        reference = torch.load(Path(folder) / "reference.pt")
        with prepare([*BASE, "--load", folder, *flags], host="standalone") as session:
            run = setup(session)
            found.append(_predictions(run, reference["ids"], reference["labels"]))
            teardown(session)
    return found


@torch.no_grad()
def _predictions(
    run: Any, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float | None] | None:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from mindspeed_megatron.unwrap import unwrap

    model = unwrap(run.model[0])
    products: list[torch.Tensor] = []
    head = getattr(model, "output_layer", None)
    if head is not None:
        # The loss is computed in the same memory.
        head.register_forward_hook(lambda layer, given, output: products.append(output[0].clone()))
    # A model that predicts further on computes nothing without labels.
    labelled = {"labels": labels, "loss_mask": torch.ones(labels.shape)}
    if forward(run, ids, **labelled) is None:
        return None
    whole = [gather_from_tensor_model_parallel_region(each).transpose(0, 1) for each in products]
    further, logits = (each[..., : run.args.vocab_size].clone() for each in whole)
    loss = None
    if dist.get_world_size() == 1:
        model.train()
        positions = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
        MTPLossLoggingHelper.tracker.clear()
        model(ids, positions, None, **labelled)
        loss = float(MTPLossLoggingHelper.tracker["values"][0])
    return logits, further, loss


@torch.no_grad()
def forward(run: Any, ids: torch.Tensor, **labelled: torch.Tensor) -> torch.Tensor | None:
    """Run one batch through the pipeline; return the whole logits on the last stage, or losses of labels."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from mindspeed_megatron.unwrap import unwrap

    model = run.model[0]
    model.eval()
    positions = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
    group = run.pg.pp
    if group.rank() > 0:
        parts = run.pg.tp.size() if run.args.sequence_parallel else 1
        hidden = torch.empty(ids.shape[1] // parts, ids.shape[0], run.config.hidden_size)
        dist.recv(hidden, group_src=group.rank() - 1, group=group)
        unwrap(model).set_input_tensor(hidden)
    output = model(ids, positions, None, **labelled)
    if group.rank() < group.size() - 1:
        dist.send(output.contiguous(), group_dst=group.rank() + 1, group=group)
        return None
    if labelled:
        return output
    logits = gather_from_tensor_model_parallel_region(output)
    return logits[..., : run.args.vocab_size].clone()


def plainly_loaded(source: str, converted: str) -> tuple[list[str], list[str]]:
    """Load a converted checkpoint as Megatron-LM does; return weights that differ from the files', and notes.

    The notes are what a run says that begins with the files.
    """
    import logging

    from megatron.core import dist_checkpointing

    from mindspeed_core.activation import prepare
    from mindspeed_megatron.unwrap import unwrap
    from mindspeed_train.loop import setup, teardown

    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("mindspeed_core").addHandler(Kept())
    with prepare([*BASE, "--load", source], host="standalone") as session:
        run = setup(session)
        model = unwrap(run.model[0])
        expected = {name: each.detach().clone() for name, each in model.named_parameters()}
        said.append(f"iteration {run.iteration}, loaded {run.loaded.path}")
        path = Path(converted) / "release"
        metadata = dist_checkpointing.load_content_metadata(str(path))
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        loaded = dist_checkpointing.load(state, str(path))["model"]
        common = dist_checkpointing.load_common_state_dict(str(path))
        said.append(f"checkpoint version {common['checkpoint_version']}, layers {common['args'].num_layers}")
        wrong = [name for name, each in expected.items() if not torch.equal(loaded[name].detach(), each)]
        teardown(session)
    return wrong, said


def started_twice(folder: str, saved: str) -> list[str]:
    """Save after a step of a run that began with a folder; begin again in three ways."""
    from mindspeed_core.activation import prepare
    from mindspeed_core.errors import UserError
    from mindspeed_train.loop import setup, teardown

    found = []
    for flags in (
        ["--load", folder, "--save", saved],
        ["--load", folder, "--save", saved],
        ["--pretrained-checkpoint", folder, "--load", saved, "--save", saved],
        ["--load", folder, "--save", saved, "--start-over"],
    ):
        session = prepare([*BASE, "--train-iters", "3", "--bf16", *flags], host="standalone")
        with session:
            try:
                run = setup(session)
                found.append(f"{run.iteration} {run.loaded.path}")
                if run.iteration == 0 and len(found) == 1:
                    session.call("train_step", run=run)
                    run.iteration += 1
                    run.consumed_train_samples += 2
                    session.call("save_checkpoint", run=run, reason="end")
            except UserError as error:
                found.append(str(error))
            finally:
                teardown(session)
    return found


def losses_of(folder: str, layouts: list[list[str]]) -> list[list[float]]:
    """Train three steps from a folder's weights under each layout; return the losses."""
    from mindspeed_core.activation import prepare
    from mindspeed_train.loop import setup, teardown

    found = []
    for layout in layouts:
        training = ["--global-batch-size", "8", "--train-iters", "3", "--lr-decay-style", "constant"]
        with prepare([*BASE, *training, "--load", folder, *layout], host="standalone") as session:
            run = setup(session)
            losses = []
            for _ in range(3):
                losses.append(float(session.call("train_step", run=run).losses["lm loss"]))
                run.iteration += 1
                run.consumed_train_samples += 8
            found.append(losses)
            teardown(session)
    return found


def undescribed(folder: str) -> tuple[list[str], list[str]]:
    """Return keys of a model that its family's table lacks, and keys of the table that the model lacks."""
    from mindspeed_core.activation import prepare
    from mindspeed_megatron.unwrap import unwrap
    from mindspeed_models.weights.live import METADATA, _sharded, plan_of_folder
    from mindspeed_train.loop import setup, teardown

    with prepare([*BASE, "--model-config", folder], host="standalone") as session:
        run = setup(session)
        state = unwrap(run.model[0]).sharded_state_dict(metadata=dict(METADATA))
        built = {shard.key for name, each in state.items() for shard in _sharded(each)}
        teardown(session)
    recipe, plan = plan_of_folder(folder)
    entries = recipe.entries(plan).values()
    known = {name for entry in entries for name in (entry.key, *entry.also)}
    lacking = [entry.key for entry in entries if not {entry.key, *entry.also} & built]
    return sorted(built - known), sorted(set(lacking))
