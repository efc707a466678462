"""One rank of a script of Megatron-LM with the adaptor's line in it, watched from outside.

Usage: `python adapted_rank.py SCRIPT NUMBERS FACTS [FLAGS]` with Megatron-LM on the module path. SCRIPT is
run as it is but for the line; the losses of each step go to NUMBERS, what was found out to FACTS, as JSON.
The environment variable ADAPTOR_FIRST=0 imports megatron before the adaptor.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

LINE = "import mindspeed_core.megatron_adaptor\n"


def recorder(numbers: Path) -> object:
    """A probe of the stage `train_step`, made after the adaptor's own imports were timed."""
    from mindspeed_core.feature import hookimpl

    class Recorder:
        @hookimpl(wrapper=True)
        def train_step(self, run: Any) -> Any:
            result = yield
            if result.losses:
                line = {**result.losses, "grad_norm": float(result.grad_norm), "step": run.iteration}
                with numbers.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            return result

    return Recorder()


def with_line(script: Path, target: Path) -> Path:
    """A copy of the script with the line after its import of torch."""
    text = script.read_text(encoding="utf-8")
    at = text.index("import torch\n")
    target.write_text(
        text[:at] + "import torch\n" + LINE + text[at + len("import torch\n") :], encoding="utf-8"
    )
    return target


def main() -> None:
    """Run the script, then look at what is left."""
    script, numbers, facts = (Path(name).resolve() for name in sys.argv[1:4])
    rank = int(os.environ.get("RANK", "0"))
    copy = with_line(script, facts.parent / f"{script.stem}-{rank}.py")
    sys.argv = [str(copy), *sys.argv[4:]]
    sys.path.insert(0, str(script.parent))
    if os.environ.get("ADAPTOR_FIRST", "1") == "0":
        import_module("megatron.training")
    else:
        # What the script imports anyway, so that only the adaptor's own imports are timed.
        runpy.run_path(str(script), run_name="imports")
    # torch changes its modules by itself when something is compiled for the first time.
    import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()
    residue = import_module("mindspeed_testing.leak_check").ProcessState
    before = residue.now()
    started = time.process_time()
    adaptor = import_module("mindspeed_core.megatron_adaptor")
    known: dict[str, Any] = {"adaptor_seconds": time.process_time() - started}
    at_entry = residue.now()
    adaptor.install(extra_plugins=[recorder(numbers)])
    try:
        runpy.run_path(str(copy), run_name="__main__")
    finally:
        known["left"] = _ours(residue.now().left_since(at_entry))
        adaptor.uninstall()
        known["left_after_uninstall"] = _ours(residue.now().left_since(before))
        facts.with_suffix(f".{rank}.json").write_text(json.dumps(known), encoding="utf-8")


THEIRS = (
    "environment variable",
    "torch.optim.adamw.AdamW.step is",
    "torch.autograd.profiler._cupti",
    "torch._opaque_base._FakeScriptObject_cls is",
)
"""What Megatron-LM leaves in the environment, and what torch changes of itself on first use."""


def _ours(phrases: list[str]) -> list[str]:
    return [phrase for phrase in phrases if not phrase.startswith(THEIRS)]


if __name__ == "__main__":
    main()
