"""The pages of flags: one for each family, with an anchor, the default and the readers of each flag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from feature_links import manual_link
from tables import code, codes, flag_default, flag_value, table

from mindspeed_core.flags.core import CORE_OWNER
from mindspeed_core.flags.flag_set import FlagEntry, flag_set
from mindspeed_core.registry import Registry

HOST = "standalone"
FLAGS = "docs/reference/flags"
"""Place of the families' pages; the list of families lies beside it."""


@dataclass(frozen=True)
class Family:
    """Flags that stand on one page.

    Attributes:
        title: group in ``--help``, or the family of the features.
        package: distribution that brings them; empty for flags of the training program and of every host.
        entries: in the order of ``--help``.
    """

    title: str
    package: str
    entries: tuple[FlagEntry, ...]

    @property
    def slug(self) -> str:
        """Return the name of the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def path(self) -> str:
        """Return the path of the page in the repository."""
        return f"{FLAGS}/{self.slug}.md"


def families(registry: Registry) -> list[Family]:
    """Every flag under its family, in the order of ``--help``.

    Raises:
        ValueError: two families would have the same page.
    """
    groups: dict[tuple[str, str], list[FlagEntry]] = {}
    for entry in flag_set(registry, HOST).entries:
        groups.setdefault(_family(entry, registry), []).append(entry)
    found = [Family(title, package, tuple(entries)) for (title, package), entries in groups.items()]
    if len({family.slug for family in found}) < len(found):
        raise ValueError(f"two families of flags share a name: {[family.title for family in found]}")
    return found


def _family(entry: FlagEntry, registry: Registry) -> tuple[str, str]:
    record = registry.features.get(entry.owner)
    if record is not None:
        return record.cls.family, record.dist
    return "every host" if entry.owner == CORE_OWNER else entry.heading, ""


def flag_anchor(option: str) -> str:
    """The anchor of a flag on its page."""
    return option.lstrip("-")


def flag_places(registry: Registry) -> dict[str, str]:
    """The page and anchor of every option."""
    return {
        option: f"{family.path}#{flag_anchor(entry.flag.name)}"
        for family in families(registry)
        for entry in family.entries
        for option in entry.flag.options
    }


def flags_page(registry: Registry) -> str:
    """The list of families."""
    found = families(registry)
    lines = [
        "# Flags",
        "",
        f"{sum(len(family.entries) for family in found)} flags on a page for each family, every flag with",
        "its default and with who reads it. Names and meaning are Megatron-LM's wherever Megatron-LM has the",
        "flag. `mindspeed-train --help FAMILY` prints the same for what is installed, and",
        "`mindspeed-train --help-flag FLAG` explains one flag.",
        "",
        *table(
            ("family", "flags", "comes with"),
            (
                (
                    f"[{family.title}](flags/{family.slug}.md)",
                    len(family.entries),
                    code(family.package or "mindspeed-train"),
                )
                for family in found
            ),
        ),
    ]
    return "\n".join(lines)


def family_pages(registry: Registry) -> Mapping[str, str]:
    """The page of each family by its name below the folder of generated pages."""
    return {f"flags/{family.slug}": family_page(family, registry) for family in families(registry)}


def family_page(family: Family, registry: Registry) -> str:
    """The flags of one family."""
    source = f"of {code(family.package)}" if family.package else "of the training program"
    if family.title == "every host":
        source = "that every way of training knows"
    lines = [
        f"# Flags: {family.title}",
        "",
        f"Flags {source} ([all families](../flags.md)).",
        "",
        *table(
            ("flag", "meaning", "value", "default", "read by"),
            (
                (
                    f'<a id="{flag_anchor(entry.flag.name)}"></a>{codes(entry.flag.options)}',
                    entry.flag.help,
                    flag_value(entry.flag),
                    flag_default(entry.flag),
                    _readers(entry, registry),
                )
                for entry in family.entries
            ),
        ),
    ]
    return "\n".join(lines)


def _readers(entry: FlagEntry, registry: Registry) -> str:
    """The owner of a flag, and the features that use it too."""
    owners = dict.fromkeys([entry.owner, *(adoption.owner for adoption in entry.adoptions)])
    links = []
    for owner in owners:
        record = registry.features.get(owner)
        if record is not None:
            links.append(manual_link(record.cls, "../../.."))
        else:
            links.append("the core" if owner == CORE_OWNER else owner.removeprefix("host "))
    return ", ".join(links)
