"""``torchrun … -m mindspeed_core.train FLAGS``: the same as ``mindspeed-train FLAGS``."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the installed ``mindspeed-train``, and return its exit status.

    Raises:
        SystemExit: it is not installed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before the first import of ours; see `mindspeed_train.interrupts`.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from importlib.metadata import entry_points

    programs = [*entry_points(group="console_scripts", name="mindspeed-train")]
    if not programs:
        sys.exit("mindspeed-train is not installed here: pip install 'mindspeed-core[train]'")
    return int(programs[0].load()() or 0)


if __name__ == "__main__":
    sys.exit(main())
