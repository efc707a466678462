"""Checks that ranks hold the same, in a world where nobody else holds anything: they agree.

``--test-mode`` gathers parameters of every replica and compares them. What is gathered has no values, so that
no comparison says anything; the calls are made as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspeed_core.feature import Patch
from mindspeed_megatron.fake.answers import Answers


def agreeing_ranks(answers: Answers) -> Patch:
    """Return the patch under which megatron-core's comparison of replicas finds them equal.

    Args:
        answers: of the dry run.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run_realtime_tests(self: Any) -> Any:
            with answers.comparisons_hold():
                return original(self)

        return run_realtime_tests

    return Patch(
        target="megatron.core.transformer.attention:SelfAttention.run_realtime_tests",
        new=wrap,
        kind="wrap",
        reason="compares values of other ranks, which do not exist",
    )
