"""The modules that features replace in a session, by role, and the message about one that replaces none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class Roles:
    """The roles of modules that one feature was concerned with on this rank.

    Attributes:
        sought: what it asked for.
        there: what the specifications had.
        replaced: what it replaced without containing it, each behind the roles around it
            (``layer.mlp.fc1``).
    """

    sought: set[str] = field(default_factory=set)
    there: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def add(self, sought: Iterable[str], there: Iterable[str], replaced: Iterable[str]) -> None:
        """Add the roles of one search."""
        self.sought.update(sought)
        self.there.update(there)
        self.replaced.update(replaced)


def nothing_matched(asked: Mapping[str, str], ranks: Iterable[Mapping[str, Roles]]) -> str:
    """Compose the message about features that have found none of their modules.

    Args:
        asked: the features, each with the flag that asked for it, or another reason.
        ranks: per rank the roles by feature.
    """
    together: dict[str, Roles] = {}
    for roles in ranks:
        for name in asked.keys() & roles.keys():
            together.setdefault(name, Roles()).add(roles[name].sought, roles[name].there, ())
    lines = [f"{', '.join(asked)}: active, but matched no module of this model on any rank."]
    lines += [
        f"{name} looked for {' '.join(sorted(roles.sought))}; there are {' '.join(sorted(roles.there))}."
        for name, roles in sorted(together.items())
        if roles.sought
    ]
    flags = sorted({why for why in asked.values() if why.startswith("--")})
    drop = f"Drop {' '.join(flags)}" if flags else "Drop the flag"
    lines.append(
        f"{drop}, or check that the model has the modules the feature works on (mindspeed-features show NAME)"
    )
    return " ".join(lines)
