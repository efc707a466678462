"""``torchrun … -m mindspeed_core.train FLAGS``: the same as ``mindspeed-train FLAGS``."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before the first import of ours; see `mindspeed_core.terminal.interrupts`.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mindspeed_core.cli.train import main

    sys.exit(main())
