"""Set a run up, stage by stage, and leave the process group again.

Usable without the loop: tests and benchmarks build a run and step it themselves.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mindspeed_core.errors import DataError, UserError
from mindspeed_core.run import Run
from mindspeed_megatron.brought_choices import check_optimizer, check_schedule
from mindspeed_megatron.built_model import settle_model
from mindspeed_megatron.data_source import data_source
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.model_state import LoadedWeights, is_chosen
from mindspeed_megatron.rank_check import check_ranks
from mindspeed_megatron.token_losses import pass_token_losses
from mindspeed_megatron.vocabulary import Vocabulary, keep_vocabulary
from mindspeed_train.arguments.run_length import samples_wanted
from mindspeed_train.arguments.sizes import check_weights_fit, exhausted
from mindspeed_train.checkpoint import rng_state
from mindspeed_train.checkpoint.content import LoadedBatch, layout_metadata
from mindspeed_train.checkpoint.load import prepare_saving
from mindspeed_train.checkpoint.locate import saved_vocabulary
from mindspeed_train.checkpoint.saved_state import select_saved
from mindspeed_train.data.open_iterators import OpenIterators
from mindspeed_train.step import configure_for_training
from mindspeed_train.text.stages import BuiltTokenizer

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def setup(session: Session) -> Run:
    """Run every stage up to the data iterators.

    In mode ``inference`` the run has no optimizer and no data: the model is built and loaded, nothing more.
    """
    run = _build_model(session)
    args = run.args
    if session.mode == "inference":
        _load(run)
        for chunk in run.model:
            chunk.eval()
        return run
    if not args.skip_train:
        _build_optimizer(run)
    run.schedule = session.call("get_forward_backward", args=args, config=run.config, pg=run.pg, run=run)
    _load(run)
    if args.save and run.optimizer is not None and is_chosen(run) and not session.platform.dry_run:
        # What cannot be saved is said before the first step.
        select_saved(run, layout_metadata(run))
    _build_data(run)
    return run


def _build_model(session: Session) -> Run:
    args = session.call("validate_arguments_early", args=session.args, plan=session.plan)
    args = session.call("validate_arguments", args=args, plan=session.plan)
    session.args = args
    info = session.call("init_distributed", args=args, platform=session.platform)
    check_ranks(session, info)
    _check_dtype(session)
    # Not before: asked for its memory, an accelerator that no rank has chosen yet is the first one.
    check_weights_fit(session, args)
    pg = session.call("build_process_groups", args=args, dist_info=info)
    session.call("seed_everything", args=args, pg=pg)
    if args.save and not session.platform.dry_run:
        # A run that is just ending may publish another checkpoint until this one owns the folder.
        will_save = session.mode != "inference" and not args.skip_train
        prepare_saving(session, args, will_save=will_save)
    kept = _keep_vocabulary(session, args)
    config = session.call("build_transformer_config", args=args)
    try:
        model = session.call("build_model", args=args, config=config, pg=pg)
    except (MemoryError, RuntimeError) as error:
        explained = exhausted(session, args, error)
        if explained is None:
            raise
        raise explained from error
    if kept is not None:
        keep_vocabulary(session, model, kept)
    session.check_placements()
    settle_model(session, model, config)
    run = Run(session=session, args=args, config=config, pg=pg, dist=info, model=model)
    pass_token_losses(run, model)
    run.tokenizer = session.state(BuiltTokenizer).tokenizer
    run.boundary = session.call("boundary_schema", args=args, config=config)
    return run


def _keep_vocabulary(session: Session, args: Namespace) -> int | None:
    """Give the model at least the rows of the checkpoint that is going to be loaded.

    Returns:
        How many of them take part in the softmax, None for all.
    """
    session.state(Vocabulary).kept = None
    saved = None if session.platform.dry_run else saved_vocabulary(session, args)
    if saved is None or saved < args.vocab_size:
        return None
    if saved > args.padded_vocab_size:
        size = args.tensor_model_parallel_size
        args.padded_vocab_size = -(-saved // size) * size
    return saved if saved < args.padded_vocab_size else None


def _build_optimizer(run: Run) -> None:
    session, args, pg = run.session, run.args, run.pg
    ddp_config = session.call("build_ddp_config", args=args)
    run.model = session.call(
        "wrap_ddp", args=args, config=run.config, ddp_config=ddp_config, model=run.model, pg=pg
    )
    optimizer_config = session.call("build_optimizer_config", args=args)
    run.optimizer = session.call(
        "build_optimizer", args=args, optimizer_config=optimizer_config, model=run.model, pg=pg
    )
    check_optimizer(session, run.optimizer)
    run.scheduler = session.call("build_scheduler", args=args, optimizer=run.optimizer)
    check_schedule(session, run.scheduler)
    configure_for_training(run)


def _load(run: Run) -> None:
    """Load what ``--load`` names and continue where it stopped."""
    loaded = run.session.state(LoadedWeights)
    loaded.names.clear()
    run.session.state(LoadedBatch).micro_batch_size = None
    info = run.loaded = run.session.call("load_checkpoint", run=run, source=None)
    run.iteration = info.iteration
    run.consumed_train_samples = info.consumed_train_samples
    run.consumed_valid_samples = info.consumed_valid_samples
    # A feature may have loaded a base where the run has no checkpoint of its own.
    if info.path is not None or loaded.names:
        run.session.call("after_load_checkpoint", run=run)


def _build_data(run: Run) -> None:
    """Build the datasets and set the iterators to where the run stands."""
    session, args = run.session, run.args
    run.datasets = session.call("build_datasets", args=args, num_samples=samples_wanted(args))
    if run.datasets.train is None and not args.skip_train:
        source = data_source(session)
        if source:
            raise DataError(f"{source}: gives no training data; return Datasets(train=...)")
        raise DataError(f"--split {args.split}: no sample is left for training")
    run.data = session.call("build_data_iterators", run=run)
    # Building iterators may draw from the generator whose state was just loaded.
    rng_state.restore(run)


def _check_dtype(session: Session) -> None:
    dtype: torch.dtype = session.args.params_dtype
    if dtype not in session.platform.supported_dtypes():
        raise UserError(
            f"platform {session.platform.name} does not train in {dtype}; drop --bf16 or choose another"
        )


def teardown(session: Session) -> None:
    """End loading, leave the process group and clear megatron-core's global state."""
    session.state(OpenIterators).end()
    if dist.is_initialized():
        # Destroying without meeting first aborts gloo worlds of four and more.
        dist.barrier()
        session.groups.destroy()
    destroy_megatron_state()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Cycles of an earlier run's modules keep its groups, whose threads would slow the next run.
    gc.collect()
