"""The stages of one session: plugins registered with pluggy, calls of stages, and whose code raised.

Whether an implementation fits its stage depends on its class alone. A check of thousands of candidates asks
it once for every set of features, and registers only what implements the few stages that validation calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import pluggy

from mindspeed_core import hooks
from mindspeed_core.discovery.entry_points import describe
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.discovery.stages import core_specifications
from mindspeed_core.errors import SessionError, UserError, annotate
from mindspeed_core.feature import PROJECT, Feature, StageSpecs, hookimpl
from mindspeed_core.hooks import DONE, Done
from mindspeed_core.registry import Registry


class _CoreDefaults:
    """Defaults of stages that exist before the host is loaded."""

    @hookimpl(trylast=True)
    def prepare_process(self) -> Done:
        return DONE


class StageCalls:
    """The stages of one session and the plugins that implement them.

    Attributes:
        manager: pluggy's manager of all stages; None while the session is closed.
        failed: an implementation has raised.
    """

    def __init__(
        self,
        session: object,
        registry: Registry,
        host: HostDeclaration,
        features: Sequence[type[Feature]],
        probes: Sequence[object],
    ) -> None:
        """Begin closed.

        Args:
            session: the argument of every stage.
            registry: what is installed.
            host: whose code it is that no feature has.
            features: the classes of the plan's features, in plan order.
            probes: further objects with hook implementations.
        """
        self.manager: pluggy.PluginManager | None = None
        self.failed = False
        self._session = session
        self._registry, self._host = registry, host
        self._features, self._probes = tuple(features), tuple(probes)
        self._by_stage: dict[str, pluggy.PluginManager] | None = None
        self._plugins: dict[str, object] = {}
        self._callers: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}

    def begin(self, *, fit: bool) -> None:
        """Take plugins from now on.

        Args:
            fit: they are known to fit their stages; each stage then gets a manager of its own when it is
                called.
        """
        self.manager = pluggy.PluginManager(PROJECT)
        self._by_stage = {} if fit else None
        if not fit:
            for name in hooks.STAGE_MODULES:
                self.manager.add_hookspecs(import_module(name))
            for specs in self._registry.stage_specs():
                self._add_stage_specs(self.manager, specs)
        self.register(_CoreDefaults(), "core")

    def end(self) -> None:
        """Forget every plugin."""
        self.manager = self._by_stage = None
        self._callers.clear()
        self._defaults.clear()
        self._plugins.clear()

    def register(self, plugin: object, name: str) -> None:
        """Add the implementations of an object, around those that are there.

        Raises:
            SessionError: one does not fit its stage.
        """
        assert self.manager is not None
        if self._by_stage is None:
            try:
                self.manager.register(plugin, name=name)
            except pluggy.PluginValidationError as error:
                why = _explain_validation(self.manager, plugin, error)
                raise SessionError(f"{name}: {why}") from error
        else:
            self._by_stage.clear()
        self._plugins[name] = plugin
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
                for feature in self._features
                if feature.__module__.partition(".")[0] == package or feature.hooks().keys() & {*specs.stages}
            ]
            if users:
                raise SessionError(
                    f"{', '.join(users)}: the stages of {specs.module} cannot be loaded: {describe(error)}"
                ) from error

    def check_unknown(self) -> None:
        """Refuse implementations of stages that nobody specifies.

        Raises:
            SessionError: names the plugin and the stage.
        """
        assert self.manager is not None
        try:
            self.manager.check_pending()
        except pluggy.PluginValidationError as error:
            owner = next((n for n, p in self._plugins.items() if p is error.plugin), "a plugin")
            raise SessionError(f"{owner}: {error}") from error

    def run(self, stage: str, arguments: Mapping[str, Any]) -> Any:
        """Call a stage; an exception gets a note that says which feature and stage it came from."""
        caller = self._callers.get(stage)
        if caller is None:
            caller = self._caller(stage)
        try:
            return caller(session=self._session, **arguments)
        except BaseException as error:
            self.failed = True
            if isinstance(error, Exception):
                self._refuse_yields(error, stage)
                self._annotate(error, stage)
            raise

    def _caller(self, stage: str) -> Any:
        if self.manager is None:
            raise SessionError(f"stage {stage}: the session is closed")
        caller = getattr(self._manager_of(stage).hook, stage, None)
        if caller is None or not caller.spec:
            raise SessionError(f"no stage {stage!r}")
        self._callers[stage] = caller
        return caller

    def _manager_of(self, stage: str) -> pluggy.PluginManager:
        """Return the manager of a stage: the one of all stages, or while validating one of its own."""
        assert self.manager is not None
        if self._by_stage is None:
            return self.manager
        if stage not in self._by_stage:
            self._by_stage[stage] = stage_manager(stage, self._registry, self._plugins)
        return self._by_stage[stage]

    def default(self, stage: str) -> Any:
        """Return the caller of a stage without features and probes."""
        caller = self._defaults.get(stage)
        if caller is None:
            if self.manager is None:
                raise SessionError(f"stage {stage}: the session is closed")
            manager = self._manager_of(stage)
            active = {feature.name for feature in self._features}
            removed = [
                manager.get_plugin(name)
                for name, plugin in self._plugins.items()
                if name in active or plugin in self._probes
            ]
            caller = manager.subset_hook_caller(stage, [plugin for plugin in removed if plugin is not None])
            self._defaults[stage] = caller
        return caller

    def implementations(self, stage: str) -> list[str]:
        """Return who implements a stage, outermost wrapper first, the host's default last."""
        hook_implementations = self._caller(stage).get_hookimpls()
        return [implementation.plugin_name for implementation in reversed(hook_implementations)]

    def _refuse_yields(self, error: Exception, stage: str) -> None:
        """Name the feature of a wrapper that yields twice, or not at all, which pluggy refuses by its source.

        Raises:
            SessionError: ``error`` is such a refusal of a feature's wrapper.
        """
        text = str(error)
        if not isinstance(error, RuntimeError) or not text.startswith("wrap_controller at "):
            return
        for feature in self._features:
            code = getattr(feature.hooks().get(stage), "__code__", None)
            if code is not None and f" {code.co_filename}:{code.co_firstlineno} " in text:
                wrong = "yields a second time" if text.endswith("second yield") else "ends without a yield"
                package = package_of(feature, self._registry)
                refusal = SessionError(
                    f"feature {feature.name!r} of {package}: its wrapper of stage {stage!r} "
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
        classes = {feature.__module__: feature for feature in self._features}
        for frame in reversed(frames):
            instance = frame.f_locals.get("self")
            if isinstance(instance, Feature):
                return f"feature {instance.name!r}"
            module = frame.f_globals.get("__name__", "")
            if module in classes:
                return f"feature {classes[module].name!r}"
        prefixes = {f.__module__.partition(".")[0]: f for f in self._features}
        for frame in reversed(frames):
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package in prefixes and package != "mindspeed_core":
                return f"a feature of package {package!r}"
        return f"host {self._host.name!r}"


def package_of(feature: type[Feature], registry: Registry) -> str:
    """Return distribution and version of a feature, or its module where no package is installed."""
    record = registry.features.get(feature.name)
    return f"{record.dist} {record.version}" if record is not None else feature.__module__


def made(feature: type[Feature], registry: Registry) -> Feature:
    """Make the instance of a feature.

    Raises:
        SessionError: its constructor fails; names the feature and its package.
    """
    try:
        return feature()
    except Exception as error:
        raise SessionError(
            f"feature {feature.name!r}: its __init__() fails in {package_of(feature, registry)}: "
            f"{describe(error, feature.__module__.partition('.')[0])}. A session makes each active "
            "feature once, without arguments"
        ) from error


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


_known: WeakKeyDictionary[Registry, set[Hashable]] = WeakKeyDictionary()


def known_fits(registry: Registry) -> set[Hashable]:
    """Return the sets of plugins of a registry that were found to fit; may be added to."""
    return _known.setdefault(registry, set())


def stage_manager(stage: str, registry: Registry, plugins: Mapping[str, object]) -> pluggy.PluginManager:
    """Return a manager of one stage, with those of the plugins that implement it, in the order given.

    Args:
        stage: its name; one that nobody specifies gives a manager without hooks.
        registry: whose plugins publish further stages.
        plugins: every plugin of a session by name, in order of registration; known to fit.
    """
    manager = pluggy.PluginManager(PROJECT)
    specified = _specification(stage, registry)
    if specified is None:
        return manager
    specifications: Any = _Holder(stage, specified)
    manager.add_hookspecs(specifications)
    for name, plugin in plugins.items():
        implementation = getattr(plugin, stage, None)
        if getattr(implementation, PROJECT + "_impl", None) is not None:
            # Nothing but the stage is looked at: a plugin has a hundred other attributes.
            manager.register(_Holder(stage, implementation), name=name)
    return manager


class _Holder:
    """An object with one attribute, which is all that pluggy looks at."""

    def __init__(self, name: str, value: object) -> None:
        setattr(self, name, value)

    def __dir__(self) -> Iterable[str]:
        return vars(self)


def _specification(stage: str, registry: Registry) -> Callable[..., Any] | None:
    specification = core_specifications().get(stage)
    for specs in registry.stage_specs() if specification is None else ():
        if stage in specs.stages:
            specification = getattr(import_module(specs.module), stage, None)
    return specification
