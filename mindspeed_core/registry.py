"""Installed features, slots, stages, hosts, platforms and extension points, read from entry points.

One broken plugin never takes others down: what cannot be loaded or is declared wrongly becomes a
`BrokenPlugin` record, and only asking for it is an error. Declarations are imported here, implementations are
not, so that neither torch nor megatron is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.declaration_checks import Declared, FeatureRecord
from mindspeed_core.discovery.entry_points import (
    COMMANDS,
    FEATURES,
    HOSTS,
    PLATFORMS,
    TRAIN_COMMANDS,
    BrokenPlugin,
    Installed,
    Source,
    broken,
    describe,
    iterate,
    load_object,
)
from mindspeed_core.discovery.extensions import Extensions, not_installed
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.discovery.stages import Stage
from mindspeed_core.errors import UserError
from mindspeed_core.feature import ExtensionPoint, Flag, Slot, StageSpecs
from mindspeed_core.platforms.platform import Platform

if TYPE_CHECKING:
    from mindspeed_core.flags.entries import ParsedArguments
    from mindspeed_core.flags.notes import FlagNote
    from mindspeed_core.resolver.plan import Plan

__all__ = ["BrokenPlugin", "FeatureRecord", "Registry", "RegistryError"]


class RegistryError(UserError):
    """A host, platform or extension point that is asked for is not installed or cannot be loaded."""


class Registry:
    """Everything installed; immutable apart from hosts, platforms and extensions, which load on first use.

    Attributes:
        installed: the entry points it was read from; None where they are read when they are needed.
        flag_sets: flags of each host that was parsed for, kept by `mindspeed_core.flags.flag_set`.
    """

    def __init__(
        self,
        declared: Sequence[tuple[Source, Sequence[Any]]] = (),
        *,
        broken_sources: Sequence[BrokenPlugin] = (),
        platforms: Sequence[Source] = (),
        hosts: Sequence[Source] = (),
        commands: Sequence[Source] = (),
        installed: Installed | None = None,
    ) -> None:
        """Check declarations against each other; use `discover` or `of`.

        Args:
            declared: per entry point what it declares.
            broken_sources: entry points that could not be loaded.
            platforms: entry points of platforms.
            hosts: entry points of hosts.
            commands: entry points of sub-commands, only counted among the distributions.
            installed: where entry points of extensions are looked up; None reads them when they are needed.
        """
        self._declared = Declared(declared, broken_sources)
        self._broken = self._declared.broken
        self._points = self._declared.points
        self.installed = installed
        self._extensions: dict[str, Extensions] = {}
        self._platforms = _by_name(platforms)
        self._platform_classes = self._declared.platforms
        self._hosts = _by_name(hosts)
        self._host_declarations = self._declared.hosts
        self._host_flags: dict[str, tuple[Flag, ...]] = {}
        self.flag_sets: dict[str, Any] = {}
        self._packages: dict[str, tuple[str, set[str]]] = {}
        for source in (*(s for s, _ in declared), *platforms, *hosts, *commands):
            self._packages.setdefault(source.dist, (source.version, set()))[1].add(source.package)
        for record in broken_sources:
            self._packages.setdefault(record.dist, (record.version, set()))

    @classmethod
    def discover(cls) -> Registry:
        """Read the entry points of everything that is installed, and load declarations."""
        declared: list[tuple[Source, list[Any]]] = []
        installed = Installed()
        failed = installed.damaged
        with installed.shared():
            for source in installed.sources(FEATURES):
                try:
                    declared.append((source, iterate(source.load())))
                except (Exception, SystemExit) as error:
                    failed.append(broken(source, error))
        return cls(
            declared,
            broken_sources=failed,
            platforms=installed.sources(PLATFORMS),
            hosts=installed.sources(HOSTS),
            commands=installed.sources(COMMANDS, TRAIN_COMMANDS),
            installed=installed,
        )

    @classmethod
    def of(cls, declarations: Iterable[Any], dist: str = "test", version: str = "0") -> Registry:
        """A registry of the given declarations instead of the installed features.

        Hosts and platforms are the installed ones, plus those among the declarations (every `HostDeclaration`
        and subclass of `Platform`), which win.

        Args:
            declarations: what an entry point would name.
            dist: the distribution that is said to ship them.
            version: its version.
        """
        return cls.of_distributions({dist: (version, declarations)})

    @classmethod
    def of_distributions(cls, shipped: Mapping[str, tuple[str, Iterable[Any]]]) -> Registry:
        """A registry of several made-up distributions, ``{dist: (version, declarations)}``."""
        declared: list[tuple[Source, list[Any]]] = []
        failed: list[BrokenPlugin] = []
        for dist, (version, declarations) in shipped.items():
            source = Source(dist, version, dist, dist.replace("-", "_"))
            try:
                declared.append((source, iterate(declarations)))
            except (Exception, SystemExit) as error:
                failed.append(broken(source, error))
        installed = Installed()
        return cls(
            declared,
            broken_sources=failed,
            platforms=installed.sources(PLATFORMS),
            hosts=installed.sources(HOSTS),
            installed=installed,
        )

    @property
    def features(self) -> Mapping[str, FeatureRecord]:
        """Every sound feature by name, sorted by family and name."""
        return self._declared.features

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Every slot of the core and of plugins by name."""
        return self._declared.slots

    @property
    def broken(self) -> tuple[BrokenPlugin, ...]:
        """Installed features and packages that cannot be used."""
        return tuple(self._broken)

    @property
    def broken_flags(self) -> Mapping[str, BrokenPlugin]:
        """Option strings of broken features, as far as they are known."""
        return self._declared.broken_flags

    @property
    def shared_with_broken(self) -> Mapping[str, BrokenPlugin]:
        """Option strings of sound features that a broken feature declares too."""
        return self._declared.shared_flags

    @property
    def stages(self) -> Mapping[str, Stage]:
        """Every stage of the core and of plugins by name."""
        return self._declared.stages

    def stage_specs(self) -> tuple[StageSpecs, ...]:
        """Hook specifications that plugins publish."""
        return tuple(self._declared.stage_specs)

    def extension_points(self) -> Mapping[str, ExtensionPoint]:
        """The extension points of plugins by name."""
        return self._points

    def extension_names(self, name: str) -> tuple[str, ...]:
        """Return the names of what packages contribute to an extension point; none is loaded for this.

        Empty where no installed plugin has such a point.
        """
        return self._extensions_of(name).names() if name in self._points else ()

    def extensions(self, name: str) -> Mapping[str, Any]:
        """Return what packages contribute to an extension point, by entry point name; loaded once.

        What cannot be loaded or is refused by the point's check is recorded in `broken` and left out.

        Raises:
            RegistryError: no installed plugin has such an extension point.
        """
        extensions = self._extensions_of(name)
        known = len(extensions.broken)
        loaded = extensions.sound()
        self._broken += extensions.broken[known:]
        return loaded

    def _extensions_of(self, name: str) -> Extensions:
        if name not in self._points:
            raise RegistryError(not_installed("extension point", name, self._points))
        if name not in self._extensions:
            self._extensions[name] = Extensions(self._points[name], self.installed)
        return self._extensions[name]

    def platform_names(self) -> tuple[str, ...]:
        """Names of installed platforms; none is loaded for this."""
        return tuple(sorted({*self._platforms, *self._platform_classes}))

    def platform(self, name: str) -> type[Platform]:
        """The class of an installed platform.

        Raises:
            RegistryError: it is not installed, or cannot be loaded.
        """
        if name not in self._platform_classes:
            loaded = self._load_one("platform", name, self._platforms)
            if not (isinstance(loaded, type) and issubclass(loaded, Platform)):
                raise RegistryError(f"platform {name!r}: {loaded!r} is not a subclass of Platform")
            self._platform_classes[name] = loaded
        return self._platform_classes[name]

    def host_names(self) -> tuple[str, ...]:
        """Names of installed hosts; none is loaded for this."""
        return tuple(sorted({*self._hosts, *self._host_declarations}))

    def host(self, name: str) -> HostDeclaration:
        """The declaration of an installed host.

        Raises:
            RegistryError: it is not installed, or cannot be loaded.
        """
        if name not in self._host_declarations:
            loaded = self._load_one("host", name, self._hosts)
            if not isinstance(loaded, HostDeclaration):
                raise RegistryError(f"host {name!r}: {loaded!r} is not a HostDeclaration")
            self._host_declarations[name] = loaded
        return self._host_declarations[name]

    def host_flags(self, name: str) -> tuple[Flag, ...]:
        """The flags of an installed host.

        Raises:
            RegistryError: the host is not installed, or its flags cannot be loaded.
        """
        if name not in self._host_flags:
            host = self.host(name)
            try:
                self._host_flags[name] = tuple(load_object(host.flags)()) if host.flags else ()
            except (Exception, SystemExit) as error:
                reason = f"its flags cannot be loaded: {describe(error)}"
                raise RegistryError(f"host {name!r}: {reason}") from error
        return self._host_flags[name]

    def why_absent(self, host: str, option: str) -> str:
        """Return why an installed host lacks a flag; empty when it does not say."""
        declared = self.host(host).absent
        return str(load_object(declared)(option)) if declared else ""

    def host_notes(self, host: str, args: Any) -> tuple[str, ...]:
        """Return the notes of an installed host about arguments, one sentence each."""
        declared = self.host(host).notes if host in self.host_names() else ""
        return tuple(load_object(declared)(args)) if declared else ()

    def complete_arguments(
        self, host: str, parsed: ParsedArguments, mode: str = "train"
    ) -> tuple[FlagNote, ...]:
        """Let an installed host complete arguments before the plan is made, and return a note on each flag.

        Changes the arguments and their provenance.

        Args:
            host: name of the host.
            parsed: the arguments.
            mode: ``train`` or ``inference``.

        Raises:
            mindspeed_core.errors.UserError: what they are filled in from cannot be read.
        """
        if host not in self.host_names():
            return ()
        declaration, notes = self.host(host), []
        if declaration.completes:
            notes += load_object(declaration.completes)(parsed.args, parsed.provenance, self._declares)
        if declaration.infers and mode == "inference":
            notes += load_object(declaration.infers)(parsed.args, parsed.provenance)
        return tuple(notes)

    def _declares(self, option: str, value: Any) -> bool:
        """Return whether an installed feature declares an option, and with choices this one of them."""
        flags = (flag for record in self.features.values() for flag in record.cls.flags)
        return any(option in flag.options and (not flag.choices or value in flag.choices) for flag in flags)

    def stand_downs(self, host: str, args: Any, plan: Plan) -> tuple[FlagNote, ...]:
        """Let flags stand down that an installed host cannot act on, and return a note on each.

        Changes ``args``.
        """
        declared = self.host(host).stand_downs if host in self.host_names() else ""
        if not declared:
            return ()
        classes = (self.features[name].cls for name in plan.names)
        claimed = frozenset(option for cls in classes for flag in cls.flags for option in flag.options)
        kinds = self.platform(plan.platform).kinds()
        return tuple(load_object(declared)(args, claimed, kinds))

    def _load_one(self, kind: str, name: str, sources: Mapping[str, list[Source]]) -> Any:
        claimed = sources.get(name)
        if not claimed:
            raise RegistryError(not_installed(kind, name, sources))
        if len(claimed) > 1:
            owners = " and ".join(f"{s.dist} {s.version}" for s in claimed)
            raise RegistryError(f"{kind} {name!r} is shipped by {owners}; pip uninstall one of them")
        try:
            return claimed[0].load()
        except (Exception, SystemExit) as error:
            record = broken(claimed[0], error)
            if record not in self._broken:
                self._broken.append(record)
            raise RegistryError(f"{kind} {name!r}: {record}; {record.remedy}") from error

    def distributions(self) -> Mapping[str, str]:
        """Version of every distribution that has an entry point of ours."""
        return {dist: version for dist, (version, _) in sorted(self._packages.items())}

    def packages(self) -> Mapping[str, tuple[str, ...]]:
        """Top-level import packages of every distribution that has an entry point of ours."""
        return {dist: tuple(sorted(names)) for dist, (_, names) in sorted(self._packages.items())}


def _by_name(sources: Sequence[Source]) -> dict[str, list[Source]]:
    named: dict[str, list[Source]] = {}
    for source in sources:
        named.setdefault(source.name, []).append(source)
    return named
