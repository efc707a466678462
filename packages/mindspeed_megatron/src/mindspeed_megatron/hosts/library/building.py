"""The half of a library session that builds: configuration, model, wrappers, optimizer and schedule.

`session.LibrarySession` adds what trains and saves.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from mindspeed_core.run import ChunkPlace
from mindspeed_megatron.brought_choices import check_optimizer, check_schedule
from mindspeed_megatron.hosts.library.adapters import UpdateAdapter
from mindspeed_megatron.hosts.library.loaded_schedule import LoadedSchedule
from mindspeed_megatron.hosts.library.world import ORIGIN, ConfigOrigin, EmbeddedSession
from mindspeed_megatron.unwrap import chunks_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

Config = TypeVar("Config")
Optimizer = TypeVar("Optimizer")
Scheduler = TypeVar("Scheduler")
Chunks = TypeVar("Chunks")


class BuildingSession(EmbeddedSession):
    """One plan inside the caller's program, as far as it builds what is trained."""

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
