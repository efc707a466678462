"""A session as functions for a training loop of your own, each usable without the others.

Every function passes one thing of the caller's (a configuration, a specification, an optimizer, a batch)
through the active features and returns what became of it. The session prints nothing, seeds nothing and
reads no command line.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from mindspeed_core.run import Batch, StepResult
from mindspeed_megatron.hosts.library.adapters import (
    LossAdapter,
    StepAdapter,
    batch_of,
    mapping_of,
    sizes_of,
)
from mindspeed_megatron.hosts.library.building import BuildingSession

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig


logger = logging.getLogger("mindspeed_core")


class LibrarySession(BuildingSession):
    """One plan inside the caller's program; `mindspeed_core.activate` makes it."""

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
