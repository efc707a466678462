"""A whole run of the standalone host: set up, train, validate, save, and end."""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from mindspeed_core.errors import annotate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.kept_graphs import let_go_of_graphs
from mindspeed_train.arguments.run_length import batch_at
from mindspeed_train.checkpoint.save_policy import SavePolicy, last_words
from mindspeed_train.fault_tolerance import hang_watch, stopping
from mindspeed_train.fault_tolerance.replica_check import check_replicas
from mindspeed_train.manual_collection import (
    collect_after_step,
    collected_around_validation,
    collecting_by_hand,
)
from mindspeed_train.monitoring.dry_run_log import STEPS, DryRunLog
from mindspeed_train.monitoring.live import ENDED, FAILED
from mindspeed_train.monitoring.measures import Measures
from mindspeed_train.monitoring.run_log import RunLog, announce, open_run_log
from mindspeed_train.setup import setup, teardown

if TYPE_CHECKING:
    from mindspeed_core.run import Run, StepResult
    from mindspeed_core.session import Session

__all__ = ["setup", "teardown", "train"]

logger = logging.getLogger("mindspeed_core")


def train(session: Session) -> Run:
    """Run a whole training in an open session.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the run after a step, and it is saved; its argument says so.
    """
    started = time.monotonic()
    run: Run | None = None
    log: RunLog | None = None
    failed = True
    with ExitStack() as signals:
        try:
            run = setup(session)
            dry = session.platform.dry_run
            log = DryRunLog(run) if dry else open_run_log(run)
            announce(run, log, time.monotonic() - started)
            session.state(Measures).start(run)
            session.call("start_run", run=run)
            words = partial(last_words, run)
            watched = nullcontext() if dry else hang_watch.watch(run, words)
            signals.enter_context(stopping.listen(run, words))
            with watched, _setup_left_out_of_collections(), collecting_by_hand(run.args):
                if run.args.skip_train:
                    _evaluate(run, log, "valid")
                    _evaluate(run, log, "test")
                else:
                    _loop(run, log)
            run.complete_parameters()
            if isinstance(log, DryRunLog):
                log.end()
            failed = False
        except Exception as error:
            if run is not None and log is not None:
                annotate(error, last_words(run))
            raise
        finally:
            _end(session, run, log, failed)
    interrupted = session.state(stopping.StopControl).agreed_signal == signal.SIGINT
    if interrupted and run.args.exit_signal != "SIGINT":
        raise KeyboardInterrupt("the run ended in order")
    return run


def _loop(run: Run, log: RunLog) -> None:
    session, args = run.session, run.args
    saves = SavePolicy(run, log.say, log.note_save)
    validates = args.eval_iters > 0 or args.full_validation
    evaluated = -1
    stop = ""
    last = args.train_iters
    if session.platform.dry_run:
        last = min(last, run.iteration + STEPS)
    check_replicas(run)
    while run.iteration < last and not stop:
        saves.before_step()
        result = _step(run)
        check_replicas(run)
        collect_after_step(args, run.iteration)
        if run.iteration % args.log_interval == 0 or run.iteration == args.train_iters:
            log.step(session.call("log_step", run=run, result=result))
        if validates and run.iteration % args.eval_interval == 0:
            _evaluate(run, log, "valid")
            evaluated = run.iteration
        stop = saves.after_step(session.call("should_stop", run=run))
    if stop:
        log.say(f"stopping after step {run.iteration}: {stop}")
    elif validates and evaluated != run.iteration:
        _evaluate(run, log, "valid")
    if args.eval_iters and not stop:
        _evaluate(run, log, "test")
    saves.at_end(stop)


def _step(run: Run) -> StepResult:
    samples = batch_at(run.args, run.consumed_train_samples).samples
    with run.session.state(Measures).step(run):
        result: StepResult = run.session.call("train_step", run=run)
    run.iteration += 1
    run.consumed_train_samples += samples
    run.session.state(hang_watch.Progress).count += 1
    return result


def _evaluate(run: Run, log: RunLog, split: str) -> None:
    run.complete_parameters()
    with collected_around_validation(run.args):
        losses = run.session.call("evaluate", run=run, split=split)
    log.validation(run.iteration, losses, split)


IMMORTAL = 5_000
"""More objects than those that live for ever, which since Python 3.12 any collection counts as frozen."""


@contextmanager
def _setup_left_out_of_collections() -> Iterator[None]:
    """Keep what exists before the first step out of garbage collections.

    megatron-core collects everything in each save, and a search through all that its imports made takes
    longer than starting an asynchronous save; objects that no collection visits also stay shared with forked
    writers. Where the imports are left out already, as in workers of a supervisor, they stay so: there is one
    set of frozen objects in a process.
    """
    if gc.get_freeze_count() > IMMORTAL:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _end(session: Session, run: Run | None, log: RunLog | None, failed: bool) -> None:
    try:
        if run is not None and run.data is not None:
            session.call("finish_run", run=run)
    except Exception:
        # What went wrong in the run matters more than what goes wrong while tidying up after it.
        if not failed:
            raise
        logger.exception("finish_run failed")
    finally:
        if log is not None:
            if not failed and run is not None and not session.platform.dry_run:
                log.say(last_words(run))
            log.close(FAILED if failed else ENDED)
        if run is not None:
            let_go_of_graphs(run.model)
        if failed:
            # Ranks that failed do not meet again; what megatron-core keeps would hold model and optimizer.
            destroy_megatron_state()
        else:
            teardown(session)
