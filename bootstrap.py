"""Run a task of noxfile.py on a machine that has only Python (with venv) and git.

Makes a private environment in .bootstrap/ that holds nox and calls it: ``python3 bootstrap.py demo``,
``python3 bootstrap.py tests``. Works where the system Python refuses ``pip install``.
"""

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".bootstrap"
BIN = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")


def tasks() -> dict[str, str]:
    """Read the names of noxfile.py's sessions, each with its first line, without nox."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return {node.name: (ast.get_docstring(node) or "").split("\n")[0] for node in functions}


def main() -> int:
    """Install nox once and run the named sessions; ``--help`` and no name tell them, and install nothing."""
    if sys.version_info < (3, 10):  # noqa: UP036 - a clear word for whoever starts it with an older one
        print("mindspeed-core needs Python 3.10 or newer", file=sys.stderr)
        return 1
    if not sys.argv[1:] or {"-h", "--help"} & set(sys.argv[1:]):
        print("usage: python3 bootstrap.py TASK … [-- ARGUMENTS]\n")
        for name, text in tasks().items():
            print(f"  {name:<16} {text}")
        return 0
    python = BIN / "python"
    if not (BIN / "nox").exists():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "nox>=2024.4"], check=True)
    command = [python, "-m", "nox", "--noxfile", ROOT / "noxfile.py", "--session", *sys.argv[1:]]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
