"""Loading: choose, check, compare, then fill a template of the current run and hand each owner its part.

Everything that can be wrong is looked for before the first tensor is overwritten, and said in one message
that names the file, the key or the flag.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_core.errors import CheckpointError
from mindspeed_core.run import LoadInfo
from mindspeed_core.terminal.foreign_text import first_line
from mindspeed_megatron import model_record, model_state, optimizer_state
from mindspeed_megatron.brought_choices import check_saved_style
from mindspeed_megatron.feature_state import feature_parts
from mindspeed_megatron.model_comparison import check_model
from mindspeed_megatron.model_record import describe_run, from_arguments, read_record, softmax_size
from mindspeed_megatron.plan_resume import check_plan
from mindspeed_megatron.saved_schedule import check_schedule, group_values, settle_groups
from mindspeed_megatron.sharded_loading import load_shards
from mindspeed_megatron.vocabulary import settle_vocabulary
from mindspeed_train.checkpoint import content as checkpoint_content
from mindspeed_train.checkpoint import megatron_lm as checkpoint_megatron_lm
from mindspeed_train.checkpoint import publish, rng_state
from mindspeed_train.checkpoint import source as checkpoint_source
from mindspeed_train.checkpoint.collective import FAILURES, on_all_ranks, on_first_rank
from mindspeed_train.checkpoint.common_state import check_agrees, check_description, read_common
from mindspeed_train.checkpoint.earlier_results import check_start
from mindspeed_train.checkpoint.index import Index, read_index
from mindspeed_train.checkpoint.load_checks import Contents, first_problem, verify, warn
from mindspeed_train.checkpoint.locate import forget, locate, locate_source
from mindspeed_train.checkpoint.model_arguments import compare_versions
from mindspeed_train.checkpoint.reasons import unwrap_failure
from mindspeed_train.checkpoint.save_folder import own
from mindspeed_train.checkpoint.shard_reader import ShardReader, the_only_reader
from mindspeed_train.checkpoint.store_url import folder_of
from mindspeed_train.data.identity import TrainingData
from mindspeed_train.fault_tolerance.bad_steps import BadSteps

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")
_WITH_BASE = "starting at step 0 with the weights that a feature loaded"


def load(run: Run, source: str | None = None) -> LoadInfo:
    """Load what ``--load`` names, or start from nothing; with a source, its weights alone. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged, unsafe, or does not fit this run.
    """
    if source is not None:
        return _load_found(run, locate_source(run.args, source), source)
    args, located = run.args, locate(run.session, run.args)
    forget(run.session)
    if run.optimizer is not None:
        on_first_rank(
            f"--load {args.load}",
            lambda: check_start(args, located.checkpoint, weights_alone=located.pretrained),
        )
    for note in located.notes:
        # A feature may have loaded a base before.
        started = any(run.session.state(model_state.LoadedWeights).names.values())
        warn(note.replace("starting from scratch", _WITH_BASE) if started else note)
    if located.checkpoint is None:
        return LoadInfo(path=None)
    return _load_found(run, located.checkpoint, weights_alone=located.pretrained)


def prepare_saving(session: Session, args: Namespace, *, will_save: bool) -> None:
    """Refuse a place that cannot be saved into, before the first step, and clear what dead runs left.

    Collective. Rank 0 becomes the owner of the folder, whoever loads the run.

    Raises:
        CheckpointError: another run saves into it, or it cannot be written to.
    """

    def prepare() -> None:
        folder = folder_of(args.save)
        if will_save and folder is not None:
            own(session, folder)
        checkpoint_source.prepare_saving(args.save, will_save=will_save)

    on_first_rank(f"--save {args.save}", prepare)


def _load_found(
    run: Run, found: publish.FoundCheckpoint, source: str | None = None, *, weights_alone: bool = False
) -> LoadInfo:
    for text in filter(None, (found.warning, found.note)):
        warn(text)
    if found.manifest is not None and source is None:
        versions = compare_versions(found.manifest.versions, checkpoint_content.versions(run))
        where = str(found.url or found.path)
        check_plan(run.session, found.manifest.plan, where, versions, resumes=not weights_alone)
    with checkpoint_source.local_copy(run.args, found) as local:
        if local.manifest is not None and not local.url:
            verify(local.path, local.manifest, run.args.verify_checkpoint)
        return _Load(run, local, source, weights_alone).run_all()


class _Load:
    """One checkpoint being loaded into one run."""

    def __init__(
        self, run: Run, found: publish.FoundCheckpoint, source: str | None = None, weights_alone: bool = False
    ) -> None:
        self.run = run
        self.path = found.path
        self.name = found.url or found.path
        self.manifest = found.manifest
        self.source = source
        args = run.args
        self.weights_alone = bool(weights_alone or source is not None or args.finetune)
        training = run.optimizer is not None and not self.weights_alone
        self.with_optimizer = training and not args.no_load_optim
        self.with_rng = training and not args.no_load_rng
        self.doing = f"loading {self.name}"
        # Decided before the first byte is read, and kept where nothing that is loaded can reach.
        self._trusted = args.trust_checkpoint is True

    def run_all(self) -> LoadInfo:
        run = self.run
        try:
            known, state = self._load_state()
        except CheckpointError as error:
            # What a damaged file leads to (a missing tensor, another shape) does not name it.
            if self.manifest is None or run.args.verify_checkpoint == "hash":
                raise
            problem = first_problem(self.path, self.manifest, "hash")
            raise CheckpointError("; ".join(filter(None, (str(error), problem)))) from error
        if self.source is None and not run.args.finetune:
            parts = {name: (state.get("features") or {}).get(name, {}) for name in known}
            restore = partial(run.session.collect, "restore_checkpoint_state", run=run, state=parts)
            # Only its owner knows the form of it, and on another rank it may be another.
            on_all_ranks(self.doing, restore)
        return self._info(state)

    def _load_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load weights, optimizer and random states; return the features' templates and what was loaded."""
        run = self.run
        self.groups = group_values(run.optimizer)
        self.common = self._read_common()
        self.index = self._read_index()
        self._check_model()
        self.contents = Contents(self.run, self.path, self.name, self.manifest, self.index, self.common)
        if self.with_optimizer:
            self.contents.check_optimizer_kind()
        known = self._known_features()
        self.with_rng = self._decide_rng()
        try:
            described = self._described()
            self.weights = model_state.select(run, described, self.source)
            template = checkpoint_content.sharded_state(
                run,
                described,
                self.weights,
                is_loading=True,
                with_optimizer=self.with_optimizer,
                with_rng=self.with_rng,
                features=known,
            )
            if self.with_optimizer:
                held = sorted(self.index.keys)
                template["optimizer"] = optimizer_state.without_absent(
                    run.optimizer, template["optimizer"], held
                )
            on_all_ranks(self.doing, lambda: self.contents.check_shapes(template))
            self.contents.warn_of_unused(template)
            state = on_all_ranks(self.doing, lambda: self._fill(template))
            on_all_ranks(self.doing, lambda: self._apply(state))
        finally:
            if run.optimizer is not None:
                optimizer_state.forget_overrides(run.optimizer)
        return known, state

    def _read_common(self) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            state = read_common(self.path, trusted=self._trusted)
            if not self.weights_alone and "iteration" not in state:
                raise CheckpointError(
                    f"{self.path / 'common.pt'}: says no step to go on at; --finetune takes the weights alone"
                )
            if self.manifest is not None:
                check_agrees(self.path, state, self.manifest)
            return checkpoint_megatron_lm.with_arguments(state)

        return on_all_ranks(self.doing, read)

    def _read_index(self) -> Index:
        # One rank looks at the files for all.
        first = dist.get_rank() == 0

        def read() -> Index:
            if first:
                check_description(self.path)
            return read_index(self.path, trusted=self._trusted, with_files=first)

        index: Index = on_all_ranks(self.doing, read)
        self.reader = ShardReader(self.path, index, trusted=self._trusted)
        # What Megatron-LM keeps to repeat a step is never loaded.
        keys = sorted(key for key in index.objects if not key.startswith("rerun_state_machine"))
        share = keys[dist.get_rank() :: dist.get_world_size()]
        on_all_ranks(self.doing, lambda: self.reader.check_objects(share, _check_object))
        return index

    def _described(self) -> dict[str, Any]:
        saved = self.common.get("content_metadata") or {}
        sharding = saved.get("distrib_optim_sharding_type", "fully_reshardable")
        described = checkpoint_content.layout_metadata(self.run, sharding=sharding)
        if saved.get("non_homogeneous_layers"):
            # Each layer has keys of its own in this file.
            described["non_homogeneous_layers"] = True
        return described

    def _check_model(self) -> None:
        """Compare the model that the weights were trained in with the one that they are to be loaded into."""
        now = describe_run(self.run)
        saved = read_record((self.common.get("features") or {}).get(model_record.KEY), str(self.name))
        if saved is None:
            known = dict(self.manifest.model) if self.manifest is not None else {}
            saved = from_arguments({**vars(self.common.get("args") or Namespace()), **known}, now)
        notes = check_model(
            self.run.session,
            saved,
            now,
            str(self.name),
            resumes=self.run.optimizer is not None and not self.weights_alone,
            # Weights of a source are a base: what is put on top of it is not in there.
            with_facts=self.source is None,
        )
        args = self.run.args
        notes += settle_vocabulary(
            self.run.session,
            self.run.model,
            saved=softmax_size(saved),
            rows=args.padded_vocab_size,
            ids=args.vocab_size,
            where=str(self.name),
        )
        for note in notes:
            warn(note)

    def _known_features(self) -> dict[str, Any]:
        """Return the state of active features that the checkpoint holds too, as a template."""
        if self.source is not None:
            # A source gives weights alone; no feature loses what it has by that.
            return {}
        saved = self._saved_features()
        if self.run.args.finetune:
            if saved:
                warn(f"--finetune: the state of {', '.join(sorted(saved))} in {self.name} is not loaded")
            return {}
        features = feature_parts(self.run)
        for name in features.keys() - saved:
            warn(f"feature {name}: {self.name} holds no state of it; it starts anew")
        return {name: part for name, part in features.items() if name in saved}

    def _saved_features(self) -> set[str]:
        names = set(self.common.get("features") or {}) - {model_record.KEY}
        names.update(key.split(".")[1] for key in self.index.keys if key.startswith("features."))
        if self.manifest is not None:
            names.update(self.manifest.features)
        return names

    def _decide_rng(self) -> bool:
        if not self.with_rng:
            return False
        if not any(key.startswith("rng_state/") for key in self.index.objects):
            warn(f"{self.name}: holds no random states; they continue from the seed")
            return False
        saved = self.common.get("layout") or {}
        if not checkpoint_content.rng_fits(self.run, saved):
            now = checkpoint_content.layout(self.run)
            shown = ", ".join(f"{name} {saved.get(name, 1)} -> {now[name]}" for name in ("tp", "pp", "ep"))
            warn(f"{self.name}: another layout ({shown}); random states are seeded anew, dropout differs")
            return False
        return True

    def _fill(self, template: dict[str, Any]) -> dict[str, Any]:
        try:
            with the_only_reader(self.reader):
                loaded = load_shards(template, self.path, self.common)
        except FAILURES as error:
            verified = self.run.args.verify_checkpoint == "hash"
            hint = "" if verified else "; --verify-checkpoint hash names the file"
            cause = unwrap_failure(error)
            if isinstance(cause, CheckpointError):
                # Its message names the file.
                raise CheckpointError(f"{cause}{hint}") from error
            raise CheckpointError(
                f"{self.path}: a shard cannot be read ({first_line(cause)}){hint}"
            ) from error
        return loaded

    def _apply(self, state: dict[str, Any]) -> None:
        run = self.run
        model_state.load_weights(run, self.weights, state)
        if self.source is None:
            model_state.check_loaded(run, self.weights, str(self.path))
        if run.optimizer is not None:
            if self.with_optimizer:
                optimizer_state.load_state(run.optimizer, state["optimizer"])
            else:
                # Mixed precision keeps its own copy of the parameters.
                run.optimizer.reload_model_params()
        self._apply_schedule(state)
        if self.with_optimizer and "bad_steps" in state:
            run.session.state(BadSteps).restore(state["bad_steps"])
        if self.with_rng:
            loaded = checkpoint_content.own_rng(run, state["rng_state"])
            rng_state.apply(loaded, run.session.platform)
            run.session.state(rng_state.LoadedRng).state = loaded

    def _apply_schedule(self, state: dict[str, Any]) -> None:
        """Go on with the schedule, without the optimizer's state too: it says how far training is."""
        run = self.run
        if run.scheduler is None or self.weights_alone:
            return
        saved = state.get("opt_param_scheduler")
        if saved is None:
            warn(f"{self.name}: holds no schedule; the learning rate starts anew, with its warm-up")
            return
        check_saved_style(run.args, run.scheduler, saved)
        check_schedule(run.scheduler, saved, str(self.name))
        try:
            run.scheduler.load_state_dict(saved)
        except AssertionError as error:
            # One that a feature put in its place may compare more.
            raise CheckpointError(f"{self.path}: the schedule differs from the flags: {error}") from error
        for note in settle_groups(
            run.optimizer, run.scheduler, self.groups, str(self.name), loaded=self.with_optimizer
        ):
            warn(note)

    def _info(self, state: Mapping[str, Any]) -> LoadInfo:
        if self.weights_alone:
            return LoadInfo(path=self.name)
        batch = self.run.session.state(checkpoint_content.LoadedBatch)
        batch.micro_batch_size = state.get("micro_batch_size")
        data = self.run.session.state(TrainingData)
        data.loaded, data.checkpoint = self.manifest.data if self.manifest else {}, str(self.name)
        return LoadInfo(
            path=self.name,
            iteration=int(state["iteration"]),
            consumed_train_samples=int(state.get("consumed_train_samples", 0)),
            consumed_valid_samples=int(state.get("consumed_valid_samples", 0)),
        )


def _check_object(key: str, value: Any, where: str) -> None:
    # An object shard is the list of the objects of its key.
    if key.startswith("rng_state/"):
        for states in value if isinstance(value, list) else [value]:
            rng_state.check(states, where)
