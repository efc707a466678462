"""What a library session knows of the program around it: the world, its groups, the model's configuration.

None of it is there when the session opens, all of it may come at any moment and in any order: so it is looked
up when a function of the session needs it.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError
from mindspeed_core.hosts.library.config_arguments import described
from mindspeed_core.hosts.library.lifetime import LastingSession
from mindspeed_core.hosts.library.rank_check import check_agreement
from mindspeed_core.resolver.resolve import resolve
from mindspeed_core.runtime.process_groups import current_world

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

MADE = "_mindspeed_made"
"""Attribute of a configuration that a session made."""


@dataclass(frozen=True)
class Made:
    """How a configuration came about; goes with its copies.

    Attributes:
        digest: of the session's plan.
        facts: what the caller's configuration said, by argument.
    """

    digest: str
    facts: Mapping[str, Any]


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
        self._understood: dict[str, tuple[Namespace, frozenset[str]]] = {}
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
        if not self._situated or world is not (self._world() if self._world is not None else None):
            self._situate(world)
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

    def _situate(self, world: Any) -> None:
        """Start over in the world that is there now."""
        absent: Any = None
        self._understood.clear()
        self.run.pg = absent
        self.groups.forget()
        self._world = weakref.ref(world) if world is not None else None
        self.args = self.run.args = self._understand({})[0]
        self.run.dist = self.call("init_distributed", args=self.args, platform=self.platform)
        if world is not None:
            check_agreement(self, self.run.dist)
        self._situated = True

    def _understand(self, facts: Mapping[str, Any]) -> tuple[Namespace, frozenset[str]]:
        """The arguments with what configurations say, validated; and those that features changed.

        Args:
            facts: values by argument; arguments of features are theirs and never among them.
        """
        key = repr(sorted(facts.items()))
        if key not in self._understood:
            before = vars(self._parsed) | dict(facts)
            args = self.call("validate_arguments_early", args=Namespace(**before), plan=self.plan)
            args = self.call("validate_arguments", args=args, plan=self.plan)
            changed = {name for name, value in before.items() if not _same(getattr(args, name, None), value)}
            self._understood[key] = (args, frozenset(changed))
        args, kept = self._understood[key]
        return Namespace(**vars(args)), kept

    def _facts(self, *configs: Any) -> dict[str, Any]:
        """What configurations say, by argument; of one that a session made, what it said before."""
        facts: dict[str, Any] = {}
        for config in configs:
            made = getattr(config, MADE, None)
            if made is not None:
                facts |= made.facts
            elif config is not None:
                facts |= {dest: value for dest, (value, _) in described([config]).items()}
        return {dest: value for dest, value in facts.items() if dest not in self.plan.arguments}

    def _arguments(self, *configs: Any) -> Namespace:
        """The arguments for a stage that concerns these configurations."""
        self.build_groups()
        return self._understand(self._facts(*configs))[0]

    def _check(self, config: Any) -> None:
        """Resolve again with what a configuration says: whatever features require of it is found."""
        plan = resolve(
            self.registry,
            Namespace(**(vars(self._parsed) | self._facts(config))),
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
        made = getattr(config, MADE, None)
        if made is not None and made.digest != self.plan.digest:
            raise SessionError(
                f"this {type(config).__name__} was made by a session with another plan; pass the one that "
                "session.config was called with"
            )
        return made is not None

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
