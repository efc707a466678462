"""A whole run of the standalone host: every stage in its order, the loop, and the end.

`setup` and the stage calls are usable alone: tests and benchmarks build a run and step it themselves.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_core.errors import DataError, UserError
from mindspeed_core.hosts.standalone.arguments.run_length import batch_at, samples_wanted
from mindspeed_core.hosts.standalone.checkpoint import rng_state, save_failures
from mindspeed_core.hosts.standalone.checkpoint import stages as checkpoint
from mindspeed_core.hosts.standalone.fault_tolerance import hang_watch, stopping
from mindspeed_core.hosts.standalone.monitoring.measures import Measures
from mindspeed_core.hosts.standalone.monitoring.run_log import Watch, read_metrics
from mindspeed_core.hosts.standalone.monitoring.writers import open_writers
from mindspeed_core.hosts.standalone.step import configure_for_training, without_param_gather
from mindspeed_core.megatron.global_state import destroy_megatron_state
from mindspeed_core.run import Run
from mindspeed_core.runtime.rank_check import check_ranks

if TYPE_CHECKING:
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")


def setup(session: Session) -> Run:
    """Run every stage up to the data iterators.

    In mode ``inference`` the run has no optimizer and no data: the model is built and loaded, nothing more.
    """
    args = session.call("validate_arguments_early", args=session.args, plan=session.plan)
    args = session.call("validate_arguments", args=args, plan=session.plan)
    session.args = args
    platform = session.platform
    info = session.call("init_distributed", args=args, platform=platform)
    check_ranks(session, info)
    _check_dtype(session)
    pg = session.call("build_process_groups", args=args, dist_info=info)
    session.call("seed_everything", args=args, pg=pg)
    config = session.call("build_transformer_config", args=args)
    model = session.call("build_model", args=args, config=config, pg=pg)
    session.check_placements()
    run = Run(session=session, args=args, config=config, pg=pg, dist=info, model=model)
    run.boundary = session.call("boundary_schema", args=args, config=config)
    if session.mode == "inference":
        load(run)
        for chunk in run.model:
            chunk.eval()
        return run
    if args.skip_train:
        run.schedule = session.call("get_forward_backward", args=args, config=config)
        load(run)
        build_data(run)
        return run
    ddp_config = session.call("build_ddp_config", args=args)
    run.model = session.call("wrap_ddp", args=args, config=config, ddp_config=ddp_config, model=model, pg=pg)
    optimizer_config = session.call("build_optimizer_config", args=args)
    run.optimizer = session.call(
        "build_optimizer", args=args, optimizer_config=optimizer_config, model=run.model, pg=pg
    )
    run.scheduler = session.call("build_scheduler", args=args, optimizer=run.optimizer)
    configure_for_training(run)
    run.schedule = session.call("get_forward_backward", args=args, config=config, pg=pg)
    load(run)
    build_data(run)
    return run


def load(run: Run) -> None:
    """Load what ``--load`` names and take over where it stopped."""
    info = run.session.call("load_checkpoint", run=run)
    run.iteration = info.iteration
    run.consumed_train_samples = info.consumed_train_samples
    run.consumed_valid_samples = info.consumed_valid_samples
    if info.path is not None:
        run.session.call("after_load_checkpoint", run=run)


def build_data(run: Run) -> None:
    """Build the datasets and set the iterators to where the run stands."""
    session, args = run.session, run.args
    run.datasets = session.call("build_datasets", args=args, num_samples=samples_wanted(args))
    if run.datasets.train is None and not args.skip_train:
        raise DataError(f"--split {args.split}: no sample is left for training")
    run.data = session.call("build_data_iterators", run=run)
    # Building iterators may draw from the generator whose state was just loaded.
    rng_state.restore(run)


def train(session: Session) -> Run:
    """Run a whole training in an open session."""
    started = time.monotonic()
    run: Run | None = None
    watch: Watch | None = None
    failed = True
    try:
        run = setup(session)
        run.run_dir = _shared_run_dir(run)
        watch = Watch(
            run.run_dir if run.dist.rank == 0 else None,
            total=run.args.train_iters,
            start=run.iteration,
            progress=run.args.progress,
            writers=open_writers(run.args, active=run.dist.rank == 0, world_size=run.dist.world_size),
        )
        if run.dist.rank == 0:
            run.history = read_metrics(run.run_dir / "metrics.jsonl")
        _announce(run, watch, time.monotonic() - started)
        run.measures = Measures(run)
        session.call("start_run", run=run)
        with stopping.listening(session), hang_watch.watching(run), _uncollected():
            if run.args.skip_train:
                _evaluate(run, watch, "valid")
                _evaluate(run, watch, "test")
            else:
                _loop(run, watch)
        failed = False
    finally:
        _end(session, run, watch, failed)
    return run


@contextmanager
def _uncollected() -> Iterator[None]:
    """What exists before the first step stays out of garbage collections while the loop runs.

    megatron-core collects everything in each save, and a search through all that its imports made takes
    longer than starting an asynchronous save; what nobody looks at also stays shared with forked writers.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _loop(run: Run, watch: Watch) -> None:
    session, args = run.session, run.args
    # Parameters are complete before the first step, and no gather has been launched yet.
    first_step = ExitStack()
    first_step.enter_context(without_param_gather(run, param_sync=False))
    saved = evaluated = -1
    reason = ""
    validates = args.eval_iters > 0 or args.full_validation
    batch = batch_at(args, run.consumed_train_samples)
    while run.iteration < args.train_iters and not reason:
        with save_failures.tolerated(run, watch.say):
            checkpoint.poll(run)
        result = session.call("train_step", run=run)
        if not result.skipped:
            first_step.close()
        run.iteration += 1
        run.progress += 1
        run.consumed_train_samples += batch.samples
        if run.iteration % args.log_interval == 0 or run.iteration == args.train_iters:
            numbers = session.call("log_step", run=run, result=result)
            watch.step(numbers)
            if run.dist.rank == 0:
                run.history.append(numbers)
        if validates and run.iteration % args.eval_interval == 0:
            _evaluate(run, watch, "valid")
            evaluated = run.iteration
        reason = session.call("should_stop", run=run)
        if args.save and args.save_interval and run.iteration % args.save_interval == 0:
            saved = run.iteration if _save(run, watch, "interval") else saved
            # A signal that came while saving ends the run here, not a step and a save later.
            reason = reason or session.call("should_stop", run=run)
        earlier, batch = batch, batch_at(args, run.consumed_train_samples)
        if args.save and batch != earlier and saved != run.iteration and not reason:
            # As Megatron-LM does it: the last state of each batch size is kept.
            saved = run.iteration if _save(run, watch, "rampup") else saved
    if reason:
        watch.say(f"stopping after step {run.iteration}: {reason}")
    if validates and evaluated != run.iteration and not reason:
        _evaluate(run, watch, "valid")
    if args.eval_iters and not reason:
        _evaluate(run, watch, "test")
    if args.save and saved != run.iteration:
        _save(run, watch, stopping.save_reason(session, reason))
    checkpoint.poll(run, blocking=True)


def _evaluate(run: Run, watch: Watch, split: str) -> None:
    losses = run.session.call("evaluate", run=run, split=split)
    watch.validation(run.iteration, losses, split)
    if run.dist.rank == 0 and "lm loss" in losses:
        key = "validation_loss" if split == "valid" else "test_loss"
        run.history.append({"step": run.iteration, key: losses["lm loss"]})


def _save(run: Run, watch: Watch, reason: str) -> bool:
    with save_failures.tolerated(run, watch.say):
        # What became of the save before this one is its own matter.
        checkpoint.poll(run, blocking=True)
    with save_failures.tolerated(run, watch.say, reason):
        with without_param_gather(run, param_sync=True):
            info = run.session.call("save_checkpoint", run=run, reason=reason)
        watch.say(f"saved {info.path}")
        return True
    return False


def _check_dtype(session: Session) -> None:
    dtype: torch.dtype = session.args.params_dtype
    if dtype not in session.platform.supported_dtypes():
        raise UserError(
            f"platform {session.platform.name} does not train in {dtype}; drop --bf16 or choose another"
        )


def _shared_run_dir(run: Run) -> Path:
    """The run's folder, named by rank 0 so that all ranks have the same."""
    chosen: list[Any] = [run.args.run_dir]
    if run.dist.rank == 0:
        folder = Path(chosen[0] or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--run-dir {folder}: cannot be created: {error.strerror}") from error
        chosen = [str(folder)]
    if run.dist.world_size > 1:
        dist.broadcast_object_list(chosen, src=0, device=run.dist.device)
    return Path(chosen[0])


def _announce(run: Run, watch: Watch, seconds: float) -> None:
    args, plan = run.args, run.session.plan
    parameters = sum(parameter.numel() for chunk in run.model for parameter in chunk.parameters())
    sizes = {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "dp": args.data_parallel_size,
    }
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items())
    watch.say(
        f"{run.session.platform.name} | world {run.dist.world_size} = {layout} | "
        f"{parameters:,} parameters on rank 0 | features: {', '.join(plan.names) or 'none'}"
    )
    watch.say(run.session.provenance.get("platform", ""))
    for held in plan.held_back:
        watch.say(f"held back: {held.name}: {held.reason}")
    start = f"from step {run.iteration}" if run.iteration else "from scratch"
    if args.skip_train:
        watch.say(f"validating {start}, set up in {seconds:.1f} s, files in {run.run_dir}")
        return
    watch.say(
        f"training {start} to step {args.train_iters}, set up in {seconds:.1f} s, files in {run.run_dir}"
    )


def _end(session: Session, run: Run | None, watch: Watch | None, failed: bool) -> None:
    try:
        if run is not None and run.data is not None:
            session.call("finish_run", run=run)
    except Exception:
        # What went wrong in the run matters more than what goes wrong while tidying up after it.
        if not failed:
            raise
        logger.exception("finish_run failed")
    finally:
        if watch is not None:
            watch.close()
        if not failed:
            teardown(session)


def teardown(session: Session) -> None:
    """Leave the process group and forget what megatron-core keeps in globals."""
    if dist.is_initialized():
        # Destroying without meeting first aborts gloo worlds of four and more.
        dist.barrier()
        session.groups.destroy()
    destroy_megatron_state()
    if dist.is_initialized():
        dist.destroy_process_group()
