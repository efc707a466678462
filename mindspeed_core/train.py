"""``torchrun … -m mindspeed_core.train FLAGS``: the same as ``mindspeed-train FLAGS``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from mindspeed_core.cli.train import main

    sys.exit(main())
