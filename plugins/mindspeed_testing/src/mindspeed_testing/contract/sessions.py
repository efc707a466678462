"""Rules of the contract that need sessions: closing leaves nothing behind, proofs pass, platforms train.

The features of a distribution train one after another in one world, so that each is also opened in a process
that others have used; each is compared with the moment before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mindspeed_core.discovery.entry_points import PLATFORMS
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.discovery.slots import claimed_roles, roles_meet
from mindspeed_core.errors import guess
from mindspeed_core.feature import Feature, Scenario
from mindspeed_core.platforms.platform import Availability, Place, Platform
from mindspeed_core.registry import FeatureRecord
from mindspeed_core.runtime.instance_patches import Roles
from mindspeed_testing.contract.rules import PROOFS, Check, Contract, Violation, Wrong, hold
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.proof_files import flags_with_files
from mindspeed_testing.worlds import WorldError, run_world

_SHOWN = 8


@dataclass(frozen=True)
class Side:
    """One short training.

    Attributes:
        subject: the feature or platform.
        flags: added to the small GPT's flags.
        baseline: what is trained first, to load everything that is not the subject's own.
        platform: the platform.
        baseline_platform: the platform of the baseline.
        files: small files behind ``{files}`` in the flags, see `mindspeed_core.feature.Scenario`.
    """

    subject: str
    flags: tuple[str, ...]
    baseline: tuple[str, ...]
    platform: str
    baseline_platform: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """The result of a short training.

    Attributes:
        loss: the reported losses of its step.
        left: what differs from before, one phrase each.
        memory: source of the memory figures, and the bytes that were in use.
        wrong: what a platform answers wrongly, one phrase each.
        roles: roles of modules that the subject replaced, or saw.
        error: why it could not run.
    """

    loss: dict[str, float]
    left: tuple[str, ...] = ()
    memory: tuple[str, int] = ("", 0)
    wrong: tuple[str, ...] = ()
    roles: Roles = field(default_factory=Roles)
    error: str = ""


def checks(contract: Contract) -> list[Check]:
    """Return the checks of this module."""
    found: list[Check] = []
    sides: dict[int, list[Side]] = {}
    for record in contract.features():
        feature = record.cls
        # A baseline with the feature would hide what the feature leaves behind.
        scenarios = sorted(contract.runs_here(feature), key=lambda s: (_has_it_everywhere(s), s.world_size))
        if not scenarios:
            contract.left_out.append(f"feature {feature.name}: no proof for platform {contract.platform}")
            continue
        first, here = scenarios[0], contract.platform
        without = () if first.same_feature else first.baseline
        sides.setdefault(first.world_size, []).append(
            Side(feature.name, first.flags, without, here, here, first.files)
        )
    sessions = _Sessions(sides)
    for group in sides.values():
        found += [
            Check("closes-clean", side.subject, partial(_closes_clean, sessions, side.subject))
            for side in group
        ]
        found += [
            Check(
                "roles-stated",
                record.cls.name,
                partial(
                    hold,
                    _roles_stated,
                    *(contract, record.cls, sessions),
                    written_for=record.hook_api,
                    since=PROOFS,
                ),
            )
            for side in group
            if (record := contract.registry.features[side.subject]).cls.places_modules
            or "build_layer_spec" in record.cls.hooks()
        ]
    found += _platform_checks(contract)
    here = contract.platform
    for record in contract.features() if contract.proofs else ():
        found += [
            Check(
                "proof",
                f"{record.cls.name}, {scenario.name}",
                partial(hold, _proof, record, scenario, here, written_for=record.hook_api),
            )
            for scenario in contract.runs_here(record.cls)
        ]
    return found


def _has_it_everywhere(scenario: Scenario) -> bool:
    return all(active for _, _, active in scenario.sides())


class _Sessions:
    """The short trainings of a distribution, run when the first of them is asked for."""

    def __init__(self, sides: dict[int, list[Side]]) -> None:
        self.sides = sides
        self.results: dict[str, Trained] = {}

    def __getitem__(self, subject: str) -> Trained:
        for size, group in self.sides.items():
            if any(side.subject == subject for side in group) and subject not in self.results:
                self.results |= _in_world(group, size)
        return self.results[subject]


def _in_world(group: list[Side], size: int) -> dict[str, Trained]:
    """Train every side; one that fails or leaves something behind is the last one of its world."""
    results: dict[str, Trained] = {}
    while waiting := [side for side in group if side.subject not in results]:
        # A rank that fails leaves the others waiting: where there are others, every side has its own world.
        together = waiting if size == 1 else waiting[:1]
        try:
            with ExitStack() as stack:
                filled = [_with_files(side, stack) for side in together]
                ranks = run_world(f"{__name__}:train_all", size, filled, timeout=120.0 + 30.0 * len(filled))
        except WorldError as error:
            ranks = [[Trained({}, error=str(error))]]
        for side, reports in zip(together, zip(*ranks)):
            # The first rank with an error reports it for all.
            chosen = next((r for r in reports if r.error or r.left), reports[0])
            roles = Roles()
            for report in reports:
                roles.add(report.roles.sought, report.roles.present, report.roles.replaced)
            results[side.subject] = replace(chosen, roles=roles)
    return results


def _with_files(side: Side, stack: ExitStack) -> Side:
    # Here and not on the ranks, which have to agree on their arguments.
    flags, baseline = (
        stack.enter_context(flags_with_files(line, side.files)) for line in (side.flags, side.baseline)
    )
    return replace(side, flags=flags, baseline=baseline)


def train_all(group: list[Side]) -> list[Trained]:
    """Train every baseline once, then each subject, and compare the process before and after it.

    Returns:
        The reports, in the order of the subjects, up to the first that is not clean.
    """
    from mindspeed_testing.leak_check import ProcessState

    for flags, platform in dict.fromkeys((side.baseline, side.baseline_platform) for side in group):
        if _train(flags, platform).error:
            # A baseline of another number of ranks: the small model alone loads what all of them use.
            _train((), platform)
    reports: list[Trained] = []
    for side in group:
        before = ProcessState.now()
        report = _train(side.flags, side.platform, side.subject)
        left = ProcessState.now().left_since(before)
        reports.append(replace(report, left=tuple(left)))
        if report.error or left:
            break
    return reports


def _train(flags: tuple[str, ...], platform: str, subject: str = "") -> Trained:
    """Train one step, close the session, and open and close it once more.

    Args:
        flags: of the training.
        platform: its name.
        subject: the feature, or the platform itself, which then answers for its reports.
    """
    import traceback

    from mindspeed_core.activation import prepare
    from mindspeed_train import interface

    command = training_flags(flags, 1)
    try:
        with prepare(command, host=DEFAULT_HOST, platform=platform) as session:
            run = interface.setup(session)
            result = session.call("train_step", run=run)
            figure = session.platform.memory_allocated()
            asked = subject == platform
            wrong = tuple(_reports(session.platform, run.dist.local_rank)) if asked else ()
            roles = session.roles.get(subject, Roles())
            interface.teardown(session)
        with prepare(command, host=DEFAULT_HOST, platform=platform):
            pass
    except Exception:
        return Trained({}, error=traceback.format_exc())
    return Trained(dict(result.losses), memory=(figure.source, figure.bytes), wrong=wrong, roles=roles)


def _reports(platform: Platform, local_rank: int) -> Iterator[str]:
    """Ask a platform where it computes and what is allocated, and say which answers are of no use."""
    import tempfile

    import torch

    place: object = platform.place(local_rank)
    if not isinstance(place, Place) or not (place.node and place.device and place.model):
        yield f"place() says {place!r}; a Place names the node, the device and its model"
    platform.record_memory()
    kept = torch.ones(256, device=platform.device(local_rank))
    with tempfile.TemporaryDirectory() as folder:
        written = platform.memory_snapshot(Path(folder) / "snapshot.pickle")
        if not written.is_file() or not written.stat().st_size:
            yield f"memory_snapshot() wrote nothing to {written}"
    # The recording is left to the end of the session.
    del kept


def _closes_clean(sessions: _Sessions, subject: str) -> None:
    """Check that a training with the feature leaves torch, megatron and environment as they were."""
    report = sessions[subject]
    if report.error:
        raise Violation(f"a step of training with {subject} fails:\n{report.error}")
    if report.left:
        shown = "\n".join(f"  {phrase}" for phrase in report.left[:_SHOWN])
        raise Violation(
            f"{len(report.left)} thing(s) are not as they were before the session:\n{shown}\nChange symbols "
            "with Patch, objects with session.instances.set, variables with session.setenv: closing takes "
            "them back"
        )


def _roles_stated(contract: Contract, feature: type[Feature], sessions: _Sessions) -> Iterator[str]:
    """Check that the plan knows the modules a feature replaces: by a slot, or by their roles."""
    roles, slots = sessions[feature.name].roles, contract.registry.slots
    claimed = claimed_roles(feature, slots)
    wrong = []
    for path in sorted(roles.replaced):
        if any(roles_meet(path, role) for role in claimed):
            continue
        role = path.rpartition(".")[2]
        slot = next((slot.name for slot in slots.values() if role in slot.roles), "")
        ways = [f'slots = ("{slot}",)'] if slot else []
        ways.append(f'replaces_roles = ("{role}",)')
        wrong.append(
            f"it replaces the module with the role {role} ({path}), which its declaration does not say: "
            f"write {' or '.join(ways)}, so that the plan refuses another feature at the same place; or "
            "replace(..., wrap=True) where the new module contains the old one"
        )
    for role in feature.replaces_roles if roles.present else ():
        meant = guess(role.rpartition(".")[2], roles.present)
        if role.rpartition(".")[2] not in roles.present and meant:
            wrong.append(f"it says that it replaces the role {role!r}, which the model lacks{meant}")
    yield from dict.fromkeys(wrong)


def _platform_checks(contract: Contract) -> Iterator[Check]:
    for source in contract.sources(PLATFORMS):
        try:
            platform = contract.registry.platform(source.name)
            answer: object = platform.probe()
        except Exception:
            answer = None
        if not isinstance(answer, Availability):
            # The rule about its declaration says what is wrong.
            continue
        if not answer.available:
            contract.left_out.append(f"platform {source.name}: {answer.reason}")
            continue
        usual = platform.like or source.name
        if usual != source.name and not contract.registry.platform(usual).probe().available:
            # A dry run of a device that is not here: what torch makes at its first use is made on CPU.
            usual = "cpu"
        side = Side(source.name, (), (), source.name, usual)
        sessions = _Sessions({1: [side]})
        yield Check("platform-trains", source.name, partial(_platform_trains, sessions, source.name))


def _platform_trains(sessions: _Sessions, name: str) -> None:
    """Check that a model trains on the platform, figures name their source, and nothing leaks."""
    _closes_clean(sessions, name)
    report = sessions[name]
    bad = {key: loss for key, loss in report.loss.items() if not math.isfinite(loss)}
    if bad or not report.loss:
        raise Violation(f"a step on {name} gives no finite loss: {bad or 'nothing was reported'}")
    source, size = report.memory
    if not source or size <= 0:
        raise Violation(
            f"memory_allocated() of {name} says {size} bytes from {source!r} while a model exists"
        )
    if report.wrong:
        raise Violation("\n".join(report.wrong))


def _proof(record: FeatureRecord, scenario: Scenario, platform: str) -> Iterator[str | Wrong]:
    """Check that the proof passes on this machine."""
    from mindspeed_testing.verify import verify

    verdict = verify(record.cls, scenario, platform=platform, hook_api=record.hook_api)
    if not verdict.passed:
        yield str(verdict)
    for remark in verdict.remarks:
        yield Wrong(f"{record.cls.name} / {scenario.name}: {remark}", PROOFS)
