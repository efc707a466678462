"""``python -m mindspeed_train FLAGS``: the same as ``mindspeed-train FLAGS``."""

from __future__ import annotations

import sys

from mindspeed_train.program import main

sys.exit(main())
