"""Sessions: one plan, opened and closed exactly.

Opening a session registers the host, the platform and the *active* features with one pluggy manager, applies
patches and sets environment variables; closing it takes all of that back exactly. The open session is the
only global state of the project.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.errors import SessionError
from mindspeed_core.feature import Feature
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_core.runtime.instance_patches import Instances, Roles, nothing_matched
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_core.runtime.process_groups import Groups
from mindspeed_core.runtime.stages import StageCalls, known_fits, made

if TYPE_CHECKING:
    from argparse import Namespace

    from torch.distributed import ProcessGroup

    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.registry import Registry
    from mindspeed_core.resolver.plan import Plan

_lock = threading.Lock()
_open: Session | None = None
_ABSENT = object()
Record = TypeVar("Record")


def current() -> Session:
    """Return the open session.

    Raises:
        SessionError: none is open.
    """
    if _open is None:
        raise SessionError("no mindspeed session is open")
    return _open


class Session:
    """One plan, running; a context manager that opens and closes it.

    Attributes:
        args: the parsed arguments.
        plan: what is active and why.
        platform: the device.
        registry: what is installed.
        groups: process groups by name.
        instances: changes on built instances.
        provenance: where each argument's value came from: ``"flag"``, ``"preset NAME"``, ``"default"``.
        mode: ``train`` or ``inference``.
    """

    def __init__(
        self,
        plan: Plan,
        args: Namespace,
        *,
        platform: Platform,
        registry: Registry,
        host: HostDeclaration,
        features: Sequence[type[Feature]] = (),
        provenance: Mapping[str, str] | None = None,
        extra_plugins: Sequence[object] = (),
    ) -> None:
        """Assemble a session; nothing happens before `open`.

        Args:
            plan: the resolver's result.
            args: the parsed arguments.
            platform: the platform object.
            registry: what is installed.
            host: the host's declaration.
            features: the classes of the plan's features, in plan order.
            provenance: where each argument's value came from.
            extra_plugins: further objects with hook implementations, outermost (test probes).
        """
        self.plan = plan
        self.args = args
        self.platform = platform
        self.registry = registry
        self.host = host
        self.mode = plan.mode
        self.provenance: Mapping[str, str] = dict(provenance or {})
        self.groups = Groups()
        self.instances = Instances()
        self.ledger = PatchLedger()
        self.placements: Counter[str] = Counter()
        self.roles: dict[str, Roles] = {}
        self._feature_classes = tuple(features)
        self._features: tuple[Feature, ...] = ()
        self._extra_plugins = tuple(extra_plugins)
        self._environment: dict[str, Any] = {}
        self._at_close: list[Callable[[], object]] = []
        self._state: dict[type[Any], Any] = {}
        self._stages = StageCalls(self, registry, host, features, extra_plugins)
        self._opened_at = ""
        self._world_size: int | None = None

    @property
    def is_open(self) -> bool:
        """True while the session is open."""
        return _open is self

    def __enter__(self) -> Session:
        """Open the session unless it is open."""
        return self if self.is_open else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        self._stages.failed = self._stages.failed or error is not None
        self.close()

    def open(self) -> Session:
        """Open the session: environment, patches, stages.

        Raises:
            SessionError: another session is open, or an implementation does not fit its stage.
            PatchError: a patch cannot be applied.
        """
        global _open
        with _lock:
            if _open is not None:
                raise SessionError(
                    "another mindspeed session is open; close it first. It was opened at:\n"
                    + _open._opened_at
                )
            _open = self
        self._opened_at = "".join(traceback.format_stack(limit=6)[:-1])
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def validated(self, *, world_size: int = 1) -> Namespace:
        """Return the arguments as the stages of validation leave them, without opening the session.

        Nothing is patched, no environment is set and no device is touched, so that another session may be
        open. The arguments of this session stay as they are.

        Args:
            world_size: ranks of the world that the arguments are checked for, as seen from rank 0.

        Raises:
            SessionError: this very session is open, or an implementation does not fit its stage.
            mindspeed_core.errors.UserError: the arguments cannot work.
        """
        if self._stages.manager is not None:
            raise SessionError("the session is open: its arguments are validated already")
        self._world_size = world_size
        known, plugins = known_fits(self.registry), self._plugin_classes()
        try:
            self._register_features(fit=plugins in known)
            self.platform.check_arguments(self.args)
            self._register_defaults()
            known.add(plugins)
            args = self.call("validate_arguments_early", args=copy(self.args), plan=self.plan)
            return cast("Namespace", self.call("validate_arguments", args=args, plan=self.plan))
        finally:
            self._world_size = None
            self._stages.end()

    def place_in_world(self) -> tuple[int, int, int]:
        """Return rank, world size and local rank: by the process group, or before it by the platform.

        During `validated` it is rank 0 of the world that is asked about.

        Raises:
            mindspeed_core.errors.UserError: a variable of the launcher is no number.
        """
        if self._world_size is not None:
            return 0, self._world_size, 0
        rank, world_size, local_rank = self.platform.position(self.args)
        dist: Any = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        return rank, world_size, local_rank

    def _start(self) -> None:
        self._register_features()
        self.platform.check_arguments(self.args)
        self.call("prepare_process", args=self.args)
        owned = list(self.platform.patches())
        self.ledger.apply(owned, owner=self.platform.name)
        self.platform.open(self)
        self.ledger.apply(self.host.patches, owner=self.host.name)
        self.ledger.apply(self.plan.patches)
        self._register_defaults()
        self.platform.start(self)

    def _register_features(self, *, fit: bool = False) -> None:
        self._stages.begin(fit=fit)
        # A session that is opened again goes on with the features it had, and with what they remember.
        self._features = self._features or tuple(made(f, self.registry) for f in self._feature_classes)
        for feature in reversed(self._features):
            self._stages.register(feature, feature.name)
        self._stages.check_unknown()

    def _register_defaults(self) -> None:
        self._stages.register(self.platform, f"platform {self.platform.name}")
        for path in self.host.stages:
            self._stages.register(load_object(path), f"host {self.host.name}, {path}")
        for index, plugin in enumerate(self._extra_plugins):
            self._stages.register(plugin, f"extra {index} {type(plugin).__qualname__}")

    def call(self, stage: str, **arguments: Any) -> Any:
        """Run a stage: features and host.

        An exception passes through unchanged, with a note that says which feature and stage it came from.

        Args:
            stage: the stage's name.
            arguments: what the stage offers, except ``session``, which is added.

        Raises:
            SessionError: the session is closed, nothing implements the stage, or a wrapper of it does not
                yield exactly once.
        """
        result = self._stages.run(stage, arguments)
        if result is None:
            raise SessionError(
                f"stage {stage}: no implementation returned a result; a wrapper must `return` what it got "
                f"from `yield`. Implemented by: {', '.join(self.implementations(stage)) or 'nobody'}"
            )
        return result

    def collect(self, stage: str, **arguments: Any) -> list[Any]:
        """Run a stage whose every implementation counts; return the results in plan order.

        An exception passes through unchanged, with a note that says which feature and stage it came from.
        """
        results: list[Any] = self._stages.run(stage, arguments)
        return results

    def _plugin_classes(self) -> Hashable:
        """Return what decides whether every implementation fits its stage."""
        extra = tuple(map(type, self._extra_plugins))
        return (self.host.name, self.host.stages, type(self.platform), self._feature_classes, extra)

    def default(self, stage: str, **arguments: Any) -> Any:
        """Run only the host's default of a stage, for a feature that needs it again."""
        return self._stages.default(stage)(session=self, **arguments)

    def claims(self, option: str) -> list[str]:
        """Return the active features that declare a flag: a host leaves its work to them."""
        return [
            feature.name
            for feature in self._feature_classes
            if any(option in flag.options for flag in feature.flags)
        ]

    def implementations(self, stage: str) -> list[str]:
        """Return who implements a stage, outermost wrapper first, the host's default last."""
        return self._stages.implementations(stage)

    def setenv(self, name: str, value: str) -> None:
        """Set an environment variable until the session closes."""
        self._environment.setdefault(name, os.environ.get(name, _ABSENT))
        os.environ[name] = value

    def at_close(self, action: Callable[[], object]) -> None:
        """Call ``action`` when the session closes, last given first: for state that no patch reaches."""
        self._at_close.append(action)

    def state(self, record: type[Record]) -> Record:
        """Return this session's one record of a class, made without arguments when first asked for.

        For what a host or a feature remembers between stages. It stays with the session, also while the
        session is closed, and goes with it.

        Args:
            record: the class, which belongs to its owner alone; usually a dataclass with defaults.
        """
        value = self._state.get(record)
        if value is None:
            value = self._state[record] = record()
        return cast(Record, value)

    def place(
        self,
        owner: str,
        count: int,
        *,
        sought: Iterable[str] = (),
        present: Iterable[str] = (),
        replaced: Iterable[str] = (),
    ) -> None:
        """Count the modules that a feature replaced or changed; record zero too.

        Args:
            owner: the feature's name.
            count: how many modules.
            sought: the roles it looked for.
            present: the roles that there are.
            replaced: the roles of what it replaced without containing it, behind the roles around each.
        """
        self.placements[owner] += count
        self.roles.setdefault(owner, Roles()).add(sought, present, replaced)

    def check_placements(self, group: ProcessGroup | None = None) -> None:
        """Raise where a feature that changes modules has found none on any rank.

        The host calls it when the model is built; collective over the group.

        Args:
            group: the ranks that hold the model together, by default all.

        Raises:
            SessionError: names every feature that matched nothing.
        """
        wanted = [feature.name for feature in self._feature_classes if feature.places_modules]
        placed = [self.placements[name] + self.instances.placed(name) for name in wanted]
        parts = all_gather_values(placed, group) if wanted else []
        if self.platform.dry_run and len(parts) > 1:
            # The counts of other pipeline stages are unknown in a dry run.
            return
        empty = [name for index, name in enumerate(wanted) if not any(part[index] for part in parts)]
        if empty:
            asked = {feature.name: feature.why for feature in self.plan.features if feature.name in empty}
            raise SessionError(nothing_matched(asked, all_gather_values(self.roles, group)))

    def close(self) -> None:
        """Close the session: restore everything that opening changed.

        Process groups of features wait for the next session of their world, and end with it; those the host
        made are the host's business.
        """
        self._end()

    def _end(self) -> None:
        """Revert what opening changed, also after it failed half-way."""
        global _open
        if _open is not self:
            return
        errors: list[BaseException] = []
        for action in self._undoings():
            try:
                action()
            except BaseException as error:
                errors.append(error)
        self._stages.end()
        with _lock:
            _open = None
        if errors:
            raise errors[0]

    def _undoings(self) -> tuple[Callable[[], object], ...]:
        """Return the actions that revert the session, in order; each runs even if another fails."""
        actions, self._at_close = self._at_close, []
        return (
            *reversed(actions),
            self._leave_instances,
            self._leave_groups,
            lambda: self.platform.close(self),
            self.ledger.revert,
            self._restore_environment,
        )

    def _leave_instances(self) -> None:
        """Undo changes of built instances; a session that is opened anew overrides it, and keeps them."""
        self.instances.revert()

    def _leave_groups(self) -> None:
        # A world that is still there may see another session. torch may name a group after its ranks and
        # the number of groups there are: made again, one would look for its peers at the addresses that the
        # destroyed one left.
        if self._stages.failed:
            self.groups.spoil()
        else:
            self.groups.release()
        self.groups.forget()

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is _ABSENT:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment.clear()
