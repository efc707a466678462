"""Parts that megatron-core gained: each is where the page says, and what asks for it has a verdict."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from markdown_files import ROOT
from newer_parts import PARTS
from packaging.version import Version

from mindspeed_megatron.config_flags import EXCLUDED
from mindspeed_megatron.newer_fields import ACTING
from mindspeed_megatron.touch_points import survey
from mindspeed_megatron.touch_points.record import index
from mindspeed_megatron.upstream.table import is_judged
from mindspeed_train.arguments.refusals import REFUSALS

CORE = Path(survey.sources_place()) / "megatron" / "core"
JUDGED = {*EXCLUDED, *ACTING, *(refusal.dest for refusal in REFUSALS)}
NAMES = [part.module for part in PARTS]


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_a_part_is_there_since_the_version_of_its_row(part):
    assert part.since in index()
    assert (CORE / part.module).is_file() == (Version(version("megatron-core")) >= Version(part.since))


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_what_asks_for_a_part_has_a_verdict_and_a_test(part):
    assert [field for field in part.fields if field not in JUDGED] == []
    assert [flag for flag in part.flags if not is_judged(flag)] == []
    assert [path for path in part.tests if not (ROOT / path).is_file()] == []
    assert part.fields or part.flags or part.tests
