"""A session as functions for a training loop of your own, each usable without the others.

Every function passes one thing of the caller's (a configuration, a specification, an optimizer, a batch)
through the active features and returns what became of it. The session prints nothing, seeds nothing and
reads no command line.
"""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from mindspeed_core.run import Batch, ChunkPlace, StepResult
from mindspeed_megatron.brought_choices import check_optimizer, check_schedule
from mindspeed_megatron.hosts.library.adapters import (
    LossAdapter,
    StepAdapter,
    UpdateAdapter,
    batch_of,
    mapping_of,
    sizes_of,
)
from mindspeed_megatron.hosts.library.loaded_schedule import LoadedSchedule
from mindspeed_megatron.hosts.library.world import ORIGIN, ConfigOrigin, EmbeddedSession
from mindspeed_megatron.unwrap import chunks_of

if TYPE_CHECKING:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


logger = logging.getLogger("mindspeed_core")
Config = TypeVar("Config")
Optimizer = TypeVar("Optimizer")
Scheduler = TypeVar("Scheduler")
Chunks = TypeVar("Chunks")


class LibrarySession(EmbeddedSession):
    """One plan inside the caller's program; `mindspeed_core.activate` makes it."""

    def config(self, config: Config) -> Config:
        """Copy a model configuration, with what features need changed in it.

        Args:
            config: a ``TransformerConfig`` or a subclass of it; left as it is.

        Returns:
            A configuration of the same class. One that this session (or one with the same plan) returned
            comes back unchanged.

        Raises:
            mindspeed_core.resolver.plan.PlanError: an active feature does not go with this configuration.
            SessionError: another session made it.
        """
        if self._made_here(config):
            return config
        self._check(config)
        self.build_groups()
        facts = self._facts(config)
        args, changed = self._validate(facts)
        given = (config, dict(vars(args)), changed | self.feature_arguments)
        made: Config = self._through("build_transformer_config", given, args=args)
        setattr(made, ORIGIN, ConfigOrigin(self.plan.digest, facts))
        return made

    def places(self, config: TransformerConfig | None = None) -> tuple[ChunkPlace, ...]:
        """Return where in the model the chunks of this rank are, in the order in which to build them.

        A `ChunkPlace` has what a model is built with: ``vp_stage``, ``pre_process``, ``post_process``.

        Args:
            config: the model's; by default that of the trained model.
        """
        from mindspeed_megatron.chunk_places import places_of_rank

        args = self._arguments(config if config is not None else self.run.config)
        return places_of_rank(self, args, self.run.pg)

    def layer_spec(
        self,
        config: TransformerConfig,
        base: ModuleSpec | TransformerBlockSubmodules | None = None,
        vp_stage: int | None = None,
    ) -> TransformerBlockSubmodules:
        """Return the module specification of one model chunk, for ``GPTModel(transformer_layer_spec=...)``.

        Args:
            config: what `config` returned; the caller's own where no active feature changes configurations.
            base: specification of a layer or of a whole chunk; by default megatron-core's GPT layers with
                parts that work without TransformerEngine.
            vp_stage: virtual pipeline stage of the chunk, None without interleaving.

        Raises:
            SessionError: the configuration lacks what features change.
        """
        from mindspeed_megatron.chunk_places import place_of_chunk
        from mindspeed_megatron.expert_check import remember_placed

        self._check_config(config, "layer_spec")
        args = self._arguments(config)
        place = place_of_chunk(self, args, self.run.pg, vp_stage)
        made = self._through(
            "build_layer_spec", base, args=args, config=config, vp_stage=vp_stage, place=place
        )
        remember_placed(self, made)
        return made

    def model(self, model: Chunks) -> Chunks:
        """Let features change a built model in place, and check that each of them is in it.

        Args:
            model: a chunk, or the list of this rank's chunks, before it is wrapped for data parallelism.

        Returns:
            The model in the form in which it came.

        Raises:
            SessionError: a feature that works on modules has found none of them on any rank, or experts lack
                the marks with which gradients of their copies are summed.
        """
        from megatron.core.utils import get_model_config

        from mindspeed_megatron.built_model import settle_model
        from mindspeed_megatron.token_losses import pass_token_losses

        chunks = chunks_of(model)
        config = get_model_config(chunks[0])
        self._check_config(config, "model")
        args = self._arguments(config)
        built = self._through("build_model", chunks, args=args, config=config, pg=self.run.pg)
        group = getattr(self.run.pg, "mp", None)
        self.check_placements(group)
        settle_model(self, built, config)
        pass_token_losses(self.run, built, group)
        self.remember_models(built)
        if self.run.config is None:
            self.run.config, self.run.args = config, args
        return _like(model, built)

    def ddp_config(self, ddp_config: DistributedDataParallelConfig) -> DistributedDataParallelConfig:
        """Copy the options of data parallelism, with what features change of them."""
        args = self._arguments(self.run.config, ddp_config)
        return self._through("build_ddp_config", copy.copy(ddp_config), args=args)

    def wrap_ddp(self, model: Chunks, ddp_config: DistributedDataParallelConfig | None = None) -> Chunks:
        """Wrap a model for data parallelism, with megatron-core's wrapper unless a feature has another.

        Args:
            model: a chunk, or the list of this rank's chunks.
            ddp_config: the caller's options, which pass `ddp_config` here.
        """
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.utils import get_model_config

        from mindspeed_megatron.built_model import settle_model

        chunks = chunks_of(model)
        config = get_model_config(chunks[0])
        options = self.ddp_config(ddp_config or DistributedDataParallelConfig())
        args = self._arguments(config, options)
        settle_model(self, chunks, config)
        wrapped = self.call(
            "wrap_ddp", args=args, config=config, ddp_config=options, model=chunks, pg=self.run.pg
        )
        self._remember_model(wrapped, config, args)
        return _like(model, wrapped)

    def optimizer_config(self, optimizer_config: Config) -> Config:
        """Copy the optimizer's options, with what features change of them."""
        args = self._arguments(self.run.config, optimizer_config)
        return self._through("build_optimizer_config", copy.copy(optimizer_config), args=args)

    def wrap_optimizer(self, optimizer: Optimizer, model: Any = None) -> Optimizer:
        """Let features change or replace an optimizer, and take part in its ``step``.

        Args:
            optimizer: a ``MegatronOptimizer``; another object with ``step`` is fine where no feature looks
                inside.
            model: the chunks it updates; by default those that `wrap_ddp` saw.

        Raises:
            SessionError: a feature that brings the value of ``--optimizer`` did not put it inside.
        """
        options = getattr(optimizer, "config", None)
        args = self._arguments(self.run.config, options)
        chunks = chunks_of(model) if model is not None else self.run.model
        if model is not None:
            self._remember_model(chunks, getattr(chunks[0], "config", self.run.config), args)
        made: Any = self._through(
            "build_optimizer", optimizer, args=args, optimizer_config=options, model=chunks, pg=self.run.pg
        )
        check_optimizer(self, made)
        self.run.optimizer = made
        self.state(LoadedSchedule).watch_optimizer(self, made)
        if len(self.implementations("optimizer_step")) > 1:
            self.instances.set("optimizer_step", made, "step", self._step_with_features(made))
        return made

    def wrap_scheduler(self, scheduler: Scheduler) -> Scheduler:
        """Let features change or replace a schedule of the learning rate.

        Args:
            scheduler: megatron-core's ``OptimizerParamScheduler``; ``lr_decay_style="constant"`` where the
                flag ``--lr-decay-style`` names one that a feature brings.

        Raises:
            SessionError: that feature did not change it.
        """
        args = self._arguments(self.run.config, getattr(self.run.optimizer, "config", None))
        optimizer = getattr(scheduler, "optimizer", self.run.optimizer)
        made: Any = self._through("build_scheduler", scheduler, args=args, optimizer=optimizer)
        check_schedule(self, made)
        self.run.scheduler = made
        self.state(LoadedSchedule).watch_scheduler(self, made)
        return made

    def forward_backward(self, config: TransformerConfig | None = None) -> Callable[..., Any]:
        """Return the pipeline schedule, called like the one of ``get_forward_backward_func()``, by keyword.

        Args:
            config: the model's; by default that of the trained model.
        """
        from mindspeed_megatron.schedule import boundary_options, scheduled
        from mindspeed_megatron.step_tokens import counted_tokens

        config = config if config is not None else self.run.config
        args = self._arguments(config)
        function = self.call("get_forward_backward", args=args, config=config, pg=self.run.pg, run=self.run)

        def schedule(**options: Any) -> Any:
            training = not options.get("forward_only", False)
            sizes = {name: options[name] for name in ("seq_length", "micro_batch_size") if name in options}
            self.sized(**sizes)
            lengths = options.get("micro_batch_size", 1), options.get("seq_length", 1)
            number = options.get("num_microbatches", 1)
            iterator = options.get("data_iterator")
            with (
                scheduled(self.run, training=training),
                counted_tokens(
                    self.run, config, iterator, number, lengths, training=training, read=self._batch_of
                ) as iterator,
            ):
                options |= {"data_iterator": iterator} if "data_iterator" in options else {}
                if "adjust_tensor_shapes_fn" not in options and config is not None:
                    options |= boundary_options(self.run, Namespace(**(vars(args) | sizes)), config)
                result = function(**options)
            if training:
                self.used(options.get("num_microbatches", 1))
            return result

        return schedule

    def _batch_of(self, item: Any) -> Batch:
        """Return the batch that features make of an item of the caller's iterator, where it is one."""
        return self.batch(item) if isinstance(item, Batch) else item

    def forward_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a schedule's ``forward_step_func`` around the caller's.

        Args:
            function: called with ``data_iterator``, ``model``, and ``return_schedule_plan=True`` by schedules
                that ask for it; returns the output tensor and the loss function.
        """
        from mindspeed_megatron.schedule import begin_microbatch

        self.build_groups()

        def forward(data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> Any:
            begin_microbatch(self.run, model)
            return self._through(
                "forward_step",
                function,
                run=self.run,
                data_iterator=data_iterator,
                model_chunk=model,
                return_schedule_plan=return_schedule_plan,
            )

        return forward

    @overload
    def batch(self, batch: Batch) -> Batch: ...
    @overload
    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]: ...
    def batch(self, batch: Mapping[str, Any] | Batch) -> dict[str, Any] | Batch:
        """Return one micro-batch with what features change and add, on every pipeline stage.

        Args:
            batch: tokens ``[b, s]`` and the other fields of `mindspeed_core.run.Batch`, as such or as a
                dictionary, whose other names are kept; on a stage that has none of them an empty one.
        """
        self.build_groups()
        record, context = batch_of(batch), self.run.context
        sizes = sizes_of(record)
        if sizes:
            self.sized(micro_batch_size=sizes[0], seq_length=sizes[1])
        outside = context.microbatch < 0
        made: Batch = self._through(
            "get_batch",
            record,
            run=self.run,
            data_iterator=iter(()),
            vp_stage=context.vp_stage,
            microbatch=max(0, context.microbatch),
        )
        if outside:
            self.used(1)
        return made if isinstance(batch, Batch) else mapping_of(made, batch)

    def sized(self, **sizes: int | None) -> None:
        """Take over the sizes of batches; flags say them where nothing else does."""
        args = vars(self.run.args)
        known = {name: size for name, size in sizes.items() if size is not None and args.get(name) != size}
        if known:
            self.run.args = Namespace(**{**args, **known})

    def used(self, num_microbatches: int) -> None:
        """Count the samples of micro-batches over all data-parallel ranks, where their size is known."""
        pg, size = self.run.pg, self.run.args.micro_batch_size or 0
        ranks = pg.dp.size() if pg is not None else 1
        self.run.consumed_train_samples += num_microbatches * size * ranks

    def token_losses(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: torch.Tensor,
        logits: torch.Tensor,
        model: Any = None,
    ) -> torch.Tensor:
        """Return per-token losses ``[b, s]`` of logits that a model called without labels returned.

        A model called with labels needs no such call: `model` sees to it.

        Args:
            function: called with ``labels`` and ``logits``; returns the losses ``[b, s]``.
            labels: ``[b, s]``.
            logits: ``[s, b, v / tp]``, this rank's part of the vocabulary.
            model: the language model, for features that read it.
        """
        from mindspeed_megatron.token_losses import through_stage

        return through_stage(self.run, model, function, labels, logits, 0)

    def loss(
        self,
        function: Callable[[torch.Tensor], tuple[Any, ...]],
        batch: Mapping[str, Any] | Batch | None = None,
        model: Any = None,
    ) -> Callable[..., tuple[Any, ...]]:
        """Return the loss function of a forward step, around the caller's.

        Args:
            function: from the output tensor to ``(loss, report)`` or ``(loss, num_tokens, report)``.
            batch: the micro-batch, for features that read it.
            model: the chunk, for features that read it.
        """
        from mindspeed_megatron.token_losses import check_passed

        record = batch_of(batch)

        def compute(output_tensor: torch.Tensor, **options: Any) -> tuple[Any, ...]:
            adapter = LossAdapter(partial(function, **options))
            if options.get("non_loss_data"):
                return adapter.function(output_tensor)
            check_passed(self.run, at_loss=True)
            loss = self._through(
                "compute_loss",
                adapter.record,
                run=self.run,
                batch=record,
                output_tensor=output_tensor,
                model_chunk=model,
            )
            return adapter.tuple_of(loss)

        return compute

    def reduce_losses(
        self, reports: Sequence[Mapping[str, torch.Tensor]], *, training: bool = True
    ) -> Mapping[str, float]:
        """Return the losses of a step, with those that features report; collective over all ranks.

        Args:
            reports: what the schedule returned: for each micro-batch a dictionary, name to ``[sum, count]``
                or to a mean; empty on pipeline stages without loss.
            training: False after an evaluation.

        Returns:
            The means by name, the same on every rank. They are read from the device when somebody looks at
            one. ``counts`` of them goes into `StepResult`.
        """
        self.build_groups()
        losses: Mapping[str, float] = self.call(
            "reduce_losses", run=self.run, reports=reports, training=training
        )
        return losses

    def finalize_gradients(self, function: Callable[..., Any] | None = None) -> Callable[..., None]:
        """Return the function for ``config.finalize_model_grads_func``.

        Args:
            function: the caller's, with the signature of megatron-core's ``finalize_model_grads``, which is
                the default.
        """
        self.build_groups()

        def finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
            self._through(
                "finalize_gradients",
                partial(function, **options) if function is not None else None,
                run=self.run,
                model=model,
                num_tokens=num_tokens,
                pg=options.get("pg_collection"),
                force_all_reduce=options.get("force_all_reduce", False),
            )

        return finalize

    def train_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return one training step around the caller's: what features do per step happens here.

        Args:
            function: does a whole step; what it returns comes back. A `StepResult` tells features more.
        """
        self.build_groups()

        def step(*positional: Any, **named: Any) -> Any:
            if not self._started:
                self.call("start_run", run=self.run)
                self._started = True
            adapter = StepAdapter(partial(function, *positional, **named))
            result = self._through("train_step", adapter.record, run=self.run)
            self.run.iteration += 1
            return adapter.returned(result)

        return step

    def log_step(self, numbers: Mapping[str, Any], result: StepResult | None = None) -> dict[str, Any]:
        """Join the caller's numbers of a step and those of features; collective over all ranks.

        Args:
            numbers: by name.
            result: the step they belong to, for features that read it.
        """
        step = result or StepResult(losses={}, skipped=False, grad_norm=None, num_zeros=None)
        made: dict[str, Any] = self._through("log_step", dict(numbers), run=self.run, result=step)
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return the features' own state by feature, for a checkpoint; also the template to load it with.

        The record of the model is among it, which `load_state_dict` compares. It may hold megatron-core's
        ``ShardedTensor`` and belongs under ``features`` into the dictionary that ``dist_checkpointing``
        saves, where the standalone host has it too.

        Raises:
            mindspeed_core.errors.CheckpointError: two features contribute under one name.
        """
        from mindspeed_megatron.feature_state import feature_parts
        from mindspeed_megatron.model_record import KEY, describe_run

        self.build_groups()
        parts = feature_parts(self.run)
        if self.run.config is not None:
            parts[KEY] = describe_run(self.run, built_by_caller=True).as_dict()
        return parts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give features back what `state_dict` returned, after the model and the optimizer were loaded.

        Raises:
            mindspeed_core.errors.CheckpointError: the checkpoint is one of another model.
        """
        from mindspeed_megatron.model_comparison import check_model
        from mindspeed_megatron.model_record import KEY, describe_run, read_record, softmax_size
        from mindspeed_megatron.vocabulary import settle_vocabulary

        where = "load_state_dict"
        saved = read_record(state.get(KEY), where)
        if saved is not None and self.run.config is not None:
            description = describe_run(self.run, built_by_caller=True)
            resumes = self.run.optimizer is not None
            notes = check_model(self, saved, description, where, resumes=resumes)
            rows = description.arguments.get("padded_vocab_size")
            notes += settle_vocabulary(
                self, self.run.model, saved=softmax_size(saved), rows=rows, ids=None, where=where
            )
            for note in notes:
                logger.warning("mindspeed: %s", note)
        parts = {name: part for name, part in state.items() if name != KEY}
        self.collect("restore_checkpoint_state", run=self.run, state=parts)
        self.call("after_load_checkpoint", run=self.run)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Hold parameters and optimizer state in the form that belongs into checkpoints, in this block.

        Collective: parameters that ``overlap_param_gather`` has not gathered yet are gathered first.
        """
        if self.run.model or self.run.optimizer is not None:
            self.run.complete_parameters()
        self.call("before_save_checkpoint", run=self.run)
        try:
            yield
        finally:
            self.call("after_load_checkpoint", run=self.run)

    def report(self) -> dict[str, Any]:
        """Return what is active and what it did so far: plan, patches, modules, groups, stages."""
        return {
            **self.plan.as_dict(),
            "notes": [str(note) for note in (*self.plan.notes, *self.plan.flag_notes)],
            "applied_patches": [f"{patch.target} ({patch.owner})" for patch in self.ledger.listing()],
            "modules": {
                name: self.placements[name] + self.instances.placed(name)
                for name in self.plan.names
                if self.placements[name] or self.instances.placed(name)
            },
            "groups": {name: self.groups.ranks(name) for name in self.groups},
            "stages": {
                stage: self.features_in(stage)
                for stage in sorted({stage for cls in self._feature_classes for stage in cls.hooks()})
            },
        }

    def _remember_model(self, chunks: list[Any], config: Any, args: Namespace) -> None:
        """Remember which model this session trains."""
        self.run.model, self.run.config, self.run.args = list(chunks), config, args

    def _step_with_features(self, optimizer: Any) -> MethodType:
        """Return the optimizer's ``step`` with features."""
        plain = optimizer.step

        def step(_: Any, *positional: Any, **named: Any) -> Any:
            self.build_groups()
            adapter = UpdateAdapter(partial(plain, *positional, **named))
            return adapter.returned(self._through("optimizer_step", adapter.record, run=self.run))

        # torch's schedulers ask a method for its function.
        return MethodType(step, optimizer)


def _like(model: Any, chunks: list[Any]) -> Any:
    return chunks if isinstance(model, (list, tuple)) else chunks[0]
