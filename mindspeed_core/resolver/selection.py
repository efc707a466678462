"""Selection of features: the requested and the implied ones, without those that cannot run here."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_core.feature import Feature, Requirement
from mindspeed_core.resolver.plan import HeldBack
from mindspeed_core.resolver.remedies import to_ask_for, to_meet
from mindspeed_core.resolver.request import Request, condition_text, parenthesized
from mindspeed_core.resolver.requirements import unmet


class Selection:
    """The features still in play.

    Attributes:
        why: for each feature in play the reason: a flag, or who implies it.
        held: features that were asked for and do nothing here, with the reason.
        failed: features that a problem was found with.
        taken: those of `held` whose part another feature does.
    """

    def __init__(self, request: Request, left_out: Iterable[HeldBack] = ()) -> None:
        self.request = request
        self.classes = request.index.classes
        self.why = request.why
        self.held: dict[str, HeldBack] = {held.name: held for held in left_out}
        self.failed: set[str] = set()
        self.taken: set[str] = set()

    def select(self) -> list[str]:
        """Return the names of the features that take part, in the registry's order."""
        for name in self._requested():
            self._activate(name, self.request.flag_of(name) or "default")
        self._close()
        self._take_over()
        self._suppress_dependents()
        return [name for name in self.classes if name in self.why and name not in self.failed]

    def _requested(self) -> list[str]:
        requested = []
        for name, cls in self.classes.items():
            if name in self.held:
                continue
            try:
                if cls.enabled(self.request.args):
                    requested.append(name)
            except (Exception, SystemExit) as error:
                why = self.request.failure(name, "enabled()", error)
                if self.request.flag_of(name):
                    self._fail(name, "E-ENABLED", why, self.request.ways_out(name))
                else:
                    self.held[name] = HeldBack(name, why, remedy=self.request.ways_out(name), broken=True)
        return requested

    def unasked(self, name: str) -> list[str]:
        """Return a feature and those that switch it on, where no flag asks for any of them; else nothing."""
        return [] if self.request.causing_flag(name) else self.request.chain(name)

    def _activate(self, name: str, why: str) -> bool:
        """Activate a feature unless level, mode or platform are against it; True when it is active."""
        if name in self.why:
            return True
        if name in self.held or name in self.failed:
            return False
        cls = self.classes[name]
        flag = self.request.flag_of(name)
        if cls.level > self.request.level:
            self.held[name] = HeldBack(
                name,
                f"it belongs to optimization level {cls.level}, the run has level {self.request.level}",
                flag,
                f"--optimization-level {cls.level}",
            )
            return False
        if self.request.mode not in cls.modes:
            return self._left_to_another_mode(name, cls, flag)
        if not self.request.kinds & {*cls.platforms}:
            return self._fall_back(name, cls, flag)
        try:
            idle = cls.idle(self.request.args)
        except (Exception, SystemExit) as error:
            self._fail(
                name, "E-ENABLED", self.request.failure(name, "idle()", error), self.request.ways_out(name)
            )
            return False
        if idle:
            self.held[name] = HeldBack(name, idle, flag, "nothing; the flag has no effect here")
            return False
        if cls.hosts and self.request.host not in cls.hosts:
            hosts = ", ".join(cls.hosts)
            host = self.request.host
            reason = f"it does not work in the training loop of host {host} (it works in: {hosts})"
            remedy = f"drop {flag}" if flag else f"use one of these hosts: {hosts}"
            self._fail(name, "E-HOST", reason, remedy)
            return False
        bad = [
            problem
            for package in cls.packages
            if (problem := unmet(package, self.request.kind, self.request.versions)) is not None
        ]
        for reason, remedy in bad:
            self._fail(name, "E-PACKAGE", reason, remedy)
        if not bad:
            self.why[name] = why
        return not bad

    def _fail(self, name: str, code: str, reason: str, remedy: str) -> None:
        """Report a problem that keeps a feature from taking part."""
        self.request.problem(code, name, reason, remedy)
        self.failed.add(name)

    def _fall_back(self, name: str, cls: type[Feature], flag: str) -> bool:
        supported = ", ".join(cls.platforms) or "none"
        if cls.fallback is None:
            reason = f"it does not run on platform {self.request.platform} (it runs on: {supported})"
            remedy = f"drop {flag}" if flag else f"choose one of these platforms with --platform: {supported}"
            self._fail(name, "E-PLATFORM", reason, remedy)
            return False
        other = cls.fallback.feature
        remedy = f"nothing; {other} takes over" if other else f"nothing; it runs on: {supported}"
        self.held[name] = HeldBack(name, cls.fallback.reason, flag, remedy)
        return self._let_take_over(name, other, f"on platform {self.request.platform}")

    def _left_to_another_mode(self, name: str, cls: type[Feature], flag: str) -> bool:
        """Hold a feature back in a mode that is not its own, and let the one that it names compute."""
        mode, other = self.request.mode, cls.mode_fallback
        if other is None:
            self.held[name] = HeldBack(
                name, f"it has no effect in mode {mode}", flag, "nothing; the flag is ignored"
            )
            return False
        remedy = f"nothing; {other.feature} takes over" if other.feature else "nothing; it is left out"
        self.held[name] = HeldBack(name, f"not in mode {mode}: {other.reason}", flag, remedy)
        return self._let_take_over(name, other.feature, f"in mode {mode}")

    def _let_take_over(self, name: str, other: str, where: str) -> bool:
        """Activate what takes over for a feature, if anything does; return False."""
        if other and other not in self.classes:
            self._missing(name, other, f"it takes over {where}")
        elif other:
            self._activate(other, f"fallback of {name}")
        return False

    def _missing(self, name: str, wanted: str, reason: str) -> None:
        """Report that a feature which another one needs is not installed, or broken."""
        from mindspeed_core.flags.announced import feature_owners

        broken = self.request.registry.broken
        record = next((b for b in broken if b.feature == wanted), None)
        dist = feature_owners().get(wanted, "")
        if record is None and dist:
            record = next((b for b in broken if b.dist == dist and not b.feature), None)
        wants = f"needs {wanted}{parenthesized(reason)}"
        if record is not None:
            self._fail(name, "E-BROKEN-PLUGIN", f"{wants}: {record}", record.remedy)
        else:
            remedy = f"pip install {dist}" if dist else f"install the package that ships {wanted}"
            reason = f"needs {wanted}, which is not installed{parenthesized(reason)}"
            self._fail(name, "E-MISSING-PLUGIN", reason, remedy)

    def _close(self) -> None:
        """Follow requirements breadth first, then check those that ask for a choice or a value."""
        queue = list(self.why)
        visited: set[str] = set()
        while queue:
            following: list[str] = []
            for name in queue:
                if name in visited:
                    continue
                visited.add(name)
                for requirement in self.classes[name].requires:
                    wanted = requirement.feature
                    if not requirement.implies or wanted in self.why or wanted not in self.classes:
                        continue
                    before = set(self.why)
                    self._activate(wanted, f"implied by {name}")
                    following += [new for new in self.why if new not in before]
            queue = following
        for name in list(self.why):
            for requirement in self.classes[name].requires:
                self._require(name, requirement)

    def _require(self, name: str, requirement: Requirement) -> None:
        if requirement.feature:
            self._require_feature(name, requirement)
        elif requirement.any_of:
            self._require_any(name, requirement)
        elif not self.request.holds(requirement):
            wanted = condition_text(requirement)
            shown = self.request.shown(requirement.flag)
            if cause := self.request.stands_for(requirement.flag):
                shown += f", which {cause} stands for"
            reason = f"needs {wanted}{parenthesized(requirement.reason)}; it is {shown}"
            flag = self.request.index.flags.get(requirement.flag)
            remedy = requirement.remedy or to_meet(requirement, flag)
            self._fail(name, "E-REQUIRES", reason, remedy)

    def _require_feature(self, name: str, requirement: Requirement) -> None:
        wanted = requirement.feature
        # A requirement that failed has its own problem already.
        if wanted in self.why or wanted in self.failed:
            return
        if wanted not in self.classes:
            self._missing(name, wanted, requirement.reason)
            return
        why = parenthesized(requirement.reason)
        held = self.held.get(wanted)
        level = self.classes[wanted].level
        drop = f"drop {self.request.flag_or_name(name)}"
        if level > self.request.level:
            reason = (
                f"needs {wanted}{why}, which belongs to optimization level {level}; "
                f"the run has {self.request.level}"
            )
            self._fail(name, "E-REQUIRES-LEVEL", reason, f"--optimization-level {level}, or {drop}")
        elif held is not None:
            reason = f"needs {wanted}{why}, which is not active: {held.reason}"
            self._fail(name, "E-REQUIRES", reason, drop)
        else:
            remedy = requirement.remedy or to_ask_for(self.classes[wanted])
            self._fail(name, "E-REQUIRES", f"needs {wanted}{why}", remedy)

    def _require_any(self, name: str, requirement: Requirement) -> None:
        choices = requirement.any_of
        if any(choice in self.why or choice in self.failed for choice in choices):
            return
        installed = [choice for choice in choices if choice in self.classes]
        if not installed:
            self._missing(name, choices[0], requirement.reason)
            return
        ways = requirement.remedy or ", or ".join(to_ask_for(self.classes[choice]) for choice in installed)
        reason = f"needs one of {', '.join(choices)}{parenthesized(requirement.reason)}"
        self._fail(name, "E-REQUIRES", reason, ways)

    def _take_over(self) -> None:
        """Hold back what an active feature does as well; requirements on it were followed before."""
        for name in list(self.why):
            if name not in self.why or name in self.failed:
                continue
            for taken in self.classes[name].takes_over:
                other = taken.feature
                if other in self.why and other not in self.failed:
                    remedy = f"nothing; {name} takes over"
                    self.held[other] = HeldBack(other, taken.reason, self.request.flag_of(other), remedy)
                    self.taken.add(other)
                    del self.why[other]

    def _suppress_dependents(self) -> None:
        """Drop features that need a failed one, without a problem of their own."""
        changed = bool(self.failed)
        while changed:
            changed = False
            for name in self.why:
                if name in self.failed:
                    continue
                for requirement in self.classes[name].requires:
                    choices = requirement.any_of
                    present = (self.why.keys() | self.taken) - self.failed
                    lost = requirement.feature in self.failed or (choices and not present & {*choices})
                    if lost:
                        self.failed.add(name)
                        changed = True
                        break
