"""Plant faults into the NPU code, one at a time, and report the share that the tests find.

    python tools/npu_mutations.py --count 60 --out mutations.json

Six faults are written down here: those that once survived. The others are drawn from the sources by the rules
of `mindspeed_testing.npu.faults`. A fault is found when a test fails that passes without it. Sources are not
touched: a changed module is put in the place of the file's when it is imported, in every process of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from mindspeed_core.platforms.cann import AUTOLOAD
from mindspeed_testing.npu.__main__ import PYTEST
from mindspeed_testing.npu.faults import Fault, candidates, drawn, named
from mindspeed_testing.npu.stubs import Stubs, build_stubs

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.95
PATIENT = ("-o", "faulthandler_timeout=1800")
"""The trainings of a whole file are one fixture."""
KERNELS = "plugins/mindspeed_kernels/src/mindspeed_kernels"
MEMORY = "plugins/mindspeed_memory/src/mindspeed_memory"
MUTANT = "MINDSPEED_MUTANT"
SITE = '''"""Puts a changed source in the place of a file's when it is imported."""
import importlib.machinery
import os

_path, _text = os.environ["{variable}"].split(os.pathsep)
_original = importlib.machinery.SourceFileLoader.get_code


def _get_code(loader, name):
    if os.path.realpath(loader.path) != _path:
        return _original(loader, name)
    with open(_text, encoding="utf-8") as file:
        return compile(file.read(), _path, "exec")


importlib.machinery.SourceFileLoader.get_code = _get_code
'''


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


@dataclass(frozen=True)
class Run:
    """Tests that may find a fault.

    Attributes:
        paths: of pytest.
        on_npu: on the stand-ins for NPUs; otherwise on the CPU, as the lagging device runs.
        options: of pytest.
    """

    paths: tuple[str, ...]
    on_npu: bool = True
    options: tuple[str, ...] = ()


LAGGING = Run(
    tuple(f"plugins/mindspeed_testing/tests/test_{name}.py" for name in ("lagging_proofs", "planted_orders")),
    on_npu=False,
    options=("-m", "not thorough"),
)


def runs_for(fault: Fault) -> Iterator[Run]:
    """Yield the tests that may find a fault, the likeliest first."""
    if fault.rule == "missing wait" or fault.what.endswith(" is pass"):
        yield LAGGING
        return
    package = fault.path.relative_to(ROOT).parts[1] if "plugins" in fault.path.parts else ""
    folder = ROOT / "plugins" / package / "tests" / "npu" if package else ROOT / "tests/npu_conformance"
    files = sorted(str(path.relative_to(ROOT)) for path in folder.glob("npu_*.py"))
    quick = [path for path in files if not path.endswith(("trainings.py", "first_run.py"))]
    # A file that names the changed module, or what it defines, finds most at once.
    near = [path for path in quick if fault.path.stem in (ROOT / path).read_text(encoding="utf-8")]
    if near:
        yield Run(tuple(near))
    if len(near) < len(quick):
        yield Run(tuple(path for path in quick if path not in near))
    trainings = [path for path in files if path.endswith("trainings.py")]
    if trainings:
        yield Run(tuple(trainings), options=("-m", "not thorough"))
    if package == "mindspeed_kernels":
        yield Run(
            (
                "tests/npu_conformance/npu_layouts.py",
                "plugins/mindspeed_cp/tests/npu",
                "plugins/mindspeed_moe/tests/npu",
                "plugins/mindspeed_tp/tests/npu",
            ),
            options=("-m", "not thorough"),
        )


def defaults() -> dict[str, dict[str, object]]:
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
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_ENVIRONMENT
    )
    found: dict[str, dict[str, object]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


_ENVIRONMENT: dict[str, str] = {}
"""Of processes with the stand-in libraries; filled when they are made."""


def failing(run: Run, fault: Fault | None, folder: Path, timeout: float) -> str:
    """Run tests with a fault; return the first failure, empty where all pass."""
    environment = dict(_ENVIRONMENT) if run.on_npu else {**os.environ, AUTOLOAD: "0"}
    if fault is not None:
        place = Path(tempfile.mkdtemp(dir=folder))
        (place / "sitecustomize.py").write_text(SITE.format(variable=MUTANT), encoding="utf-8")
        changed = place / "changed.py.txt"
        changed.write_text(fault.text, encoding="utf-8")
        environment[MUTANT] = os.pathsep.join((os.path.realpath(fault.path), str(changed)))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    plugin = PYTEST[2:] if run.on_npu else ()
    command = [sys.executable, "-m", "pytest", *plugin, "-x", "-q", "-p", "no:cacheprovider", *PATIENT]
    try:
        done = subprocess.run(
            [*command, *run.options, *run.paths],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {timeout:g} s"
    if done.returncode in (0, 5):
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else (done.stderr.strip().splitlines() or ["ended without a word"])[-1]


def judge(fault: Fault, folder: Path, timeout: float) -> dict[str, object]:
    """Return the fault, and the test that finds it; empty where none does."""
    started = time.monotonic()
    found = ""
    for run in runs_for(fault):
        found = failing(run, fault, folder, timeout)
        if found:
            _check_soundness(run, folder, timeout)
            break
    where = f"{fault.path.relative_to(ROOT)}:{fault.line}"
    seconds = round(time.monotonic() - started, 1)
    return {"rule": fault.rule, "place": where, "what": fault.what, "found": found, "seconds": seconds}


_SOUND: dict[Run, str] = {}
_CHECKING = Lock()


def _check_soundness(run: Run, folder: Path, timeout: float) -> None:
    """See once that tests pass without a fault.

    Raises:
        SystemExit: they fail anyway, and say nothing about faults.
    """
    with _CHECKING:
        if run not in _SOUND:
            _SOUND[run] = failing(run, None, folder, timeout)
    if _SOUND[run]:
        raise SystemExit(f"error: {' '.join(run.paths)} fails without a fault: {_SOUND[run]}")


def main(arguments: Sequence[str]) -> int:
    """Plant all faults, print and write what was found; fail below the goal."""
    parser = argparse.ArgumentParser(prog="python tools/npu_mutations.py", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="Faults that are drawn, beside the named ones.")
    parser.add_argument("--seed", type=int, default=0, help="Of the draw.")
    parser.add_argument("--jobs", type=int, default=2, help="Runs side by side.")
    parser.add_argument("--timeout", type=float, default=900.0, help="Seconds of one run of tests.")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="Where the JSON goes.")
    parser.add_argument("--list", action="store_true", help="Print the faults, plant none.")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mindspeed-mutations-") as name:
        folder = Path(name)
        stubs: Stubs = build_stubs(folder / "stubs")
        _ENVIRONMENT.update(stubs.environment(device=True))
        packages = [
            path
            for path in ROOT.glob("plugins/*/src/*")
            if path.name not in ("mindspeed_testing", "mindspeed_tune")
        ]
        known = named_faults()
        places = {(fault.path, fault.line) for fault in known}
        made = candidates(sorted(packages), defaults())
        others = [one for one in made if (one.path, one.line) not in places]
        faults = [*known, *drawn(others, options.count, options.seed)]
        if options.list:
            print("\n".join(map(str, faults)))
            return 0
        results = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for result in pool.map(lambda fault: judge(fault, folder, options.timeout), faults):
                results.append(result)
                told = result["found"] or "SURVIVED"
                print(f"{result['rule']:<18} {result['place']}: {result['what']}: {told}", flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(_report(results), indent=1) + "\n", encoding="utf-8")
    report = _report(results)
    print(
        f"{report['found']} of {report['planted']} faults are found: {report['share']:.1%}; goal {GOAL:.0%}"
    )
    return 0 if report["share"] >= GOAL else 1


def _report(results: Sequence[dict[str, object]]) -> dict[str, object]:
    found = sum(bool(result["found"]) for result in results)
    planted = Counter(str(result["rule"]) for result in results)
    survived = Counter(str(result["rule"]) for result in results if not result["found"])
    return {
        "planted": len(results),
        "found": found,
        "share": found / len(results) if results else 1.0,
        "by_rule": {rule: [count - survived[rule], count] for rule, count in sorted(planted.items())},
        "faults": list(results),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
