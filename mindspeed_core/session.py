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
from importlib import import_module
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pluggy

from mindspeed_core import hooks
from mindspeed_core.discovery.entry_points import describe, load_object
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.errors import SessionError, UserError, annotate
from mindspeed_core.feature import PROJECT, Feature, StageSpecs, hookimpl
from mindspeed_core.hooks import DONE, Done
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_core.runtime.instance_patches import Instances, Roles, nothing_matched
from mindspeed_core.runtime.known_fits import known_fits, stage_manager
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_core.runtime.process_groups import Groups

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


class _CoreDefaults:
    """Defaults of stages that exist before the host is loaded."""

    @hookimpl(trylast=True)
    def prepare_process(self) -> Done:
        return DONE


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
        self._failed = False
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
        self._manager: pluggy.PluginManager | None = None
        self._by_stage: dict[str, pluggy.PluginManager] | None = None
        self._callers: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        self._plugin_names: dict[str, object] = {}
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
        self._failed = self._failed or error is not None
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
        if self._manager is not None:
            raise SessionError("the session is open: its arguments are validated already")
        self._world_size = world_size
        known, plugins = known_fits(self.registry), self._plugin_classes()
        self._by_stage = {} if plugins in known else None
        try:
            self._register_features()
            self.platform.check_arguments(self.args)
            self._register_defaults()
            known.add(plugins)
            args = self.call("validate_arguments_early", args=copy(self.args), plan=self.plan)
            return cast("Namespace", self.call("validate_arguments", args=args, plan=self.plan))
        finally:
            self._world_size = None
            self._forget_stages()

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

    def _register_features(self) -> None:
        manager = pluggy.PluginManager(PROJECT)
        self._manager = manager
        if self._by_stage is None:
            for name in hooks.STAGE_MODULES:
                manager.add_hookspecs(import_module(name))
            for specs in self.registry.stage_specs():
                self._add_stage_specs(manager, specs)
        self._register(_CoreDefaults(), "core", "mindspeed_core.session")
        # A session that is opened again goes on with the features it had, and with what they remember.
        self._features = self._features or tuple(map(self._made, self._feature_classes))
        for feature in reversed(self._features):
            self._register(feature, feature.name, type(feature).__module__.partition(".")[0])
        self._check_unknown_stages()

    def _register_defaults(self) -> None:
        self._register(self.platform, f"platform {self.platform.name}", type(self.platform).__module__)
        for path in self.host.stages:
            self._register(load_object(path), f"host {self.host.name}, {path}", path.partition(":")[0])
        for index, plugin in enumerate(self._extra_plugins):
            self._register(plugin, f"extra {index} {type(plugin).__qualname__}", type(plugin).__module__)

    def _made(self, feature: type[Feature]) -> Feature:
        """Make the instance of a feature.

        Raises:
            SessionError: its constructor fails; names the feature and its package.
        """
        try:
            return feature()
        except Exception as error:
            raise SessionError(
                f"feature {feature.name!r}: its __init__() fails in {self._package(feature)}: "
                f"{describe(error, feature.__module__.partition('.')[0])}. A session makes each active "
                "feature once, without arguments"
            ) from error

    def _package(self, feature: type[Feature]) -> str:
        record = self.registry.features.get(feature.name)
        return f"{record.dist} {record.version}" if record is not None else feature.__module__

    def _register(self, plugin: object, name: str, module_prefix: str) -> None:
        assert self._manager is not None
        if self._by_stage is None:
            try:
                self._manager.register(plugin, name=name)
            except pluggy.PluginValidationError as error:
                why = _explain_validation(self._manager, plugin, error)
                raise SessionError(f"{name}: {why}") from error
        else:
            self._by_stage.clear()
        self._plugin_names[name] = plugin
        self._owners.setdefault(module_prefix, name)
        self._callers.clear()
        self._defaults.clear()

    def _add_stage_specs(self, manager: pluggy.PluginManager, specs: StageSpecs) -> None:
        """Add the stages that a plugin publishes; only who needs those that cannot load suffers."""
        try:
            manager.add_hookspecs(import_module(specs.module))
        except Exception as error:
            package = specs.module.partition(".")[0]
            users = [
                feature.name
                for feature in self._feature_classes
                if feature.__module__.partition(".")[0] == package or feature.hooks().keys() & {*specs.stages}
            ]
            if users:
                raise SessionError(
                    f"{', '.join(users)}: the stages of {specs.module} cannot be loaded: {describe(error)}"
                ) from error

    def _check_unknown_stages(self) -> None:
        assert self._manager is not None
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            owner = next((n for n, p in self._plugin_names.items() if p is error.plugin), "a plugin")
            raise SessionError(f"{owner}: {error}") from error

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
        result = self._dispatch(stage, arguments)
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
        results: list[Any] = self._dispatch(stage, arguments)
        return results

    def _dispatch(self, stage: str, arguments: Mapping[str, Any]) -> Any:
        caller = self._callers.get(stage)
        if caller is None:
            caller = self._caller(stage)
        try:
            return caller(session=self, **arguments)
        except BaseException as error:
            self._failed = True
            if isinstance(error, Exception):
                self._refuse_yields(error, stage)
                self._annotate(error, stage)
            raise

    def _caller(self, stage: str) -> Any:
        if self._manager is None:
            raise SessionError(f"stage {stage}: the session is closed")
        caller = getattr(self._manager_of(stage).hook, stage, None)
        if caller is None or not caller.spec:
            raise SessionError(f"no stage {stage!r}")
        self._callers[stage] = caller
        return caller

    def _manager_of(self, stage: str) -> pluggy.PluginManager:
        """Return the manager of a stage: the one of all stages, or while validating one of its own."""
        assert self._manager is not None
        if self._by_stage is None:
            return self._manager
        if stage not in self._by_stage:
            self._by_stage[stage] = stage_manager(stage, self.registry, self._plugin_names)
        return self._by_stage[stage]

    def _plugin_classes(self) -> Hashable:
        """Return what decides whether every implementation fits its stage."""
        extra = tuple(map(type, self._extra_plugins))
        return (self.host.name, self.host.stages, type(self.platform), self._feature_classes, extra)

    def default(self, stage: str, **arguments: Any) -> Any:
        """Run only the host's default of a stage, for a feature that needs it again."""
        caller = self._defaults.get(stage)
        if caller is None:
            if self._manager is None:
                raise SessionError(f"stage {stage}: the session is closed")
            manager = self._manager_of(stage)
            active = {feature.name for feature in self._feature_classes}
            removed = [
                manager.get_plugin(name)
                for name, plugin in self._plugin_names.items()
                if name in active or plugin in self._extra_plugins
            ]
            caller = manager.subset_hook_caller(stage, [plugin for plugin in removed if plugin is not None])
            self._defaults[stage] = caller
        return caller(session=self, **arguments)

    def claims(self, option: str) -> list[str]:
        """Return the active features that declare a flag: a host leaves its work to them."""
        return [
            feature.name
            for feature in self._feature_classes
            if any(option in flag.options for flag in feature.flags)
        ]

    def implementations(self, stage: str) -> list[str]:
        """Return who implements a stage, outermost wrapper first, the host's default last."""
        found = self._caller(stage).get_hookimpls()
        return [implementation.plugin_name for implementation in reversed(found)]

    def _refuse_yields(self, error: Exception, stage: str) -> None:
        """Name the feature of a wrapper that yields twice, or not at all, which pluggy refuses by its source.

        Raises:
            SessionError: ``error`` is such a refusal of a feature's wrapper.
        """
        text = str(error)
        if not isinstance(error, RuntimeError) or not text.startswith("wrap_controller at "):
            return
        for feature in self._feature_classes:
            code = getattr(feature.hooks().get(stage), "__code__", None)
            if code is not None and f" {code.co_filename}:{code.co_firstlineno} " in text:
                wrong = "yields a second time" if text.endswith("second yield") else "ends without a yield"
                refusal = SessionError(
                    f"feature {feature.name!r} of {self._package(feature)}: its wrapper of stage {stage!r} "
                    f"{wrong} ({code.co_filename}:{code.co_firstlineno}). A wrapper yields once: "
                    "result = yield, then return the result"
                )
                refusal.__mindspeed_stage__ = (stage, f"feature {feature.name!r}")  # type: ignore[attr-defined]
                raise refusal from error

    def _annotate(self, error: Exception, stage: str) -> None:
        # Nested stages meet the same exception again; the innermost stage is the one worth naming.
        if getattr(error, "__mindspeed_stage__", None):
            return
        owner = self._owner_of(error)
        note = f"mindspeed: raised in stage {stage!r} by {owner}"
        try:
            error.__mindspeed_stage__ = (stage, owner)  # type: ignore[attr-defined]
        except AttributeError:
            return
        if isinstance(error, UserError) and owner.startswith("host "):
            return  # the message already says everything a user can act on
        annotate(error, note)

    def _owner_of(self, error: BaseException) -> str:
        frames = []
        trace = error.__traceback__
        while trace is not None:
            # An error from within passes through a wrapper's `yield`: pluggy throws it there once more.
            following = trace.tb_next.tb_frame.f_globals.get("__name__", "") if trace.tb_next else ""
            if following.partition(".")[0] != "pluggy":
                frames.append(trace.tb_frame)
            trace = trace.tb_next
        classes = {feature.__module__: feature for feature in self._feature_classes}
        for frame in reversed(frames):
            instance = frame.f_locals.get("self")
            if isinstance(instance, Feature):
                return f"feature {instance.name!r}"
            module = frame.f_globals.get("__name__", "")
            if module in classes:
                return f"feature {classes[module].name!r}"
        prefixes = {f.__module__.partition(".")[0]: f for f in self._feature_classes}
        for frame in reversed(frames):
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package in prefixes and package != "mindspeed_core":
                return f"a feature of package {package!r}"
        return f"host {self.host.name!r}"

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
        found = self._state.get(record)
        if found is None:
            found = self._state[record] = record()
        return cast(Record, found)

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
            # Nobody tells what stages that this rank does not have have found.
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
        self._forget_stages()
        with _lock:
            _open = None
        if errors:
            raise errors[0]

    def _forget_stages(self) -> None:
        self._manager = None
        self._by_stage = None
        self._callers.clear()
        self._defaults.clear()
        self._plugin_names.clear()

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
        self.instances.revert()

    def _leave_groups(self) -> None:
        # A world that is still there may see another session. torch may name a group after its ranks and
        # the number of groups there are: made again, one would look for its peers at the addresses that the
        # destroyed one left.
        if self._failed:
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


def _explain_validation(
    manager: pluggy.PluginManager, plugin: object, error: pluggy.PluginValidationError
) -> str:
    """Turn pluggy's complaint about a signature into one that names the stage and what it offers."""
    for name in dir(plugin):
        method = getattr(plugin, name, None)
        marker = getattr(method, PROJECT + "_impl", None)
        if marker is None or (isinstance(plugin, ModuleType) and not callable(method)):
            continue
        caller = getattr(manager.hook, name, None)
        spec = getattr(caller, "spec", None)
        code = getattr(getattr(method, "__func__", method), "__code__", None)
        if spec is None or code is None:
            continue
        offered = tuple(spec.argnames)
        asked = [a for a in code.co_varnames[: code.co_argcount] if a != "self"]
        unknown = [argument for argument in asked if argument not in offered]
        if unknown:
            names = ", ".join(repr(argument) for argument in unknown)
            return f"stage {name!r}: unknown argument {names}; the stage offers {', '.join(offered)}"
    return str(error)
