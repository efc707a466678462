"""What a library session knows of the program around it: the world, its groups, the model's configuration.

None of it is there when the session opens, all of it may come at any moment and in any order: so it is looked
up when a function of the session needs it.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError
from mindspeed_core.groups import current_world
from mindspeed_core.hosts.library.agreement import check_agreement
from mindspeed_core.hosts.library.description import described
from mindspeed_core.hosts.library.lifetime import LastingSession
from mindspeed_core.resolver import resolve

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

MADE_WITH = "_mindspeed_plan"
"""Attribute of a configuration that a session made: the digest of its plan."""


class EmbeddedSession(LastingSession):
    """A session that finds out where it is.

    Attributes:
        feature_arguments: arguments of active features that somebody gave; those named like a field of the
            configuration fill it.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        """Put a session together, as `Session` does; nothing happens before it is opened."""
        super().__init__(*positional, **named)
        self.feature_arguments = frozenset(
            dest for dest in self.plan.arguments if self.provenance.get(dest, "default") != "default"
        )
        self._parsed = self.args
        self._changed_arguments: frozenset[str] = frozenset()
        self._given: dict[str, list[Any]] = {}
        self._world: weakref.ref[Any] | None = None

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
        if not self._validated or world is not (self._world() if self._world is not None else None):
            self._validate(world)
        ready = world is not None and (pg is not None or parallel_state.model_parallel_is_initialized())
        if ready and (self.run.pg is None or (pg is not None and pg is not self.run.pg)):
            self.run.pg = self._through("build_process_groups", pg, args=self.args, dist_info=self.run.dist)
        return self.run.pg

    def features_in(self, stage: str) -> list[str]:
        """The active features (and extra plugins) that take part in a stage, outermost first."""
        host = f"host {self.host.name}"
        return [
            name for name in self.implementations(stage) if not name.startswith((host, "platform ", "core"))
        ]

    def given(self, stage: str) -> Any:
        """What the caller handed to the function whose stage is running; for the host's defaults.

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

    def _validate(self, world: Any) -> None:
        """Run the stages around arguments for the world that is there now."""
        before = Namespace(**vars(self._parsed))
        args = self.call("validate_arguments_early", args=Namespace(**vars(before)), plan=self.plan)
        args = self.call("validate_arguments", args=args, plan=self.plan)
        self._changed_arguments = frozenset(
            name for name, value in vars(before).items() if getattr(args, name, None) != value
        )
        self.args = self.run.args = args
        self.run.dist = self.call("init_distributed", args=args, platform=self.platform)
        absent: Any = None
        self.run.pg = absent
        self.groups.forget()
        self._world = weakref.ref(world) if world is not None else None
        if world is not None:
            check_agreement(self, self.run.dist)
        self._validated = True

    def _arguments(self, *configs: Any) -> Namespace:
        """The arguments for a stage: what configurations say wins, except over what features say."""
        self.build_groups()
        args = Namespace(**vars(self.args))
        for dest, (value, _) in described([config for config in configs if config is not None]).items():
            if dest not in self._changed_arguments and dest not in self.plan.arguments:
                setattr(args, dest, value)
        return args

    def _check(self, config: Any) -> None:
        """Resolve again with what a configuration says: whatever features require of it is found."""
        args = Namespace(**vars(self._parsed))
        for dest, (value, _) in described([config]).items():
            if dest not in self.plan.arguments:
                setattr(args, dest, value)
        plan = resolve(
            self.registry,
            args,
            provenance=self.provenance,
            platform=self.plan.platform,
            host=self.host.name,
            mode=self.mode,
        )
        if plan.names != self.plan.names:
            raise SessionError(
                f"this {type(config).__name__} asks for the features {', '.join(plan.names) or 'none'}, the "
                f"session was opened with {', '.join(self.plan.names) or 'none'}; pass the configuration to "
                "activate(..., configs=[config])"
            )

    def _made_here(self, config: Any) -> bool:
        """Whether this session, or one with the same plan, made a configuration."""
        made_with = getattr(config, MADE_WITH, None)
        if made_with not in (None, self.plan.digest):
            raise SessionError(
                f"this {type(config).__name__} was made by a session with another plan; pass the one that "
                "session.config was called with"
            )
        return made_with is not None

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
