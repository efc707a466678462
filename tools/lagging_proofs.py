"""Run every proof of every feature on the lagging device, and record what came of it.

    python tools/lagging_proofs.py -n 2

A proof on the lagging device holds the order of all that is launched and, by the rules of HCCL (910B) and
NCCL, every call of a process group. Outcomes are noted in ``build/lagging-proofs.jsonl`` as they come, each
with the commit of a clean tree: a run that was cut short goes on where it ended, and a proof that passed on
a commit is not run again on it unless ``--again`` is given. ``--since COMMIT`` counts what passed on that
commit too.

Once every proof has an outcome, the record says how many passed on which commit and names those that failed.
What else is given goes to pytest: ``-n 2`` runs two proofs side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from proof_journal import CHANGED, ROOT, Journal, commit_of_tree, counted

TESTS = "plugins/mindspeed_testing/tests/test_lagging_proofs.py"
PROOFS = f"{TESTS}::test_every_proof_holds_on_the_lagging_device"
RECORD = ROOT / "plugins/mindspeed_testing/tests/lagging_proofs.json"
JOURNAL = Journal(ROOT / "build/lagging-proofs.jsonl")
CONTRACTS = ("HCCL 910B", "NCCL")


class Outcomes:
    """A plugin of pytest that notes each outcome."""

    def __init__(self, commit: str) -> None:
        """Begin without any."""
        self.commit = commit
        self.found: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome; reports of workers arrive here too."""
        if report.when != "call" and report.passed:
            return
        proof = proof_of(report.nodeid)
        text = "" if report.passed else str(report.longrepr)[-4000:]
        self.found[proof] = {"proof": proof, "commit": self.commit, "passed": report.passed, "text": text}
        JOURNAL.note(self.found[proof])


class Collected:
    """A plugin of pytest that notes which tests there are."""

    def __init__(self) -> None:
        """Begin without any."""
        self.tests: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note them."""
        self.tests = [item.nodeid for item in session.items]


def collected() -> list[str]:
    """Return the ids of all tests of proofs."""
    plugin = Collected()
    if pytest.main([PROOFS, "-m", "", "--collect-only", "-qq", "--no-summary"], plugins=[plugin]):
        sys.exit(f"{PROOFS} cannot be collected")
    return plugin.tests


def proof_of(test: str) -> str:
    """Return the name of a proof: what stands in brackets in a test's id."""
    return test.partition("[")[2].rpartition("]")[0]


def record(found: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return what is recorded of the outcomes of all proofs."""
    return {
        "proofs": len(found),
        "contracts": list(CONTRACTS),
        **counted(found),
    }


def main() -> int:
    """Run what is missing; return 1 where a proof failed or has no outcome."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="run proofs again that passed on this commit")
    parser.add_argument("--since", action="append", default=[], help="a commit whose passed proofs count")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to write")
    given, options = parser.parse_known_args()
    commit = commit_of_tree(RECORD)
    known = {} if given.again else JOURNAL.passed_on([*([commit] if commit != CHANGED else []), *given.since])
    tests = collected()
    left = [test for test in tests if proof_of(test) not in known]
    outcomes = Outcomes(commit)
    if left:
        with tempfile.TemporaryDirectory() as folder:
            chosen = Path(folder, "tests.txt")
            chosen.write_text("\n".join(left) + "\n", encoding="utf-8")
            pytest.main([f"@{chosen}", "-m", "", *options], plugins=[outcomes])
    found = known | outcomes.found
    missing = [test for test in tests if proof_of(test) not in found]
    if missing:
        print(f"{len(missing)} of {len(tests)} proofs have no outcome; another run goes on with them")
        return 1
    written = record([found[proof_of(test)] for test in tests])
    given.record.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"{given.record}: passed {written['passed']} of {written['proofs']}, failed {written['failed']}")
    return 1 if written["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
