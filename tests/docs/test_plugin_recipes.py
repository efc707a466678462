"""The plugin that the recipes build works: it is found, planned, trained and tested by its own tests."""

from __future__ import annotations

import re

from markdown_files import blocks, read


def test_every_feature_of_the_guide_is_discovered_and_nothing_is_broken(program, guide_plugin):
    listed = program("mindspeed_core.cli.features", "list", path=guide_plugin / "src")
    source = "".join(block.text for block in blocks(read("docs/plugin-recipes.md"), "python"))
    declared = re.findall(r'^    name = "(acme-[a-z-]+)"', source, re.MULTILINE)

    assert listed.returncode == 0, listed.stderr
    assert len(declared) == 10
    assert [name for name in declared if not re.search(rf"^{name}\t", listed.stdout, re.MULTILINE)] == []
    assert "broken" not in listed.stdout


def test_the_guides_own_tests_pass(program, guide_plugin):
    result = program(
        "pytest", "-q", "-p", "no:cacheprovider", "tests", path=guide_plugin / "src", cwd=guide_plugin
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout


def test_the_guides_sub_command_reads_training_flags(program, guide_plugin):
    flags = ("--num-layers", "2", "--hidden-size", "8")
    result = program("mindspeed_core.cli.features", "acme-size", "--", *flags, path=guide_plugin / "src")

    assert result.stdout == f"{12 * 2 * 8 * 8} parameters\n", result.stderr


def test_the_guides_parallel_command_runs_in_one_process_and_in_several(program, guide_plugin):
    path = guide_plugin / "src"
    alone = program("mindspeed_core.train", "acme-ranks", path=path)
    shared = program("mindspeed_core.train", "--nproc", "2", "acme-ranks", path=path)

    assert (alone.stdout, shared.stdout) == ("processes: 1\n", "processes: 2\n"), alone.stderr + shared.stderr


def test_the_guides_fallback_is_printed_with_its_reason(program, guide_plugin):
    flags = ("--platform", "cpu", "--acme-device-timer")
    result = program("mindspeed_core.cli.features", "plan", "--", *flags, path=guide_plugin / "src")

    assert result.returncode == 0, result.stderr
    assert "CPU has no device clock" in result.stdout


def test_the_guides_patch_is_listed_with_its_reason(program, guide_plugin):
    flags = ("--platform", "cpu", "--acme-exact-mask")
    result = program("mindspeed_core.cli.features", "patches", "--", *flags, path=guide_plugin / "src")

    assert "no option reaches it" in result.stdout, result.stderr
