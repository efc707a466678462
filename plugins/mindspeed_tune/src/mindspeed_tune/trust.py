"""Trust in composed numbers: those count of cells whose members agree with dry runs of their own.

Nothing proves for a cell that its small pipeline tells everything. So members of it are planned directly, and
what is apart by more than is expected takes the cell's composed numbers out of the ranking: from then on only
members with dry runs of their own count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_tune.candidate import (
    CHUNKS,
    GRADIENT_OVERLAP,
    LAYERS_PER_CHUNK,
    PARAMETER_OVERLAP,
    PIPELINE,
    Candidate,
)
from mindspeed_tune.cells import CellKey
from mindspeed_tune.estimate import Estimate

BYTES_APART, SECONDS_APART = 0.005, 0.03
"""Distances of a composed number from the candidate's own plan that are expected."""
_PADDING = 2.0**16
"""Bytes that buffers of the smallest models are padded by, which no part of a real one is."""
Family = tuple[CellKey, bool, bool, bool, bool]


def family_of(candidate: Candidate) -> Family:
    """Return the members of a cell that are composed alike.

    With and without a pipeline, chunks and overlap other arithmetic is used.
    """
    settings = candidate.settings
    return (
        CellKey.of(candidate),
        candidate.size(PIPELINE) > 1,
        bool(settings.get(LAYERS_PER_CHUNK) or settings.get(CHUNKS)),
        bool(settings.get(GRADIENT_OVERLAP)),
        bool(settings.get(PARAMETER_OVERLAP)),
    )


@dataclass(frozen=True)
class Apart:
    """The distance of a candidate's composed numbers from those of its own dry run.

    Attributes:
        name: of the candidate.
        bytes: part of the planned bytes.
        seconds: part of the planned seconds.
        agrees: both are as close as is expected.
    """

    name: str
    bytes: float
    seconds: float
    agrees: bool

    @classmethod
    def of(cls, candidate: Candidate, composed: Estimate, planned: Estimate) -> Apart:
        """Compare a composed with a planned estimate."""
        size = composed.exact - planned.exact
        seconds = composed.seconds / planned.seconds - 1
        near = abs(size) <= BYTES_APART * planned.exact + _PADDING
        return cls(candidate.label, size / planned.exact, seconds, near and abs(seconds) <= SECONDS_APART)

    def __str__(self) -> str:
        """Return the distances for a reader."""
        return f"bytes {self.bytes:+.2%}, seconds {self.seconds:+.1%} for {self.name}"


@dataclass
class Trust:
    """Findings of dry runs about composed numbers, by family.

    Attributes:
        compared: every comparison, by name of the candidate.
    """

    compared: dict[str, Apart] = field(default_factory=dict)
    _checked: dict[Family, list[Apart]] = field(default_factory=dict)
    _ratios: dict[Family, list[float]] = field(default_factory=dict)

    def note(self, candidate: Candidate, composed: Estimate, planned: Estimate) -> None:
        """Compare a candidate's composed numbers with those of its own dry run."""
        if candidate.name in self.compared:
            return
        family = family_of(candidate)
        found = self.compared[candidate.name] = Apart.of(candidate, composed, planned)
        self._checked.setdefault(family, []).append(found)
        self._ratios.setdefault(family, []).append(planned.seconds / composed.seconds)

    def is_checked(self, candidate: Candidate) -> bool:
        """Return whether a member of the candidate's family had a dry run of its own."""
        return family_of(candidate) in self._checked

    def why_not(self, candidate: Candidate) -> str:
        """Return why the candidate's composed numbers do not count; empty where they do."""
        wrong = [one for one in self._checked.get(family_of(candidate), ()) if not one.agrees]
        return (
            f"composed numbers of its cell are off ({wrong[0]}): only its own dry run counts" if wrong else ""
        )

    def corrected(self, candidate: Candidate, seconds: float) -> float:
        """Return composed seconds as those of its family were off, to choose what is planned next."""
        ratios = self._ratios.get(family_of(candidate))
        off = sum(ratios) / len(ratios) if ratios else 1.0
        return seconds * (off if abs(off - 1) > SECONDS_APART else 1.0)

    def as_json(self, candidates: Iterable[Candidate]) -> Mapping[str, Any]:
        """Return how many families of the candidates are checked, and those that do not agree."""
        families = {family_of(one): one for one in candidates}
        wrong = [why for one in families.values() if (why := self.why_not(one))]
        return {
            "families": len(families),
            "checked": sum(family in self._checked for family in families),
            "direct": wrong,
        }
