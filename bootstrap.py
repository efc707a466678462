"""Run a task of noxfile.py on a machine that has only Python (with venv) and git.

Makes a private environment in .bootstrap/ that holds nox and calls it: ``python3 bootstrap.py demo``,
``python3 bootstrap.py tests``. Works where the system Python refuses ``pip install``.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".bootstrap"
BIN = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")


def main() -> int:
    """Install nox once and run the named sessions; without a name, list them."""
    if sys.version_info < (3, 10):  # noqa: UP036 - a clear word for whoever starts it with an older one
        print("mindspeed-core needs Python 3.10 or newer", file=sys.stderr)
        return 1
    python = BIN / "python"
    if not (BIN / "nox").exists():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "nox>=2024.4"], check=True)
    sessions = sys.argv[1:]
    arguments = ["--session", *sessions] if sessions else ["--list"]
    return subprocess.run([python, "-m", "nox", "--noxfile", ROOT / "noxfile.py", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main())
