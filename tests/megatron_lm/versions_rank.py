"""One rank of several trainings of Megatron-LM's own `pretrain_gpt.py`, one after the other in one process.

Usage: `python versions_rank.py CASES RESULTS` with Megatron-LM first on the module path. CASES is a JSON
file with a list of trainings: their name, whether the adaptor's line is in the script, and flags. The first
rank and the last write to RESULTS, for each training, what its steps gave, if they know it, and how many
functions of Megatron-LM were intercepted, which the first says.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import sys
import traceback
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import emulated_rank
from adapted_rank import with_line

NUMBERS = ("lm loss", "grad_norm")


def untouched(script: Path, flags: list[str]) -> list[dict[str, float]]:
    """Train without the adaptor, with the processor's answers to calls of cuda."""
    with emulated_rank.emulated() as answers:
        sys.argv = [str(script), *flags]
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        return list(answers)


def adapted(script: Path, flags: list[str]) -> tuple[list[dict[str, float]], int]:
    """Train with the adaptor's line in a copy of the script."""
    from mindspeed_core.feature import hookimpl

    steps: list[dict[str, float]] = []

    class Recorder:
        @hookimpl(wrapper=True)
        def train_step(self, run: Any) -> Any:
            result = yield
            if result.losses:
                steps.append({**result.losses, "grad_norm": float(result.grad_norm)})
            return result

    adaptor = import_module("mindspeed_core.megatron_adaptor")
    adaptor.install(extra_plugins=[Recorder()])
    said = io.StringIO()
    sys.argv = [str(script), *flags]
    try:
        with redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        adaptor.uninstall()
        print(said.getvalue())
    found = re.search(r"(\d+) functions of Megatron-LM are intercepted", said.getvalue())
    # One of them is the recorder's.
    return steps, int(found.group(1)) - 1 if found else 0


def main() -> None:
    """Train every case and write down what it gave."""
    cases, results = (Path(name) for name in sys.argv[1:3])
    checkout = Path(os.environ["MEGATRON_LM_PATH"]).resolve()
    sys.path.insert(0, str(checkout))
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    script = checkout / "pretrain_gpt.py"
    copy = with_line(script, results.parent / f"pretrain_gpt-{rank}.py")
    for case in json.loads(cases.read_text(encoding="utf-8")):
        print(f"######## {case['name']}", flush=True)
        line: dict[str, Any] = {"name": case["name"], "calls": 0, "error": ""}
        try:
            if case["adapted"]:
                steps, line["calls"] = adapted(copy, case["flags"])
            else:
                steps = untouched(script, case["flags"])
            line |= {name: [step[name] for step in steps] for name in NUMBERS}
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                line["error"] = f"{type(error).__name__}: {error}"
        if rank in (0, size - 1):
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        import_module("megatron.training.training").destroy_global_state()


if __name__ == "__main__":
    main()
