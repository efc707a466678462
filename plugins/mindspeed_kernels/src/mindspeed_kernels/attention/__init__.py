"""Common parts of all forms of attention: visible keys, biases, layouts, blockwise computation.

The operators use these modules, and these modules use the operators' contracts; whichever is imported first,
the operators are complete before anything here is used.
"""

from __future__ import annotations

import mindspeed_kernels.ops  # noqa: F401
