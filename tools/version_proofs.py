"""Run the proofs of all stable features on CPU with the megatron-core that is installed, and record them.

    python tools/version_proofs.py --minutes 50

Outcomes are noted in ``build/`` as they come, in a file for each pair of Python and megatron-core, with the
commit of a clean tree: a run that was cut short, or that had no minutes left, goes on where it ended, and
what passed on a commit is not run again on it unless ``--again`` is given. ``--since COMMIT`` counts what
passed on that commit too.

The first proof of every feature comes first; the others follow so that trainings without the feature, which
many of them share, run once. Behind each run the record says for the pair how many proofs there are, how
many passed on which commit, which failed, and how many have no outcome yet.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from proof_journal import CHANGED, ROOT, Journal, commit_of_tree, counted

from mindspeed_core.feature import Feature, Scenario
from mindspeed_core.registry import Registry
from mindspeed_testing.verify import verify

RECORD = ROOT / "plugins/mindspeed_testing/tests/version_proofs.json"
PLATFORM = "cpu"
OURS = "mindspeed_"
PAIR = f"{sys.version_info.major}.{sys.version_info.minor} x {version('megatron-core')}"


@dataclass(frozen=True)
class Proof:
    """One scenario of a feature; the ``place`` among the feature's own begins with 0."""

    feature: type[Feature]
    scenario: Scenario
    place: int

    @property
    def name(self) -> str:
        """Return the name that outcomes are noted under."""
        return f"{self.feature.name}-{self.scenario.name}"

    @property
    def order(self) -> tuple[bool, int, tuple[str, ...], tuple[str, ...]]:
        """Return what proofs are sorted by."""
        scenario = self.scenario
        return bool(self.place), scenario.world_size, scenario.baseline, scenario.files


def stable_proofs(registry: Registry, names: Sequence[str] = ()) -> list[Proof]:
    """Return the proofs of this project's stable features, in the order in which they run.

    ``names`` are beginnings of proofs' names; without any all of them are taken.
    """
    found = []
    for feature in (record.cls for record in registry.features.values()):
        if feature.stability != "stable" or not feature.__module__.startswith(OURS):
            continue
        suited = [one for one in feature.verify if PLATFORM in (one.platforms or feature.platforms)]
        found += [Proof(feature, one, place) for place, one in enumerate(suited)]
    chosen = [one for one in found if not names or one.name.startswith(tuple(names))]
    return sorted(chosen, key=lambda one: one.order)


def proved(proof: Proof, commit: str) -> dict[str, object]:
    """Run a proof; return its outcome."""
    begun = time.perf_counter()
    try:
        verdict = verify(proof.feature, proof.scenario, platform=PLATFORM)
        passed, text = verdict.passed, "" if verdict.passed else str(verdict)
    except Exception as error:
        # One that cannot even begin must not end the run.
        passed, text = False, f"{type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - begun, 2)
    return {"proof": proof.name, "commit": commit, "passed": passed, "seconds": seconds, "text": text[-4000:]}


def write_record(path: Path, proofs: Sequence[Proof], found: dict[str, dict[str, object]]) -> int:
    """Write what is known of this pair beside the other pairs; return how many proofs failed or are missing.

    Args:
        path: the record, a JSON object by pair.
        proofs: all proofs.
        found: the outcome of each, as far as there is one.
    """
    known = [found[one.name] for one in proofs if one.name in found]
    pairs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = len(proofs) - len(known)
    pairs[PAIR] = {"proofs": len(proofs), "without an outcome": missing, **counted(known)}
    path.write_text(json.dumps(dict(sorted(pairs.items())), indent=1) + "\n", encoding="utf-8")
    failed = sum(not one["passed"] for one in known)
    print(f"{PAIR}: {len(known) - failed} passed, {failed} failed, {missing} without an outcome")
    return failed + missing


def main() -> int:
    """Run what is missing; return 1 where a proof failed or has no outcome."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="run only proofs whose names begin so; default: all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no proof behind these")
    parser.add_argument("--again", action="store_true", help="run proofs again that passed on this commit")
    parser.add_argument("--since", action="append", default=[], help="a commit whose passed proofs count")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    deadline = time.monotonic() + 60.0 * given.minutes
    registry = Registry.discover()
    commit = commit_of_tree(RECORD)
    journal = Journal(ROOT / "build" / f"version-proofs-{PAIR.replace(' ', '')}.jsonl")
    counts = [*([commit] if commit != CHANGED else []), *given.since]
    known = {} if given.again else journal.passed_on(counts)
    for proof in stable_proofs(registry, given.names):
        if proof.name in known:
            continue
        if time.monotonic() > deadline:
            break
        outcome = proved(proof, commit)
        journal.note(outcome)
        verdict = "passed" if outcome["passed"] else "FAILED"
        print(f"{verdict}  {proof.name}  {outcome['seconds']} s", flush=True)
        if not outcome["passed"]:
            print(outcome["text"], flush=True)
    last = journal.last()
    found = {name: one for name, one in last.items() if not one["passed"]} | journal.passed_on(counts)
    return 1 if write_record(given.record, stable_proofs(registry), found) else 0


if __name__ == "__main__":
    sys.exit(main())
