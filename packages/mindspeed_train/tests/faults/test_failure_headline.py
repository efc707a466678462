"""The supervisor names the error of a worker, not what stands below it."""

from __future__ import annotations

import pytest

from mindspeed_train.launch.supervisor import Cause, _headline

FRAMES = 'Traceback (most recent call last):\n  File "loop.py", line 3, in train\n    step()\n    ^^^^^^\n'
GO_ON = "5 of 12 steps are done; go on with\n    -> mindspeed-train FLAGS"
END = GO_ON + "\nlast saved: step 5 in ckpt/iter_0000005"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("error: --save ckpt: read-only\n" + END, "failed: --save ckpt: read-only"),
        (FRAMES + "RuntimeError: a loader was killed\n" + END, "failed: RuntimeError: a loader was killed"),
        (FRAMES + "RuntimeError: a loader was killed", "failed: RuntimeError: a loader was killed"),
        (
            FRAMES
            + "KeyError: 1\n\nDuring handling, another exception occurred:\n\n"
            + FRAMES
            + "ValueError: 2\n"
            + END,
            "failed: ValueError: 2",
        ),
    ],
)
def test_a_failure_is_named_by_its_error(text, named):
    assert _headline(Cause(0, "unexpected", text, 1)) == named
