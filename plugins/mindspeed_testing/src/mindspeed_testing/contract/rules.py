"""Building blocks of the contract's rules: the distribution under test, a check, a violation."""

from __future__ import annotations

import warnings
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
    Installed,
    Source,
)
from mindspeed_core.errors import UserError
from mindspeed_core.feature import Feature, Scenario
from mindspeed_core.hooks.versions import API_VERSION, parsed
from mindspeed_core.platforms.selection import choose_platform
from mindspeed_core.registry import FeatureRecord, Registry

FIRST = "1.0"
"""The hook interface whose contract every package is held to."""
PROOFS = "1.1"
"""The one since which proofs say what sides do not share, methods answer anywhere, roles are stated."""


class Violation(AssertionError):
    """A plugin does not keep a rule of the contract; the message says what to change."""


class NewerRuleWarning(UserWarning):
    """A plugin does not keep a rule that is newer than the hook interface it was written for."""


@dataclass(frozen=True)
class Wrong:
    """Something that a rule found.

    Attributes:
        text: one sentence that says what to change.
        since: the hook interface whose packages are held to it.
    """

    text: str
    since: str = FIRST


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


def hold(
    rule: Callable[..., Iterator[str | Wrong]], *subjects: object, written_for: str, since: str = FIRST
) -> None:
    """Raise one `Violation` with everything that a rule finds; warn of what only newer packages are held to.

    Args:
        rule: what yields a sentence, or a `Wrong` with a version of its own.
        subjects: its arguments.
        written_for: the hook interface that the package was written for.
        since: that of plain sentences.

    Raises:
        Violation: the package does not keep what its hook interface demands.
    """
    wrong = [item if isinstance(item, Wrong) else Wrong(item, since) for item in rule(*subjects)]
    newer = [item for item in wrong if parsed(item.since) > parsed(written_for)]
    for item in newer:
        warnings.warn(
            NewerRuleWarning(
                f"{item.text} (a rule for packages of hook interface {item.since} or later; this one is for "
                f"{written_for})"
            ),
            stacklevel=2,
        )
    if len(newer) < len(wrong):
        raise Violation("\n".join(item.text for item in wrong if item not in newer))


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

    @property
    def written_for(self) -> str:
        """Return the hook interface that the distribution was written for; the newest without features."""
        stated = {record.hook_api for record in self.features()}
        return max(stated, key=parsed, default=API_VERSION)

    def sources(self, group: str) -> list[Source]:
        """Return its entry points of a group."""
        return [source for source in Installed().sources(group) if _same(source.dist, self.dist)]

    def runs_here(self, feature: type[Feature]) -> Iterator[Scenario]:
        """Return the feature's scenarios that apply to the platform."""
        kinds = self.registry.platform(self.platform).kinds()
        for scenario in feature.verify:
            if kinds & {*(scenario.platforms or feature.platforms)}:
                yield scenario


def _same(name: str, other: str) -> bool:
    return canonicalize_name(name) == canonicalize_name(other)
