"""Patches of megatron-core and torch: applied together, found everywhere they are held, taken back exactly.

One ledger per session. A symbol is changed in the namespace that defines it and in every module that imported
it by name; closing puts the original objects back (``is``, not ``==``) and says so when somebody else has
changed them in between. Declarations are `mindspeed_core.feature.Patch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.errors import PatchError
from mindspeed_core.feature import Patch
from mindspeed_core.runtime.patch_targets import (
    ABSENT,
    Holder,
    MissingTarget,
    callable_of,
    check_patchable,
    defined_at,
    holders,
    is_shared_by_name,
    like,
    load,
    locate,
)

_process_lock = threading.RLock()


@dataclass(frozen=True)
class AppliedPatch:
    """One applied patch, for listings.

    Attributes:
        target: ``package.module:Qual.name``, or the name of a setting.
        owner: the feature, host or platform that asked for it.
        kind: ``replace``, ``wrap``, ``add``, or ``setting`` (a call that has an undo).
        reason: why.
        holders: every place that was changed.
    """

    target: str
    owner: str
    kind: str
    reason: str
    holders: tuple[str, ...] = ()


@dataclass(frozen=True)
class SkippedPatch:
    """A patch that was left out, and why: optional and without a target, or nothing to add."""

    target: str
    owner: str
    why: str


@dataclass
class _Record:
    """One patched object: what it was, what it is made of now, and every place that holds it."""

    original: Any
    places: list[tuple[Holder, Any]]
    shared: bool
    current: Any = ABSENT
    replacement: Patch | None = None
    wraps: list[Patch] = field(default_factory=list)
    applied: list[AppliedPatch] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    elsewhere: dict[int, set[str]] = field(default_factory=dict)
    scanned: bool = False

    @property
    def owners(self) -> str:
        """Return the owners of its patches."""
        return ", ".join(dict.fromkeys(applied.owner for applied in self.applied))


@dataclass
class _Pending:
    """The change of a record by one call of `PatchLedger.apply`."""

    record: _Record
    places: list[tuple[Holder, Any]] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    raw: Any = ABSENT
    made: list[Any] = field(default_factory=list)
    replacement: Patch | None = None
    wraps: list[Patch] = field(default_factory=list)


@dataclass
class _Setting:
    """A change that is not an attribute, with the call that takes it back."""

    applied: AppliedPatch
    undo: Callable[[], object]


class PatchLedger:
    """The patches of one session, in order of application."""

    def __init__(self) -> None:
        """Start with nothing applied."""
        self._entries: list[_Record | _Setting] = []
        self._by_place: dict[tuple[int, str], _Record] = {}
        self.skipped: list[SkippedPatch] = []

    def apply(self, patches: Iterable[Patch], owner: str = "") -> None:
        """Apply patches together.

        A ``replace`` comes before every ``wrap`` of its target, whatever the order of declaration or calls.
        Of several wraps the first in the sequence is the outermost; those of a later call go around them.

        Args:
            patches: in plan order.
            owner: for patches that do not name theirs.

        Raises:
            PatchError: a target is missing, refused, of an unsupported version or replaced twice, or would be
                replaced everywhere by a name that was imported. Nothing of this call is applied then.
        """
        named = [patch if patch.owner else replace(patch, owner=owner or "unnamed") for patch in patches]
        with _process_lock:
            pending: list[_Pending] = []
            for patch in named:
                if self._applicable(patch):
                    self._collect(patch, pending)
            for change in pending:
                _compose(change)
            _find_holders(pending)
            for change in pending:
                _check_names(change)
            for change in pending:
                record = change.record
                record.places += change.places
                record.made += change.made
                record.replacement, record.wraps, record.scanned = change.replacement, change.wraps, True
                self._install(record, change.raw)
                record.applied += [AppliedPatch(p.target, p.owner, p.kind, p.reason) for p in change.patches]

    def setting(
        self, name: str, change: Callable[[], object], undo: Callable[[], object], *, owner: str, reason: str
    ) -> None:
        """Make a change that is not an attribute (a log filter, a compiler stance), and remember its undo.

        `revert` calls ``undo``, in reverse order among all changes; the listing shows ``name`` as the target.
        """
        change()
        self._entries.append(_Setting(AppliedPatch(name, owner, "setting", reason), undo))

    def listing(self) -> list[AppliedPatch]:
        """List everything that is applied, in order of application."""
        patches: list[AppliedPatch] = []
        for entry in self._entries:
            if isinstance(entry, _Setting):
                patches.append(entry.applied)
                continue
            labels = tuple(place.label for place, _ in entry.places)
            patches += [replace(applied, holders=labels) for applied in entry.applied]
        return patches

    def revert(self) -> None:
        """Take everything back, last first, and verify it.

        Raises:
            PatchError: lists every place that somebody else changed in between. All others are restored.
        """
        with _process_lock:
            differences: list[str] = []
            entries, self._entries = self._entries, []
            self._by_place = {}
            self.skipped = []
            _restore_late_holders([entry for entry in entries if isinstance(entry, _Record)])
            for entry in reversed(entries):
                if isinstance(entry, _Setting):
                    try:
                        entry.undo()
                    except Exception as error:
                        name, owner = entry.applied.target, entry.applied.owner
                        differences.append(f"{name} (set by {owner}): undoing it failed: {error!r}")
                    continue
                for place, before in reversed(entry.places):
                    where = f"{place.label} (patched by {entry.owners})"
                    if place.own() is not _stored(place, entry.current):
                        differences.append(f"{where}: somebody changed it after us")
                        continue
                    place.write(before)
                    if place.own() is not before:
                        differences.append(f"{where}: the original did not come back")
            if differences:
                raise PatchError("patches could not be taken back exactly:\n  " + "\n  ".join(differences))

    def _applicable(self, patch: Patch) -> bool:
        mismatch = _version_mismatch(patch.versions)
        if not mismatch:
            return True
        if patch.required:
            raise PatchError(
                f"{patch.owner}: the patch of {patch.target} was written for {patch.versions}, {mismatch}; "
                "install a version in that range, or turn the feature off"
            )
        self.skipped.append(
            SkippedPatch(patch.target, patch.owner, f"written for {patch.versions}, {mismatch}")
        )
        return False

    def _collect(self, patch: Patch, pending: list[_Pending]) -> None:
        """Find a patch's target and add the patch to what is pending for that object."""
        places: list[Holder] = []
        for target in (patch.target, *patch.also):
            try:
                place = locate(target, patch.owner)
                if place.key not in self._by_place:
                    if patch.kind == "add" and place.raw() is not ABSENT:
                        self.skipped.append(
                            SkippedPatch(target, patch.owner, "the name exists, nothing to add")
                        )
                        return
                    check_patchable(place, patch.owner, adding=patch.kind == "add")
            except MissingTarget as error:
                if patch.required:
                    raise
                self.skipped.append(SkippedPatch(target, patch.owner, str(error)))
                return
            places.append(place)
        change = self._change_of(places[0], pending)
        taken = {place.key for place, _ in (*change.record.places, *change.places)}
        change.places += [(place, place.own()) for place in places if place.key not in taken]
        change.patches.append(patch)

    def _change_of(self, place: Holder, pending: list[_Pending]) -> _Pending:
        """Return the pending change of the object at a place, which may be held under several names."""
        raw = place.raw()
        known = self._by_place.get(place.key)
        for change in pending:
            same_place = any(other.key == place.key for other, _ in change.places)
            same_object = change.record.shared and change.record.original is raw and known is None
            if change.record is known or same_place or same_object:
                return change
        record = known or _Record(raw, [], shared=raw is not ABSENT and is_shared_by_name(raw))
        pending.append(_Pending(record))
        return pending[-1]

    def _install(self, record: _Record, raw: Any) -> None:
        if not record.applied:
            self._entries.append(record)
        record.current = raw
        for place, _ in record.places:
            place.write(_stored(place, raw))
            self._by_place[place.key] = record


def _stored(place: Holder, raw: Any) -> Any:
    """Return what a place holds of a raw object: descriptors live in classes only."""
    if isinstance(raw, (staticmethod, classmethod)) and not isinstance(place.container, type):
        return raw.__func__
    return raw


def _compose(change: _Pending) -> None:
    """Make the new raw object of a record with further patches, without installing anything."""
    record = change.record
    replacement = record.replacement
    for patch in change.patches:
        if patch.kind == "wrap":
            continue
        if replacement is not None:
            raise PatchError(
                f"{patch.target} is replaced by both {replacement.owner} and {patch.owner}; "
                "only one of the two can be active"
            )
        replacement = patch
    wraps = record.wraps + [patch for patch in reversed(change.patches) if patch.kind == "wrap"]
    place = (record.places or change.places)[0][0]
    rebuild = replacement is not record.replacement or record.current is ABSENT
    raw = record.original if rebuild else record.current
    if rebuild and replacement is not None:
        new = load(replacement.new, replacement.owner, replacement.target)
        raw = like(record.original, new, place.container, place.name)
        change.made.append(raw)
    for patch in wraps if rebuild else wraps[len(record.wraps) :]:
        new = load(patch.new, patch.owner, patch.target)(callable_of(raw))
        if new is None:
            raise PatchError(f"{patch.owner}: the wrapper of {patch.target} returned None, not an object")
        raw = like(record.original, new, place.container, place.name)
        change.made.append(raw)
    change.raw, change.replacement, change.wraps = raw, replacement, wraps


def _find_holders(pending: Sequence[_Pending]) -> None:
    """Add every by-name holder of the originals to the changes, in one pass for all of them."""
    fresh = [change for change in pending if not change.record.scanned and change.record.shared]
    made = [value for change in pending for value in change.made if is_shared_by_name(value)]
    found = holders([*(change.record.original for change in fresh), *made])
    for change in pending:
        # A replacement is held by the package that defines it; its late importers are not ours to change.
        for value in change.made:
            change.record.elsewhere[id(value)] = {place.package for place in found.get(id(value), [])}
    for change in fresh:
        taken = {place.key for place, _ in change.places}
        original = change.record.original
        change.places += [
            (place, original) for place in found.get(id(original), []) if place.key not in taken
        ]


def _check_names(change: _Pending) -> None:
    """Refuse a replacement of an imported name that would replace the object under its other names too.

    Raises:
        PatchError: names the places that would change unasked.
    """
    places = [place for place, _ in (*change.record.places, *change.places)]
    for patch in change.patches:
        if patch.kind != "replace" or patch.every_name:
            continue
        own = [locate(target, patch.owner) for target in (patch.target, *patch.also)]
        # What a class holds is defined there.
        if isinstance(own[0].container, type):
            continue
        named = {place.key for place in own}
        others = [place.label for place in places if place.key not in named]
        where = defined_at(change.record.original)
        if others and where not in (patch.target, *patch.also):
            raise PatchError(
                f"{patch.owner}: the patch of {patch.target} would replace the same object as "
                f"{', '.join(sorted(others)[:5])} too; patch it where it is defined"
                + (f" ({where})" if where else "")
                + ", or set every_name=True to replace it everywhere"
            )


def _restore_late_holders(records: Sequence[_Record]) -> None:
    """Put originals into modules that were imported while patches were open and copied a patched object."""
    makers: dict[int, list[_Record]] = {}
    for record in records:
        if record.original is not ABSENT:
            for value in record.made:
                if is_shared_by_name(value):
                    makers.setdefault(id(value), []).append(record)
    made = [value for candidates in makers.values() for record in candidates for value in record.made]
    for identity, places in holders(made).items():
        for place in places:
            maker = _maker(makers.get(identity, []), place.name)
            if maker is None or any(place.key == known.key for known, _ in maker.places):
                continue
            if place.name != maker.places[0][0].name and place.name == getattr(place.own(), "__name__", ""):
                # Imported from where the replacement is defined, under a name that the original never had.
                continue
            if place.package not in maker.elsewhere[identity]:
                place.write(maker.original)


def _maker(candidates: Sequence[_Record], name: str) -> _Record | None:
    """Find the record whose replacement a late holder has; of several, the one of the same name."""
    for record in candidates:
        if record.places[0][0].name == name:
            return record
    return candidates[0] if candidates else None


def _version_mismatch(requirement: str) -> str:
    """Return why an installed version does not satisfy a requirement, or an empty string."""
    if not requirement:
        return ""
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement as error:
        return f"which is not a version requirement ({error})"
    installed = installed_version(parsed.name)
    if not installed:
        return f"but {parsed.name} is not installed"
    if parsed.specifier.contains(installed, prereleases=True):
        return ""
    return f"but {parsed.name} {installed} is installed"
