"""Results of ``mindspeed-features verify``, recorded so that the page of a feature can show them.

``python docs/proofs.py [FEATURE …]`` runs the proofs of the named features, or of all features of this
repository's plugins, and writes ``docs/proofs/FEATURE.json``. A result is shown only as long as the proof
that was run is the proof that the feature declares.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mindspeed_core.feature import Feature, Scenario

RECORDS = Path(__file__).resolve().parent / "proofs"


def identity(scenario: Scenario) -> dict[str, Any]:
    """Return the key by which two proofs are the same."""
    always = ("flags", "baseline", "world_size", "baseline_world_size", "steps", "tolerance")
    later = ("same_feature", "compare", "extra_losses", "extra_parameters", "files", "resume")
    declared = asdict(scenario)
    if scenario.resume is not None and not scenario.resume.warning:
        del declared["resume"]["warning"]
    # As it is read back; what a proof leaves alone does not count, so that old results stay valid.
    chosen = {name: declared[name] for name in (*always, *(name for name in later if declared[name]))}
    plain: dict[str, Any] = json.loads(json.dumps(chosen))
    return plain


def recorded(feature: type[Feature]) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """Return the machine of a feature's proofs, and the results of those still declared as they were run."""
    path = RECORDS / f"{feature.name}.json"
    if not path.is_file():
        return {}, {}
    record = json.loads(path.read_text(encoding="utf-8"))
    declared = {scenario.name: identity(scenario) for scenario in feature.verify}
    results = {
        name: result for name, result in record["proofs"].items() if result["proof"] == declared.get(name)
    }
    return record["where"], results


def verdicts(name: str) -> dict[str, Any]:
    """Return what ``mindspeed-features verify NAME --json`` prints.

    Raises:
        SystemExit: it printed no result.
    """
    command = [sys.executable, "-m", "mindspeed_core.cli.features", "verify", name, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if not ran.stdout.lstrip().startswith("{"):
        raise SystemExit(f"{name}: {ran.stderr.strip()}")
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def record(feature: type[Feature]) -> list[str]:
    """Run the proofs of one feature and write what came out; nothing is written when one fails.

    Returns:
        What failed, one text each.
    """
    answer = verdicts(feature.name)
    failed = [
        f"{feature.name} / {verdict['scenario']}: {verdict['error'] or '; '.join(verdict['differences'])}"
        for verdict in answer["verdicts"]
        if not verdict["passed"]
    ]
    if failed:
        return failed
    declared = {scenario.name: identity(scenario) for scenario in feature.verify}
    proofs = {
        verdict["scenario"]: {
            "proof": declared[verdict["scenario"]],
            "largest_error": verdict["largest_error"],
            "compared": verdict["compared"],
            "gains": [
                {key: gain[key] for key in ("measure", "feature", "ratio", "demand")}
                for gain in verdict["gains"]
            ],
        }
        for verdict in answer["verdicts"]
        if verdict["scenario"] in declared
    }
    where = {
        "platform": answer["platform"],
        "torch": version("torch").partition("+")[0],
        "megatron-core": version("megatron-core"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{feature.name}.json"
    path.write_text(json.dumps({"where": where, "proofs": proofs}, indent=1) + "\n", encoding="utf-8")
    return []


def main(names: Sequence[str]) -> int:
    """Record the named features, or all; the exit status is 1 when a proof failed."""
    from generate import tree_registry

    features = {name: found.cls for name, found in tree_registry().features.items()}
    unknown = sorted(set(names) - set(features))
    if unknown:
        print(f"not a feature of this repository: {', '.join(unknown)}", file=sys.stderr)
        return 2
    failed: list[str] = []
    for name in names or features:
        found = record(features[name])
        failed += found
        print("\n".join(found) or f"{name}: recorded", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
