"""A session inside somebody else's program: opened again, and given its world late.

A framework that trains several models in one process goes from one session to the next and back while the
models of each live on, so nothing that belongs to a model is lost when its session closes. The world, its
groups and the model's configuration may come at any moment and in any order: they are looked up when a
function of the session needs them.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mindspeed_core.errors import SessionError
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.resolver.resolve import resolve
from mindspeed_core.run import DistInfo, Run
from mindspeed_core.runtime.process_groups import current_world, look_for_unclean_ends
from mindspeed_core.session import Session
from mindspeed_megatron.config_arguments import contradicted, described, unset
from mindspeed_megatron.flag_notes import lines
from mindspeed_megatron.rank_check import ranks_agree

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed_core.activation import Flags

logger = logging.getLogger("mindspeed_core")
Own = TypeVar("Own", bound="EmbeddedSession")

ORIGIN = "_mindspeed_origin"
"""Attribute of a configuration that a session made."""


@dataclass(frozen=True)
class ConfigOrigin:
    """Origin of a configuration that a session made; goes with its copies.

    Attributes:
        digest: of the session's plan.
        facts: what the caller's configuration said, by argument.
    """

    digest: str
    facts: Mapping[str, Any]


class EmbeddedSession(Session):
    """A session that finds out where it is, and can be opened again as it was.

    Attributes:
        run: the training as features see it: configuration, model, optimizer, iteration. One session drives
            one trained model; a second trained model has a session of its own.
        feature_arguments: arguments of active features that somebody gave; those named like a field of the
            configuration fill it.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        """Put a session together, as `Session` does; nothing happens before it is opened."""
        super().__init__(*positional, **named)
        absent: Any = None
        self.run = Run(session=self, args=self.args, config=absent, pg=absent, dist=absent, model=[])
        self.feature_arguments = frozenset(
            dest for dest in self.plan.arguments if self.provenance.get(dest, "default") != "default"
        )
        self._models: list[weakref.ref[Any]] = []
        self._in_world = False
        self._started = False
        self._entered_open = False
        self._announced = False
        self._parsed = self.args
        self._validated: dict[str, tuple[Namespace, frozenset[str]]] = {}
        self._given: dict[str, list[Any]] = {}
        self._world: weakref.ref[Any] | None = None

    def open(self: Own) -> Own:
        """Open the session, or open it again as it was: groups, features' state and changed instances."""
        super().open()
        self._announce()
        try:
            self.instances.resume()
            self._change_functions()
            if not self.groups.reclaim():
                self._in_world = False
        except BaseException:
            self._end()
            raise
        return self

    def _change_functions(self) -> None:
        """Let models that were built before the session was left call what they called in it."""
        living = [chunk for chunk in (model() for model in self._models) if chunk is not None]
        if not living:
            return
        from megatron.core.utils import get_model_config

        from mindspeed_megatron.built_model import change_functions

        for chunk in living:
            change_functions(self, [chunk], get_model_config(chunk))

    def _announce(self) -> None:
        """Log on the first rank, once, what features say about this run and which are broken."""
        if self._announced or os.environ.get("RANK", "0") != "0":
            return
        self._announced = True
        for held in self.plan.held_back:
            if held.broken:
                logger.warning("mindspeed: %s is left out: %s", held.name, held.reason)
        for note in self.plan.notes:
            logger.warning("mindspeed: %s", note)
        for line in lines(self.plan.flag_notes, explain=self.args.explain):
            logger.warning("mindspeed: %s", line)

    def __enter__(self: Own) -> Own:
        """Open the session unless it is open."""
        self._entered_open = self.is_open
        return self if self.is_open else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close an activated session for good; leave one that was opened by entering, to be entered again."""
        if self._entered_open and error is None:
            self.close(force=True)
            return
        self._end()
        if error is not None:
            self._forget_checkpoints()

    def close(self, *, force: bool = False) -> None:
        """End the session: everything it changed is as it was before.

        Models built with it go on working, except for those that a feature keeps working only while the
        session is open. Process groups are kept for the next session of this process.

        Args:
            force: close although such a model lives; it must not be used any more.

        Raises:
            SessionError: such a model lives.
        """
        if not self.is_open:
            return
        if not force:
            self._refuse_to_leave_models()
        try:
            if self._started:
                self._started = False
                self.call("finish_run", run=self.run)
        finally:
            self._end()
            self._forget_checkpoints()

    def reopen(self: Own, flags: Flags, *, configs: Sequence[object] = ()) -> Own:
        """Close this session and open one with other flags, on the same platform and registry.

        Args:
            flags: all flags of the new session, in any form that `mindspeed_core.activate` takes.
            configs: as there.

        Returns:
            The new session; this one stays closed. Process groups with the same ranks and options are reused.

        Raises:
            mindspeed_core.resolver.plan.PlanError: the flags cannot be resolved; this session stays open.
            SessionError: a model needs this session.
        """
        from mindspeed_core.activation import prepare

        following: Any = prepare(
            flags,
            host=self.host.name,
            platform=self.plan.platform,
            mode=self.mode,
            registry=self.registry,
            configs=configs,
            extra_plugins=self._extra_plugins,
        )
        self.close()
        return following.open()

    def remember_models(self, chunks: Iterable[Any]) -> None:
        """Remember models of this session, without keeping them alive."""
        self._models += [weakref.ref(chunk) for chunk in chunks]

    def _refuse_to_leave_models(self) -> None:
        names = [feature.name for feature in self._feature_classes if feature.needs_open_session]
        living = sum(model() is not None for model in self._models)
        if names and living:
            raise SessionError(
                f"{living} model chunk{'s' if living > 1 else ''} built with {', '.join(names)} still "
                "live, and work only while this session is open; delete them, or close(force=True) and do "
                "not use them again"
            )

    def _undoings(self) -> tuple[Callable[[], object], ...]:
        return (self._let_go_of_graphs, *super()._undoings())

    def _let_go_of_graphs(self) -> None:
        """Let models that the caller drops be freed: what they keep of their last pass would hold them."""
        living = [chunk for chunk in (model() for model in self._models) if chunk is not None]
        if living or self.run.model:
            from mindspeed_megatron.kept_graphs import let_go_of_graphs

            let_go_of_graphs([*living, *self.run.model], of_callers=False)

    def _forget_checkpoints(self) -> None:
        """Let go of what parts of layers keep whose backward pass will not come any more."""
        module = sys.modules.get("mindspeed_megatron.output_checkpoint")
        if module is not None:
            module.forget_checkpoints()

    def _leave_instances(self) -> None:
        self.instances.suspend()

    def _leave_groups(self) -> None:
        self.groups.release()

    def build_groups(self, pg: ProcessGroupCollection | None = None) -> ProcessGroupCollection | None:
        """Let features create their process groups; collective over all ranks.

        Every function that may need groups calls it as soon as ``torch.distributed`` and megatron-core's
        parallel state are initialized, so it is called only to choose the moment, or to pass groups.

        Args:
            pg: the caller's groups; by default those of megatron-core's parallel state.

        Returns:
            The groups, or None where there are none yet.

        Raises:
            SessionError: ranks of this world run different plans.
        """
        from megatron.core import parallel_state

        world = current_world()
        if not self._in_world or world is not (self._world() if self._world is not None else None):
            self._enter_world(world)
        ready = world is not None and (pg is not None or parallel_state.model_parallel_is_initialized())
        if ready and (self.run.pg is None or (pg is not None and pg is not self.run.pg)):
            self.run.pg = self._through("build_process_groups", pg, args=self.args, dist_info=self.run.dist)
        return self.run.pg

    def features_in(self, stage: str) -> list[str]:
        """Return the active features (and extra plugins) that take part in a stage, outermost first."""
        host = f"host {self.host.name}"
        return [
            name for name in self.implementations(stage) if not name.startswith((host, "platform ", "core"))
        ]

    def given(self, stage: str) -> Any:
        """Return what the caller handed to the function whose stage is running; for the host's defaults.

        Raises:
            SessionError: the stage was called without its function.
        """
        values = self._given.get(stage)
        if not values:
            raise SessionError(
                f"stage {stage}: in a library session nothing is built by default; the caller's own goes "
                "through the session's function for it. For a training loop that is here, open the session "
                "with host='standalone'"
            )
        return values[-1]

    def _through(self, stage: str, given: Any, **arguments: Any) -> Any:
        values = self._given.setdefault(stage, [])
        values.append(given)
        try:
            return self.call(stage, **arguments)
        finally:
            values.pop()

    def _enter_world(self, world: Any) -> None:
        """Start over in the world that is there now."""
        absent: Any = None
        self._validated.clear()
        self.run.pg = absent
        self.groups.forget()
        self._world = weakref.ref(world) if world is not None else None
        self.args = self.run.args = self._validate({})[0]
        self.run.dist = self.call("init_distributed", args=self.args, platform=self.platform)
        if world is not None:
            self._check_ranks(self.run.dist)
            # All ranks have met in this session: none of them still has to close the one before.
            look_for_unclean_ends()
        self._in_world = True

    def _check_ranks(self, info: DistInfo) -> None:
        """Compare plan and sources of all ranks; a world of one, or a plan without features, has nothing to.

        What the caller's own arguments say differs between ranks at will; what features read is in the plan.

        Raises:
            SessionError: ranks differ; on every rank, and rank 0 has printed a table to stderr.
        """
        if self.plan.features and not ranks_agree(self, info, with_arguments=False):
            raise SessionError(
                "the ranks of this world do not run the same plan; rank 0 printed who differs. Where other "
                "ranks do something else on purpose, pass no_cross_rank_check=True"
            )

    def _validate(self, facts: Mapping[str, Any]) -> tuple[Namespace, frozenset[str]]:
        """Return the validated arguments with what configurations say, and those that features changed.

        Args:
            facts: values by argument; arguments of features are theirs and never among them.
        """
        key = repr(sorted(facts.items()))
        if key not in self._validated:
            before = vars(self._parsed) | dict(facts)
            args = self.call("validate_arguments_early", args=Namespace(**before), plan=self.plan)
            args = self.call("validate_arguments", args=args, plan=self.plan)
            changed = {name for name, value in before.items() if not _same(getattr(args, name, None), value)}
            self._validated[key] = (args, frozenset(changed))
        args, kept = self._validated[key]
        return Namespace(**vars(args)), kept

    def _facts(self, *configs: Any) -> dict[str, Any]:
        """Return what configurations say, by argument; of one that a session made, what it said before."""
        facts: dict[str, Any] = {}
        for config in configs:
            origin = getattr(config, ORIGIN, None)
            if origin is not None:
                facts |= origin.facts
            elif config is not None:
                said = {**unset([config]), **described([config])}
                facts |= {dest: value for dest, (value, _) in said.items()}
        return {dest: value for dest, value in facts.items() if dest not in self.plan.arguments}

    def _arguments(self, *configs: Any) -> Namespace:
        """Return the arguments for a stage that concerns these configurations."""
        self.build_groups()
        return self._validate(self._facts(*configs))[0]

    def _check(self, config: Any) -> None:
        """Refuse a configuration that active features cannot work with, or that asks for others."""
        facts = self._facts(config)
        args = Namespace(**(vars(self._parsed) | facts))
        plan = resolve(
            self.registry,
            args,
            provenance=self.provenance,
            platform=self.plan.platform,
            host=self.host.name,
            mode=self.mode,
            left_out=[held for held in self.plan.held_back if held.broken],
        )
        problems = contradicted(
            (self.registry.features[name] for name in plan.names),
            args,
            self.provenance,
            {dest: (value, f"{type(config).__name__}.{dest}") for dest, value in facts.items()},
        )
        if problems:
            raise PlanError(problems)
        if plan.names != self.plan.names:
            raise SessionError(
                f"this {type(config).__name__} asks for the features {', '.join(plan.names) or 'none'}, the "
                f"session was opened with {', '.join(self.plan.names) or 'none'}; pass the configuration to "
                "activate(..., configs=[config])"
            )

    def _made_here(self, config: Any) -> bool:
        """Return whether this session, or one with the same plan, made a configuration."""
        origin = getattr(config, ORIGIN, None)
        if origin is not None and origin.digest != self.plan.digest:
            raise SessionError(
                f"this {type(config).__name__} was made by a session with another plan; pass the one that "
                "session.config was called with"
            )
        return origin is not None

    def _check_config(self, config: Any, function: str) -> None:
        if self._made_here(config):
            return
        changing = self.features_in("build_transformer_config")
        if changing:
            raise SessionError(
                f"session.{function} got a configuration that lacks what {', '.join(changing)} changes; "
                "build the model with config = session.config(config)"
            )
        self._check(config)


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)
