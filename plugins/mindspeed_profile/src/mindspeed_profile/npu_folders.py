"""Records of NPUs, which torch_npu writes as folders: handed to msprof-analyze, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from mindspeed_core.errors import UserError

_SUFFIX, _ANALYSED = "_ascend_pt", "ASCEND_PROFILER_OUTPUT"
_PROGRAM = "msprof-analyze"


def npu_folders(folder: Path) -> list[Path]:
    """Return the records of NPUs in a folder, or the folder itself where it is one."""
    if not folder.is_dir():
        return []
    if folder.name.endswith(_SUFFIX):
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name.endswith(_SUFFIX))


def analyse_npu(folder: Path) -> None:
    """Let msprof-analyze write its analysis into the folder.

    Raises:
        UserError: it is not installed, a record has not been analysed by torch_npu yet, or it fails.
    """
    records = npu_folders(folder)
    raw = [path for path in records if not (path / _ANALYSED).is_dir()]
    if raw:
        from mindspeed_profile.backends import later_analysis

        raise UserError(
            f"{raw[0]} is not analysed yet, as with --profile-analyse off; first: {later_analysis(folder)}"
        )
    program = shutil.which(_PROGRAM)
    if program is None:
        raise UserError(
            f"{folder} holds records of NPUs, which {_PROGRAM} reads: pip install {_PROGRAM}, or open them "
            "with MindStudio Insight"
        )
    done = subprocess.run([program, "-m", "all", "-d", str(folder)], check=False)
    if done.returncode:
        raise UserError(f"{_PROGRAM} -m all -d {folder} ended with status {done.returncode}")
