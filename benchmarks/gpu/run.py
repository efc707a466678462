"""Everything that only a CUDA device shows, in 25 minutes on one GPU, with nothing but the checkout.

Each section runs in a process of its own under a time budget and writes ``benchmarks/results/gpu/NAME.json``.
Without a GPU the sections are listed and nothing runs. ``--smoke`` runs their code on CPU with tiny sizes;
its numbers mean nothing and go to ``build/gpu-smoke``.

    python benchmarks/gpu/run.py
    python benchmarks/gpu/run.py --wheels wheels --section training
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkout import BENCHMARKS, ROOT, environment
from sections import SECTIONS, Section

SECTION_PROGRAM = Path(__file__).resolve().parent / "section.py"
FINISHED, FAILED, TIMED_OUT, LEFT_OUT = "finished", "failed", "timed out", "left out"
NOT_RUN = "not run"
SMOKE_PATIENCE = 5
"""Times its budget that a section of a smoke run may take: the budgets are those of a machine with a GPU."""

_PROBE = """
import importlib.metadata, importlib.util, json
needed = "torch megatron.core numpy pluggy packaging rich click tokenizers matplotlib psutil".split()
def absent(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True
missing = [name for name in needed if absent(name)]
if "megatron.core" not in missing:
    try:
        importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        missing.append("metadata of megatron-core")
count, reason = 0, "torch is not installed"
if "torch" not in missing:
    import torch
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = "" if count else f"torch {torch.__version__} sees no CUDA device"
print(json.dumps({"gpus": count, "reason": reason, "missing": missing}))
"""
"""Asked in a process of its own, so that this one stays free of CUDA."""


@dataclass(frozen=True)
class Machine:
    """Resources of a run.

    Attributes:
        gpus: number of visible GPUs.
        reason: why there is none; empty otherwise.
        missing: packages without which no section runs.
    """

    gpus: int
    reason: str
    missing: Sequence[str]


def probe(variables: Mapping[str, str]) -> Machine:
    """Look for GPUs and for the packages that the sections need."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROBE], env=dict(variables), capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Machine(0, f"torch cannot be imported: {last}", ())
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def listing(sections: Sequence[Section], reason: str) -> str:
    """Return what a run would do."""
    total = sum(section.seconds for section in sections)
    lines = [f"no GPU: {reason}", f"with one, this would run in at most {total / 60:.0f} minutes:"]
    lines += [f"  {section.name:<10}{section.seconds:>4} s  {section.shows}" for section in sections]
    return "\n".join([*lines, "python benchmarks/gpu/run.py --smoke runs their code on CPU with tiny sizes"])


def run_section(
    section: Section,
    path: Path,
    variables: Mapping[str, str],
    seconds: float,
    *,
    smoke: bool,
    part: str = "1/1",
    features: Sequence[str] = (),
) -> dict[str, Any]:
    """Run one section, or a slice of it, to its end or to the end of its time, and complete its JSON file."""
    path.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", str(SECTION_PROGRAM), section.name, str(path)]
    command += ["--seconds", f"{seconds:g}", "--slice", part, *(["--smoke"] if smoke else [])]
    command += [word for name in features for word in ("--feature", name)]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=dict(variables), stderr=errors, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        errors.seek(0)
        tail = errors.read().splitlines()[-30:]
    content = _read(path, section)
    rows = content["rows"]
    if code is None:
        status = f"{TIMED_OUT} after {seconds:.0f} s"
    elif code not in (0, 1) or not rows or (code == 1 and all(row["passed"] is not False for row in rows)):
        status = f"{FAILED} with status {code}"
    elif any(row["passed"] is False for row in rows):
        status = FAILED
    else:
        status = NOT_RUN if content.get("not_run") else FINISHED
    content |= {"status": status, "seconds": round(time.monotonic() - started, 1)}
    if code != 0:
        content["standard_error"] = tail
        print("\n".join(tail), file=sys.stderr)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return content


def run_side_by_side(
    section: Section,
    path: Path,
    variables: Mapping[str, str],
    seconds: float,
    *,
    smoke: bool,
    count: int,
    features: Sequence[str] = (),
) -> dict[str, Any]:
    """Run all slices of a section at the same time, and join their rows in one JSON file."""
    parts = [path.with_name(f"{path.stem}-{number}-of-{count}.json") for number in range(1, count + 1)]
    with ThreadPoolExecutor(count) as pool:
        done = pool.map(
            lambda number: run_section(
                section,
                parts[number - 1],
                variables,
                seconds,
                smoke=smoke,
                part=f"{number}/{count}",
                features=features,
            ),
            range(1, count + 1),
        )
        contents = list(done)
    joined = dict(contents[0])
    joined["rows"] = [row for content in contents for row in content["rows"]]
    joined["left_out"] = _joined([content.get("left_out", {}) for content in contents])
    joined["seconds"] = max(content["seconds"] for content in contents)
    worst = [content["status"] for content in contents if content["status"] not in (FINISHED, NOT_RUN)]
    joined["status"] = worst[0] if worst else FINISHED
    failed = sum(row["passed"] is False for row in joined["rows"])
    left = ", ".join(f"{len(names)} {why}" for why, names in joined["left_out"].items())
    joined["headline"] = f"{failed} of {len(joined['rows'])} failed in {count} slices; left out: {left}"
    path.write_text(json.dumps(joined, indent=2) + "\n", encoding="utf-8")
    for part in parts:
        part.unlink(missing_ok=True)
    return joined


def _joined(left_out: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return the names that slices left out, by reason; what no slice can run is named once."""
    found: dict[str, list[str]] = {}
    for content in left_out:
        for why, names in content.items():
            found.setdefault(why, []).extend(name for name in names if name not in found.get(why, ()))
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a section: itself and the ranks of its worlds."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _read(path: Path, section: Section) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"section": section.name, "headline": "", "rows": []}
    return content


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of a run."""
    lines = [f"{'section':<10}  {'status':<20}{'seconds':>8}{'passed':>8}{'failed':>8}  result"]
    for name, content in results.items():
        verdicts = [row["passed"] for row in content.get("rows", ())]
        passed, failed = verdicts.count(True), verdicts.count(False)
        seconds = f"{content.get('seconds', 0.0):.0f}"
        lines.append(
            f"{name:<10}  {content['status']:<20}{seconds:>8}{passed:>8}{failed:>8}  "
            f"{content.get('headline', '')}"
        )
    return "\n".join(lines)


def _is_slice(text: str) -> bool:
    number, _, count = text.partition("/")
    return number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; 1 where one failed or found no time, 2 where packages are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument(
        "--section", action="append", choices=names, help="run this one only; may be repeated"
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="put the wheels of this folder to use")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on CPU: run the code, measure nothing"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="total time, 25 by default")
    parser.add_argument(
        "--slice",
        metavar="I/N",
        help="part I of N of the sections that can be divided, which is features",
    )
    parser.add_argument(
        "--feature",
        action="append",
        default=[],
        metavar="NAME",
        help="prove this one only; may be repeated",
    )
    parser.add_argument(
        "--side-by-side",
        type=int,
        default=min(8, max(1, (os.cpu_count() or 1) // 2)),
        metavar="N",
        help="parts of such sections that run at the same time; by default half of the processors, 8 at most",
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the JSON files go")
    options = parser.parse_args(argv)
    if options.slice and not _is_slice(options.slice):
        parser.error(f"--slice {options.slice}: write I/N with 1 <= I <= N, for instance 2/8")
    chosen = [section for section in SECTIONS if section.name in (options.section or names)]
    usual = ROOT / "build" / "gpu-smoke" if options.smoke else BENCHMARKS / "results" / "gpu"
    folder: Path = options.results or usual
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="mindspeed-gpu-") as temporary:
        variables = environment(Path(temporary), options.wheels, smoke=options.smoke)
        machine = probe(variables)
        if not machine.gpus and not options.smoke:
            print(listing(chosen, machine.reason))
            return 0
        if machine.missing:
            print(f"missing: {', '.join(machine.missing)}; give their wheels with --wheels", file=sys.stderr)
            return 2
        folder.mkdir(parents=True, exist_ok=True)
        results: dict[str, dict[str, Any]] = {}
        for section in chosen:
            budget = section.seconds * (SMOKE_PATIENCE if options.smoke else 1)
            seconds = min(float(budget), deadline - time.monotonic())
            if seconds < 10:
                results[section.name] = {"status": LEFT_OUT, "headline": "no time was left"}
                continue
            print(f"\n== {section.name} (at most {seconds:.0f} s): {section.shows}", flush=True)
            path = (folder / f"{section.name}.json").resolve()
            if section.divides and not options.slice and not options.smoke and options.side_by_side > 1:
                results[section.name] = run_side_by_side(
                    section,
                    path,
                    variables,
                    seconds,
                    smoke=options.smoke,
                    count=options.side_by_side,
                    features=options.feature,
                )
                continue
            part = options.slice if options.slice and section.divides else "1/1"
            if part != "1/1":
                path = path.with_name(f"{section.name}-{part.replace('/', '-of-')}.json")
            results[section.name] = run_section(
                section,
                path,
                variables,
                seconds,
                smoke=options.smoke,
                part=part,
                features=options.feature,
            )
    print(f"\n{summary(results)}\nJSON in {folder}")
    return 0 if all(content["status"] in (FINISHED, NOT_RUN) for content in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
