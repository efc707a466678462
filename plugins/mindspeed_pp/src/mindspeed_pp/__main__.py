"""Run ``mindspeed-pp`` as ``python -m mindspeed_pp``."""

from __future__ import annotations

import sys

from mindspeed_pp.program import main

sys.exit(main())
