"""``python -m mindspeed_testing.npu [--source PACKAGE] PATHS``: NPU tests on a machine without an NPU.

Makes the stand-in libraries and starts pytest with them in a process of its own, since a process finds its
libraries when it starts. Tests are the files ``npu_*.py``; an ordinary pytest run does not see them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mindspeed_core.errors import UserError
from mindspeed_testing.npu.stubs import build_stubs, installed_version

PYTEST = (
    *("-p", "mindspeed_testing.npu.plugin"),
    *("-o", "python_files=npu_*.py"),
    # What torch_npu and its runtime say while they are imported is not about the tests.
    "--disable-warnings",
)


def main(arguments: Sequence[str]) -> int:
    """Run the tests; ``arguments`` are pytest's, with ``--source``, ``--schemas`` and ``--write-schemas``."""
    try:
        version = installed_version()
        with tempfile.TemporaryDirectory(prefix="mindspeed-npu-") as folder:
            stubs = build_stubs(Path(folder))
            size = f"{len(stubs.libraries)} stand-in libraries with {len(stubs.symbols)} symbols"
            print(f"torch_npu {version}: {size}; no device, numbers as contracts say", flush=True)
            command = [sys.executable, "-m", "pytest", *PYTEST, *_sources(arguments), *arguments]
            return subprocess.run(command, env=stubs.environment(device=True), check=False).returncode
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _sources(arguments: Sequence[str]) -> list[str]:
    """Return the packages of every installed plugin and of the core, unless some are named."""
    if any(argument.partition("=")[0] == "--source" for argument in arguments):
        return []
    from mindspeed_core.registry import Registry

    packages = {name for names in Registry.discover().packages().values() for name in names}
    return [f"--source={name}" for name in sorted(packages)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
