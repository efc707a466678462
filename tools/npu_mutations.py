"""Plant faults into the NPU code, one at a time, and report the share that the tests find.

    python tools/npu_mutations.py --count 60 --out tests/npu_conformance/mutations.json

Six faults are written down here: those that once survived. The others are drawn from the sources by the rules
of `mindspeed_testing.npu.faults`. A fault is found when a test fails that passes without it. Sources are not
touched: a changed module is put in the place of the file's when it is imported, in every process of a run.

First all tests run once without a fault, and it is recorded which functions each of them enters. A fault then
meets the tests that enter its function, the shortest first, until one fails; after them trainings on value
devices. All runs are forks of one process that has imported what takes long.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_megatron.devices.cann import AUTOLOAD
from mindspeed_testing.npu.__main__ import PYTEST
from mindspeed_testing.npu.faults import Fault, candidates, drawn, named
from mindspeed_testing.npu.stubs import build_stubs
from mindspeed_testing.npu.warm_runs import MARK, Job

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.95
KERNELS = "plugins/mindspeed_kernels/src/mindspeed_kernels"
MEMORY = "plugins/mindspeed_memory/src/mindspeed_memory"
LAGGING = tuple(
    f"plugins/mindspeed_testing/tests/{name}"
    for name in ("test_lagging_proofs.py", "test_planted_orders.py::test_nothing_is_named_without_a_fault")
)
TRAINED = {
    "mindspeed_memory": "gradients or swap or optimizer or layers",
    "mindspeed_moe": "experts",
    "mindspeed_tp": "products or losses",
    "mindspeed_pp": "stages",
    "mindspeed_cp": "rings",
}
"""Words for the trainings on the lagging device that reach a package; without any, all of them."""
BETWEEN_RANKS = (
    "plugins/mindspeed_kernels/tests/npu/npu_communication_values.py",
    "plugins/mindspeed_kernels/tests/npu/npu_exchanged_products.py",
    "plugins/mindspeed_kernels/tests/npu/npu_values_of_random_calls.py",
)
"""Tests whose calls run on ranks, where nobody watches which functions they enter."""
STARTING = ("npu_command.py", "npu_planned_commands.py", "npu_first_run.py", "npu_broken_te.py")
"""Tests that start programs, which takes long."""
EQUIVALENT: Mapping[str, str] = {
    f"{KERNELS}/ops/npu_ring_attention_update.py: torch.float32 is torch.bfloat16": (
        "no score lies between the lowest numbers of both dtypes, 1 % apart"
    ),
}
"""Changes without any effect, by ``file: change``, with the reason."""


def named_faults() -> list[Fault]:
    """Return the faults that earlier runs did not find."""
    host_copy, transfers = ROOT / MEMORY / "saved/host_copy.py", ROOT / MEMORY / "optim/transfers.py"
    products = ROOT / KERNELS / "ops/overlapped_matmul.py"
    return [
        named(host_copy, "copies.away.wait_stream(platform.current_stream())", "pass"),
        named(host_copy, "self._copies.platform.current_stream().wait_event(event)", "pass"),
        named(transfers, "self._platform.current_stream().wait_event(staged.arrived)", "pass"),
        named(
            products,
            "x.contiguous(), weight, hccl_name(group), group.size(), gather_index=0",
            "x.contiguous(), weight, hccl_name(group), dist.get_world_size(), gather_index=0",
        ),
        named(
            ROOT / KERNELS / "ops/fusion_attention_grad.py",
            '    options, state = _split(head_num, input_layout, given)\n    facts = given["softmax_max"]',
            '    options, state = _split(head_num, input_layout, given | {"keep_prob": 1.0})\n'
            '    facts = given["softmax_max"]',
        ),
        named(
            ROOT / MEMORY / "saved/device_compression.py",
            "npu_hans_encode(numbers, True, False,",
            "npu_hans_encode(numbers, False, False,",
        ),
    ]


def defaults(environment: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Return the arguments with a default of each operator of the installed torch_npu."""
    code = (
        "import json, torch, torch_npu\n"
        "found = {}\n"
        "for schema in torch._C._jit_get_all_schemas():\n"
        "    space, _, name = schema.name.partition('::')\n"
        "    if space in ('npu', 'atb'):\n"
        "        given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}\n"
        "        for full in ('torch_npu.', f'torch.ops.{space}.'):\n"
        "            found.setdefault(full + name, {}).update(given)\n"
        "print('\\n' + json.dumps(found, default=str))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(environment)
    )
    found: dict[str, dict[str, object]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class Runner:
    """A process that runs jobs in forks; see `mindspeed_testing.npu.warm_runs`."""

    def __init__(self, environment: Mapping[str, str], folder: Path, *, device: bool = True) -> None:
        """Start the process; it imports what it needs while the first job waits."""
        self._folder, self._device, self._jobs = folder, device, 0
        options = [] if device else ["--plain"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_testing.npu.warm_runs", *options],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Runner:
        """Return the runner."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def failure(self, options: Sequence[str], fault: Fault | None, seconds: float) -> str:
        """Run tests with a fault; return the first failure, empty where all pass."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs += 1
        place = self._folder / f"{'device' if self._device else 'plain'}-{self._jobs}"
        place.mkdir()
        if fault is not None:
            (place / "changed.txt").write_text(fault.text, encoding="utf-8")
        # Pytest would import sources that are named like tests itself, without the fault.
        given = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-m", "not thorough", *options]
        job = Job(
            tuple((*PYTEST[2:], *given) if self._device else given),
            path=str(fault.path) if fault is not None else "",
            text=str(place / "changed.txt"),
            log=str(place / "log"),
            seconds=seconds,
        )
        print(json.dumps(asdict(job)), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(MARK):
                return str(json.loads(line.removeprefix(MARK))["failure"])
        raise SystemExit("error: the process that runs the tests has ended")


def quick_tests() -> list[str]:
    """Return the files of NPU tests that run in one process."""
    folders = (ROOT / "tests/npu_conformance", *sorted(ROOT.glob("plugins/*/tests/npu")))
    files = [str(path.relative_to(ROOT)) for folder in folders for path in sorted(folder.glob("npu_*.py"))]
    slow = ("trainings.py", "npu_layouts.py", *STARTING, *BETWEEN_RANKS[:2])
    return [path for path in files if not path.endswith(slow)]


def touched(environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Run all quick tests without a fault; return the functions of each that passed.

    One that fails anyway says nothing about faults, and is left out.
    """
    record = folder / "touched.json"
    below = [f"--touched-below={path}" for path in sources()]
    options = ("-q", "-p", "no:cacheprovider", "-p", "mindspeed_testing.npu.touched", f"--touched={record}")
    deselected = f"--deselect={BETWEEN_RANKS[2]}::test_an_operator_of_two_ranks_is_its_formula_on_the_device"
    command = [sys.executable, "-m", "pytest", *PYTEST[2:], *options, *below, deselected, *quick_tests()]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(environment), capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(f"warning: fails without a fault, and is left out: {line}", flush=True)
    if not record.is_file():
        raise SystemExit(f"error: the tests do not run:\n{done.stdout[-4000:]}")
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return found


def sources() -> list[Path]:
    """Return the folders whose code uses NPUs."""
    plugins = [
        path
        for path in ROOT.glob("plugins/*/src/*")
        if path.name not in ("mindspeed_testing", "mindspeed_tune")
    ]
    return [ROOT / "mindspeed_core" / "platforms", *sorted(plugins)]


def function_at(fault: Fault) -> tuple[str, int]:
    """Return the innermost function around a fault: its file and its first line, decorators included."""
    tree = ast.parse(fault.path.read_text(encoding="utf-8"))
    around = [
        (node.end_lineno - first, first)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for first in [min([node.lineno, *(one.lineno for one in node.decorator_list)])]
        if node.end_lineno is not None and first <= fault.line <= node.end_lineno
    ]
    return os.path.realpath(fault.path), min(around)[1] if around else 0


def tests_of(fault: Fault, record: Mapping[str, Any]) -> list[str]:
    """Return the tests that enter a fault's function, the shortest first."""
    place = list(function_at(fault))
    found = [name for name, test in record.items() if place in test["functions"]]
    return sorted(found, key=lambda name: record[name]["seconds"])


def on_ranks(fault: Fault) -> Iterator[str]:
    """Yield files of tests whose ranks may meet a fault, the likeliest first."""
    inside = fault.path.relative_to(ROOT).parts
    package = inside[1] if inside[0] == "plugins" else ""
    if package == "mindspeed_kernels":
        yield from BETWEEN_RANKS
    yield "tests/npu_conformance/npu_layouts.py"
    folder = ROOT / "plugins" / package / "tests" / "npu"
    if package:
        yield from (str(path.relative_to(ROOT)) for path in sorted(folder.glob("npu_*trainings.py")))
    if package in ("mindspeed_kernels", ""):
        for name in ("cp", "moe", "tp"):
            yield from (
                str(path.relative_to(ROOT))
                for path in sorted((ROOT / f"plugins/mindspeed_{name}/tests/npu").glob("npu_*trainings.py"))
            )


def naming(fault: Fault) -> list[str]:
    """Return the ordinary tests of a package that import the module of a fault."""
    folder = ROOT.joinpath(*fault.path.relative_to(ROOT).parts[:2], "tests")
    parent, stem = fault.path.parent.name, fault.path.stem
    word = re.compile(rf"\b{parent}(\.| import .*\b){stem}\b")
    found = [path for path in folder.glob("test_*.py") if word.search(path.read_text(encoding="utf-8"))]
    return [str(path.relative_to(ROOT)) for path in sorted(found)]


def on_host(fault: Fault) -> list[str]:
    """Return the ordinary tests of a package that run NPU branches by the kernels' schemas."""
    folder = ROOT.joinpath(*fault.path.relative_to(ROOT).parts[:2], "tests")
    return [str(path.relative_to(ROOT)) for path in sorted(folder.glob("test_*npu*.py"))]


def is_wait(fault: Fault) -> bool:
    """Return whether the lagging device has to name a fault."""
    return fault.rule == "missing wait" or fault.change.endswith(" is pass")


def judge(
    fault: Fault, record: Mapping[str, Any], device: Runner, plain: Runner, options: argparse.Namespace
) -> dict[str, object]:
    """Return the fault, and the test that finds it; empty where none does."""
    found, entered = "", [] if is_wait(fault) else tests_of(fault, record)
    if is_wait(fault):
        package = fault.path.relative_to(ROOT).parts[1]
        words = TRAINED.get(package, "")
        among = f"({words}) and not every_proof" if words else "not every_proof"
        chosen = [*LAGGING, "-k", among, "-m", ""]
        found = plain.failure(chosen, fault, options.timeout)
        if not found and (suspects := naming(fault)):
            found = plain.failure(suspects, fault, options.timeout)
    elif entered:
        found = device.failure(entered, fault, options.timeout)
    if not found and not is_wait(fault) and (suspects := on_host(fault)):
        found = plain.failure(suspects, fault, options.timeout)
    if not found and not is_wait(fault) and not options.quick:
        for path in on_ranks(fault):
            found = device.failure([path], fault, options.timeout)
            if found:
                break
    where = f"{fault.path.relative_to(ROOT)}:{fault.line}"
    reason = EQUIVALENT.get(f"{fault.path.relative_to(ROOT)}: {fault.change}", "")
    told: dict[str, object] = {"rule": fault.rule, "place": where, "what": fault.change, "found": found}
    return {**told, "tests": len(entered), **({"equivalent": reason} if reason and not found else {})}


def chosen_faults(environment: Mapping[str, str], count: int, seed: int) -> list[Fault]:
    """Return the named faults and those that are drawn."""
    known = named_faults()
    places = {(fault.path, fault.line) for fault in known}
    made = candidates(sources(), defaults(environment))
    return [*known, *drawn([one for one in made if (one.path, one.line) not in places], count, seed)]


def main(arguments: Sequence[str]) -> int:
    """Plant all faults, print and write what was found; fail below the goal."""
    parser = argparse.ArgumentParser(prog="python tools/npu_mutations.py", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="Faults that are drawn, beside the named ones.")
    parser.add_argument("--seed", type=int, default=0, help="Of the draw.")
    parser.add_argument("--timeout", type=float, default=240.0, help="Seconds of one run of tests.")
    parser.add_argument("--only", default="", metavar="TEXT", help="Plant the faults that this occurs in.")
    parser.add_argument(
        "--waits", choices=("only", "none"), help="Plant missing waits alone, or none of them."
    )
    parser.add_argument("--resume", action="store_true", help="Keep what the file of --out says was found.")
    parser.add_argument("--quick", action="store_true", help="Leave out tests on ranks.")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="Where the JSON goes.")
    parser.add_argument(
        "--touched", type=Path, default=None, metavar="FILE", help="Keep the tests' functions here."
    )
    parser.add_argument("--list", action="store_true", help="Print the faults, plant none.")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mindspeed-mutations-")))
        environment = build_stubs(folder / "stubs").environment(device=True)
        faults = [
            fault
            for fault in chosen_faults(environment, options.count, options.seed)
            if options.only in str(fault)
            and (options.waits is None or is_wait(fault) == (options.waits == "only"))
        ]
        if options.list:
            print("\n".join(map(str, faults)))
            return 0
        record = _kept(options.touched) or touched(environment, folder)
        if options.touched is not None:
            options.touched.write_text(json.dumps(record), encoding="utf-8")
        device = stack.enter_context(Runner(environment, folder))
        plain = stack.enter_context(Runner({**os.environ, AUTOLOAD: "0"}, folder, device=False))
        known = _found_before(options.out) if options.resume else {}
        results = []
        for fault in faults:
            result = known.get(_key(fault)) or judge(fault, record, device, plain, options)
            results.append(result)
            told = result["found"] or result.get("equivalent") or "SURVIVED"
            print(f"{result['rule']:<18} {result['place']}: {result['what']}: {told}", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(_report(results), indent=1) + "\n", encoding="utf-8")
    report = _report(results)
    print(
        f"{report['found']} of {report['planted']} faults are found: {report['share']:.1%}; goal {GOAL:.0%}"
    )
    return 0 if report["share"] >= GOAL else 1


def _kept(path: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}
    return found


def _key(fault: Fault) -> tuple[str, str]:
    return f"{fault.path.relative_to(ROOT)}:{fault.line}", fault.change


def _found_before(path: Path) -> dict[tuple[str, str], dict[str, object]]:
    """Return the faults that an earlier run found, with what it wrote."""
    recorded = json.loads(path.read_text(encoding="utf-8"))["faults"]
    return {(one["place"], one["what"]): one for one in recorded if one["found"]}


def _report(results: Sequence[dict[str, object]]) -> dict[str, Any]:
    """Return the results with the share of those found, of all that change anything."""
    real = [result for result in results if "equivalent" not in result]
    found = sum(bool(result["found"]) for result in real)
    planted = Counter(str(result["rule"]) for result in real)
    survived = Counter(str(result["rule"]) for result in real if not result["found"])
    return {
        "planted": len(real),
        "found": found,
        "share": found / len(real) if real else 1.0,
        "without_effect": len(results) - len(real),
        "by_rule": {rule: [count - survived[rule], count] for rule, count in sorted(planted.items())},
        "faults": list(results),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
