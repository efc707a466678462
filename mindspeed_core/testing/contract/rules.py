"""Building blocks of the contract's rules: the distribution under test, a check, a violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution

from packaging.utils import canonicalize_name

from mindspeed_core.discovery.entry_points import (
    COMMANDS,
    FEATURES,
    HOSTS,
    PLATFORMS,
    TRAIN_COMMANDS,
    Source,
    sources,
)
from mindspeed_core.errors import UserError
from mindspeed_core.feature import Feature, Scenario
from mindspeed_core.platforms.selection import choose_platform
from mindspeed_core.registry import FeatureRecord, Registry


class Violation(AssertionError):
    """A plugin does not keep a rule of the contract; the message says what to change."""


@dataclass(frozen=True)
class Check:
    """One rule, held against one thing.

    Attributes:
        rule: name of the rule.
        subject: what it is held against: the distribution, a feature, a proof, a platform, a host, a command.
        run: raises `Violation` where the rule is not kept.
    """

    rule: str
    subject: str
    run: Callable[[], None]

    def __call__(self) -> None:
        """Run it."""
        self.run()

    def __str__(self) -> str:
        """Return rule and subject."""
        return f"{self.rule}[{self.subject}]"


def hold(rule: Callable[..., Iterator[str]], *subjects: object) -> None:
    """Raise one `Violation` with every sentence of a rule, where it has any."""
    wrong = list(rule(*subjects))
    if wrong:
        raise Violation("\n".join(wrong))


@dataclass
class Contract:
    """A distribution and what is known about it while it is checked.

    Attributes:
        platform: name of the platform on which sessions are opened.
        proofs: run the scenarios of features too.
        left_out: what cannot be checked on this machine, one sentence each; filled by `all_checks`.
    """

    dist: str
    registry: Registry
    platform: str
    proofs: bool = True
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, dist: str, *, platform: str = "auto", proofs: bool = True) -> Contract:
        """Return the contract of an installed distribution.

        Raises:
            UserError: it is not installed, or announces nothing to mindspeed-core.
        """
        try:
            found = distribution(dist)
        except PackageNotFoundError:
            raise UserError(
                f"{dist!r} is not installed; install it first (pip install -e . in its folder), and give the "
                "name of the distribution, not of the package"
            ) from None
        registry = Registry.discover()
        name = next((d for d in registry.distributions() if _same(d, found.name)), "")
        if not name and not any(_same(record.dist, found.name) for record in registry.broken):
            groups = ", ".join((FEATURES, PLATFORMS, HOSTS, COMMANDS, TRAIN_COMMANDS))
            raise UserError(
                f"{dist!r} has no entry point of mindspeed-core; its pyproject.toml needs a table "
                f'[project.entry-points."{FEATURES}"] (groups: {groups})'
            )
        chosen, _ = choose_platform(platform, registry)
        return cls(name or found.name, registry, chosen, proofs)

    def features(self) -> list[FeatureRecord]:
        """Return the sound features of the distribution."""
        return [record for record in self.registry.features.values() if record.dist == self.dist]

    def sources(self, group: str) -> list[Source]:
        """Return its entry points of a group."""
        return [source for source in sources(group) if _same(source.dist, self.dist)]

    def runs_here(self, feature: type[Feature]) -> Iterator[Scenario]:
        """Return the feature's scenarios that apply to the platform."""
        kinds = self.registry.platform(self.platform).kinds()
        for scenario in feature.verify:
            if kinds & {*(scenario.platforms or feature.platforms)}:
                yield scenario


def _same(name: str, other: str) -> bool:
    return canonicalize_name(name) == canonicalize_name(other)
