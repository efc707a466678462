"""The policy of saving: when a checkpoint is due, and what a failed save does to the run.

A checkpoint is due every ``--save-interval`` steps, before the batch grows, and at the end of the run. A save
fails on all ranks or on none and leaves earlier checkpoints as they were, so with
``--on-save-failure continue`` training goes on without it. The last save is not spared: without it the end of
the run would be lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mindspeed_core.errors import CheckpointError
from mindspeed_train.arguments.run_length import batch_at
from mindspeed_train.checkpoint.save import Saver
from mindspeed_train.fault_tolerance import stopping
from mindspeed_train.launch import last_save
from mindspeed_train.launch.last_save import LastSave

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def last_words(run: Run) -> str:
    """Return the last lines of a run: the steps done, the command to go on, what is saved, and its folder."""
    saved = run.session.state(Saver).published
    if saved is None:
        saved = begun_from(run)
    done, total = run.iteration, run.args.train_iters
    said = f"all {total} steps are done" if done >= total else f"{done} of {total} steps are done"
    arguments = run.session.state(last_save.CommandLine).arguments
    if command := last_save.way_on(arguments, saved, run.run_dir):
        launched = run.dist.world_size > 1 and "--nproc" not in " ".join(arguments)
        on = "train on with more --train-iters" if done >= total else "go on"
        # A command to copy stays in one piece.
        said += f"; {on}{' in the same launcher' if launched else ''} with\n    -> {command}"
    return f"{said}\n{last_save.sentence(saved, run.run_dir)}"


def begun_from(run: Run) -> LastSave | None:
    """Return the checkpoint that a run goes on from; None where it began anew."""
    loaded = run.loaded
    return LastSave(loaded.iteration, str(loaded.path)) if loaded.path and loaded.iteration else None


class SavePolicy:
    """Save a run when a checkpoint is due, and publish what was saved in the background."""

    def __init__(
        self, run: Run, say: Callable[[str], None], note: Callable[[LastSave], None] = lambda _: None
    ) -> None:
        """Start before the first step.

        Args:
            run: what is saved.
            say: prints each save and each failure that is spared.
            note: gets each checkpoint when it is published.
        """
        self._run = run
        self._say = say
        self._note = note
        self._noted: LastSave | None = None
        self._saved = -1
        self._batch = batch_at(run.args, run.consumed_train_samples)

    def before_step(self) -> None:
        """Publish a background save whose writers have finished."""
        with self._spare_failures():
            self._poll()

    def after_step(self, stop: str) -> str:
        """Save when a checkpoint is due after the step that has just ended.

        Returns why the run ends after this step: ``stop``, or where that is empty what came up while saving.
        """
        run = self._run
        every = run.args.save_interval
        earlier, self._batch = self._batch, batch_at(run.args, run.consumed_train_samples)
        if not run.args.save:
            return stop
        if every and run.iteration % every == 0:
            self._save_if_possible("interval")
            # A signal that came while saving ends the run here, not a step and a save later.
            stop = stop or run.session.call("should_stop", run=run)
        if self._batch != earlier and self._saved != run.iteration and not stop:
            # As Megatron-LM does it: the last state of each batch size is kept.
            self._save_if_possible("rampup")
        return stop

    def at_end(self, stop: str) -> None:
        """Save the last step unless it is saved already, and wait for a background save.

        Raises:
            CheckpointError: the last step is not saved.
        """
        if self._run.args.save and self._saved != self._run.iteration:
            self._finish_earlier_save()
            self._save(stopping.save_reason(self._run.session, stop))
        self._poll(blocking=True)

    def _save_if_possible(self, reason: str) -> None:
        self._finish_earlier_save()
        with self._spare_failures():
            self._save(reason)

    def _finish_earlier_save(self) -> None:
        # What became of the save before this one is its own matter.
        with self._spare_failures():
            self._poll(blocking=True)

    def _save(self, reason: str) -> None:
        run = self._run
        run.complete_parameters()
        info = run.session.call("save_checkpoint", run=run, reason=reason)
        self._say(f"saved {info.path}")
        self._saved = run.iteration
        self._note_published()

    def _poll(self, *, blocking: bool = False) -> None:
        self._run.session.state(Saver).poll(blocking=blocking)
        self._note_published()

    def _note_published(self) -> None:
        published = self._run.session.state(Saver).published
        if published is not None and published != self._noted:
            self._noted = published
            self._note(published)

    @contextmanager
    def _spare_failures(self) -> Iterator[None]:
        """Report a failed save instead of raising, with ``--on-save-failure continue``."""
        try:
            yield
        except CheckpointError as error:
            if self._run.args.on_save_failure != "continue":
                raise
            self._say(f"not saved after step {self._run.iteration}, training goes on: {error}")
