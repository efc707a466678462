"""Accepted scripts at their full size and world: one rank of each planned in a dry run."""

import json
import subprocess
import sys

import checked_lines
import pytest

pytestmark = pytest.mark.thorough

ACCEPTED = json.loads((checked_lines.LINES.parent / "accepted.json").read_text(encoding="utf-8"))
SCRIPTS = [
    script
    for source in ACCEPTED
    for script in checked_lines.scripts(source)
    if script.name in ACCEPTED[source]["accepted"]
    # It looks at values, which a dry run does not have.
    and not {"--use-megatron-fsdp", "--use-custom-fsdp"} & {*script.words}
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.source}:{script.name}")
def test_one_rank_of_the_script_is_planned(script, tmp_path):
    world = checked_lines.world_of(script)
    flags = [
        *checked_lines.without_files(script.words),
        "--platform",
        "fake",
        "--fake-world-size",
        str(world),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_core.train", *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"dry run of rank 0 of {world}" in done.stdout or "--skip-train" in script.words
