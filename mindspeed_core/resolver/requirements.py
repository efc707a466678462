"""PEP 508 requirements with one more marker variable, ``platform`` (``"torch_npu>=2.6; platform == 'npu'"``).

The standard marker grammar does not know our platforms, so a marker that mentions ``platform`` is read here;
every other marker and all version arithmetic is `packaging`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from mindspeed_core.discovery.installed import installed_version

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

_PLAIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)>=(\d+(?:\.\d+)*)(?:; platform == '([a-z]+)')?\Z")
_CLAUSE = re.compile(r"""\s*platform\s*(==|!=|not\s+in|in)\s*(?:'([^']*)'|"([^"]*)")\s*\Z""")
_MENTIONED = re.compile(r"(?<![\w.])platform(?![\w.])")


def unmet(text: str, platform: str, versions: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """Return why a requirement does not hold, and the way out; None when it holds or does not apply.

    Versions of installed distributions are by default asked of the environment.
    """
    if _holds_plainly(text, platform, versions):
        return None
    try:
        requirement = _parse(text, platform)
    except ValueError as error:
        return f"its requirement {text!r} cannot be read: {error}", "report it to its authors"
    if requirement is None:
        return None
    version = installed_version(requirement.name) if versions is None else _lookup(versions, requirement.name)
    wanted = f"{requirement.name}{requirement.specifier}"
    if not version:
        return f"needs {wanted}, which is not installed", f"pip install '{wanted}'"
    # A development build such as 2.7.1+git or 0.17.0rc0 is what people on new hardware have.
    if not _contains(requirement.specifier, version):
        return f"needs {wanted}, found {version}", f"pip install '{wanted}'"
    return None


def _holds_plainly(text: str, platform: str, versions: Mapping[str, str] | None) -> bool:
    """Return whether a requirement of the commonest form holds or does not apply, for which packaging (the
    import takes 25 ms) need not be asked: it may still hold where this says no.
    """
    plain = _PLAIN.match(text)
    if plain is None:
        return False
    name, least, only = plain.groups()
    if only not in (None, platform):
        return True
    version = installed_version(name) if versions is None else versions.get(name, "")
    release = version.split(".")
    return all(map(str.isdecimal, release)) and [*map(int, release)] >= [*map(int, least.split("."))]


@lru_cache(maxsize=4096)
def _contains(specifier: SpecifierSet, found: str) -> bool:
    return specifier.contains(found, prereleases=True)


@lru_cache(maxsize=4096)
def _parse(text: str, platform: str) -> Requirement | None:
    """Return the requirement without its marker, or ``None`` when the marker says it does not apply.

    Raises:
        ValueError: it cannot be read.
    """
    from packaging.requirements import Requirement

    body, _, marker = text.partition(";")
    applies = True
    if _MENTIONED.search(marker):
        applies = any(
            all(_clause(clause, platform) for clause in re.split(r"\band\b", alternative))
            for alternative in re.split(r"\bor\b", marker)
        )
        marker = ""
    requirement = Requirement(f"{body}; {marker}" if marker.strip() else body)
    if not applies or (requirement.marker is not None and not requirement.marker.evaluate()):
        return None
    return requirement


def _clause(clause: str, platform: str) -> bool:
    match = _CLAUSE.match(clause)
    if match is None:
        from packaging.markers import Marker

        return Marker(clause.strip()).evaluate()
    operator, value = match.group(1).split(), match.group(2) or match.group(3) or ""
    names = value.replace(",", " ").split()
    if operator == ["=="]:
        return platform == value
    if operator == ["!="]:
        return platform != value
    return (platform in names) != (len(operator) == 2)


def _lookup(versions: Mapping[str, str], name: str) -> str:
    from packaging.utils import canonicalize_name as normalized

    if name in versions:
        return versions[name]
    wanted = normalized(name)
    return next((version for dist, version in versions.items() if normalized(dist) == wanted), "")
