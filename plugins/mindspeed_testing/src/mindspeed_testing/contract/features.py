"""Rules of the contract about features: page, flags, names, patches, proofs, conflicts.

A rule is a function that yields one sentence for each thing that is wrong; a sentence says what to change.
Proofs are only planned here, not run; nothing here loads torch.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial

from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.discovery.installed import package_file
from mindspeed_core.errors import guess
from mindspeed_core.feature import Conflict, Requirement, Scenario
from mindspeed_core.flags.announced import flag_owners
from mindspeed_core.flags.flag_set import FlagSet, flag_set
from mindspeed_core.registry import FeatureRecord, RegistryError
from mindspeed_core.resolver.plan import Plan, PlanError, Problem
from mindspeed_core.resolver.request import failure
from mindspeed_core.resolver.resolve import resolve
from mindspeed_megatron.upstream.table import is_judged
from mindspeed_testing.contract.flags_read import FLAGS_READ, unread_flags
from mindspeed_testing.contract.rules import FIRST, PROOFS, Check, Contract, Wrong, hold
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.proof_files import flags_with_files


def checks(contract: Contract) -> list[Check]:
    """Return the checks of this module."""
    return [
        Check(
            name,
            record.cls.name,
            partial(hold, rule, contract, record, written_for=record.hook_api, since=since),
        )
        for record in contract.features()
        for name, (rule, since) in RULES.items()
    ]


def _page(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that the feature has a page in its package that explains every flag."""
    feature = record.cls
    if not feature.docs.partition(":")[2]:
        yield f'no page: docs = "{feature.__module__.partition(".")[0]}:docs/{feature.name}.md"'
        return
    page = package_file(feature.docs)
    if page is None:
        yield f"docs = {feature.docs!r}: the installed package has no such file; ship it inside the package"
        return
    text = page.read_text(encoding="utf-8")
    missing = [flag.name for flag in feature.flags if flag.name not in text]
    if missing:
        yield f"its page {feature.docs} does not mention {', '.join(missing)}"


def _flags_documented(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that every flag has a help text."""
    for flag in record.cls.flags:
        if not flag.help.strip():
            yield f"{flag.name} has no help text: Flag({flag.name!r}, help=…)"


def _platforms_known(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that the platforms it lists exist."""
    installed = set(contract.registry.platform_names())
    for name in sorted({*record.cls.platforms}.union(*(s.platforms for s in record.cls.verify))):
        if name not in installed:
            yield f"platform {name!r} is not installed{guess(name, installed)}"
    fallback = record.cls.fallback
    if fallback is not None and not fallback.reason.strip():
        yield "its fallback gives no reason; the plan prints it"
    if fallback is not None and fallback.feature and fallback.feature not in contract.registry.features:
        yield f"its fallback {fallback.feature!r} is no installed feature"


def _names_known(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that flags and features it requires or excludes exist, each with a reason."""
    feature, features = record.cls, contract.registry.features
    flags = flag_set(contract.registry, DEFAULT_HOST)
    kinds: tuple[tuple[str, Sequence[Requirement | Conflict]], ...] = (
        ("requirement", feature.requires),
        ("conflict", feature.conflicts),
    )
    for kind, conditions in kinds:
        for condition in conditions:
            condition_name = (
                condition.feature or condition.flag or ", ".join(getattr(condition, "any_of", ()))
            )
            if not condition.reason.strip():
                yield f"its {kind} on {condition_name} gives no reason; users read it"
            if condition.flag and not _flag_known(contract, flags, condition.flag):
                meant = guess(condition.flag, _options(flags))
                yield f"its {kind} names {condition.flag}, which nobody defines{meant}"
    for taken in feature.takes_over:
        if not taken.reason.strip():
            yield f"it takes over from {taken.feature} without a reason; the plan prints it"
    named = [
        *feature.after,
        *feature.before,
        *(c.feature for c in feature.conflicts),
        *(r.feature for r in feature.requires),
    ]
    named += [taken.feature for taken in feature.takes_over]
    for name in filter(None, named):
        close = get_close_matches(name, features, n=1, cutoff=0.85)
        if name not in features and close:
            yield f"it names the feature {name!r}, which is not installed; did you mean {close[0]!r}?"
    itself = [c for c in feature.conflicts if c.feature == feature.name]
    both = {r.feature for r in feature.requires if r.feature} & {c.feature for c in feature.conflicts}
    if itself or both:
        yield f"it excludes what it needs: {', '.join(sorted(both) or [feature.name])}"


def _flag_known(contract: Contract, flags: FlagSet, option: str) -> bool:
    known = option in flags or option in flag_owners() or option in contract.registry.broken_flags
    return known or is_judged(option)


def _options(flags: FlagSet) -> Iterable[str]:
    return [option for entry in flags.entries for option in entry.flag.options]


def _patches(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that every patch states the versions it was written for."""
    for patch in record.cls.patches:
        if not patch.versions:
            yield (
                f"its patch of {patch.target} does not say what it was written for: "
                'Patch(versions="megatron-core>=…,<…")'
            )


def _proofs(contract: Contract, record: FeatureRecord) -> Iterator[str | Wrong]:
    """Check that it has proofs, and that each has the feature on the sides that it says."""
    feature = record.cls
    if feature.trains_nothing:
        yield from _trains_nothing(record)
    elif not feature.verify:
        lacks = "it carries no proof: verify = (Scenario(…),); users run it with mindspeed-features verify"
        yield Wrong(lacks, PROOFS)
    for name, count in Counter(scenario.name for scenario in feature.verify).items():
        if count > 1:
            yield f"{count} of its proofs are called {name!r}"
    for scenario in contract.runs_here(feature):
        for side, flags, wanted in scenario.sides():
            plan, problems = _planned(contract, flags, scenario)
            where = f"proof {scenario.name!r}, {side}"
            if plan is None:
                yield f"{where}: {'; '.join(str(problem).splitlines()[0] for problem in problems)}"
            elif (feature.name in plan) is not wanted:
                found = f"{where}: the feature is {'not ' if wanted else ''}active with {' '.join(flags)!r}"
                on_both = side == "baseline" and not wanted
                way = "; say so with same_feature=True where it is meant to be on both sides"
                yield Wrong(found + way, PROOFS) if on_both else found


_BEFORE_TRAINING = {"prepare_process"}
"""Stages in which a feature may end the program instead of training."""


def _trains_nothing(record: FeatureRecord) -> Iterator[str]:
    """Check that a feature without proofs has no part in a training that a proof could show."""
    feature = record.cls
    if feature.verify:
        yield "it carries proofs and states that it trains nothing: drop trains_nothing, or the proofs"
    if len(feature.trains_nothing.split()) < 3:
        yield f"trains_nothing = {feature.trains_nothing!r} is no sentence; say what it does instead"
    hooks = set(feature.hooks())
    if not hooks & _BEFORE_TRAINING:
        yield "it states that it trains nothing and ends no program: implement prepare_process"
    parts = [f"the stage {name}" for name in sorted(hooks - _BEFORE_TRAINING)]
    parts += [f"a patch of {patch.target}" for patch in feature.patches]
    parts += [f"the slot {slot}" for slot in (*feature.slots, *feature.replaces_roles)]
    if parts:
        yield f"it states that it trains nothing and has {', '.join(parts)}: carry a proof of it"


def _answers(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that its methods answer in every host, also where nobody asks for it, and that it can be made."""
    feature = record.cls
    said: dict[str, list[str]] = {}
    for host in feature.hosts or contract.registry.host_names():
        try:
            args = flag_set(contract.registry, host).parse([]).args
        except RegistryError:
            continue  # a host that is not there, or broken, is no fault of the feature
        for wrong in _unasked(record, args):
            said.setdefault(wrong, []).append(host)
    for wrong, hosts in said.items():
        yield f"{wrong} (without a flag, in host {', '.join(hosts)})"
    try:
        feature()
    except Exception as error:
        yield f"{failure(record, '__init__()', error)}; a session makes the feature without arguments"
    for scenario in contract.runs_here(feature):
        plan, _ = _planned(contract, scenario.flags, scenario)
        yield from (
            f"proof {scenario.name!r}: {note.text}"
            for note in (plan.notes if plan is not None else ())
            if note.feature == feature.name and note.text.startswith("its notes() fails")
        )


def _unasked(record: FeatureRecord, args: Namespace) -> Iterator[str]:
    """Ask a feature that no flag asks for, as every training does."""
    read = "others' flags may be absent: getattr(args, name, default)"
    asked = False
    try:
        asked = bool(record.cls.enabled(args))
    except Exception as error:
        yield f"{failure(record, 'enabled()', error)}; {read}"
    try:
        preset = dict(record.cls.presets(args))
    except Exception as error:
        yield f"{failure(record, 'presets()', error)}; {read}"
    else:
        if preset and not asked:
            yield f"it presets {', '.join(sorted(preset))} although nobody asks for it"


def _resumed(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that a proof continues from a checkpoint."""
    trains = "train" in record.cls.modes and bool(record.cls.verify)
    if trains and not any(scenario.resume is not None for scenario in record.cls.verify):
        yield (
            "no proof saves, resumes and continues in another layout: Scenario('resume', flags=…, "
            "resume=Resume(flags=…, world_size=…)) among verify"
        )


def _conflicts(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that a conflict shows when it should, and ends when the user drops the other side."""
    feature = record.cls
    scenario = next(contract.runs_here(feature), None)
    if scenario is None:
        return
    flags = flag_set(contract.registry, DEFAULT_HOST)
    for conflict in feature.conflicts:
        other = _asking_for(contract, flags, conflict)
        if not other:
            continue
        plan, problems = _planned(contract, (*scenario.flags, *other), scenario)
        reported = [p for p in problems if p.code in ("E-CONFLICT", "E-SLOT", "E-ROLE")]
        if plan is not None and feature.name in plan:
            yield f"its conflict with {' '.join(other)} never shows: both are active together"
        elif plan is None and not reported:
            first = str(problems[0]).splitlines()[0]
            yield f"its conflict with {' '.join(other)} is hidden behind another problem: {first}"


def _asking_for(contract: Contract, flags: FlagSet, conflict: Conflict) -> tuple[str, ...]:
    """Build a command line for the other side of a conflict; empty where none can be made."""
    if conflict.feature:
        other = contract.registry.features.get(conflict.feature)
        found = next(contract.runs_here(other.cls), None) if other is not None else None
        return found.flags if found is not None else ()
    if conflict.flag not in flags:
        return ()
    flag = flags[conflict.flag].flag
    value = conflict.equals if conflict.equals is not None else next(iter(conflict.one_of), None)
    if flag.is_switch:
        return (conflict.flag,) if value in (None, True) else ()
    return (conflict.flag, str(value)) if value is not None else ()


def _planned(
    contract: Contract, flags: Sequence[str], scenario: Scenario
) -> tuple[Plan | None, tuple[Problem, ...]]:
    """Return the plan of a proof's command line, or what prevents it."""
    with flags_with_files(flags, scenario.files) as filled:
        return _plan(contract, training_flags(filled, scenario.steps, contract.registry))


def _plan(contract: Contract, command: Sequence[str]) -> tuple[Plan | None, tuple[Problem, ...]]:
    parsed_flags = flag_set(contract.registry, DEFAULT_HOST).parse(command)
    if parsed_flags.problems:
        return None, parsed_flags.problems
    args: Namespace = parsed_flags.args
    args.platform = contract.platform
    try:
        plan = resolve(
            contract.registry,
            args,
            provenance=parsed_flags.provenance,
            platform=contract.platform,
            host=DEFAULT_HOST,
            left_out=parsed_flags.left_out,
        )
    except PlanError as error:
        return None, error.problems
    return plan, ()


RULES: dict[str, tuple[Callable[[Contract, FeatureRecord], Iterator[str | Wrong]], str]] = {
    "page": (_page, FIRST),
    "flags-documented": (_flags_documented, FIRST),
    "flags-read": (unread_flags, FLAGS_READ),
    "platforms-known": (_platforms_known, FIRST),
    "names-known": (_names_known, FIRST),
    "patches-stated": (_patches, FIRST),
    "proofs-stated": (_proofs, FIRST),
    "answers": (_answers, PROOFS),
    "resume-proved": (_resumed, PROOFS),
    "conflicts-resolvable": (_conflicts, FIRST),
}
"""The rules of features, each with the hook interface whose packages are held to it."""
