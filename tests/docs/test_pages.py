"""The pages agree with the code, with each other and with the files they point to."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from markdown_files import ROOT, blocks, files, headings, links, read

from mindspeed_core.flags import flag_set
from mindspeed_core.registry import Registry

OF_OTHER_PROGRAMS = {
    "--standalone",
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--output-prefix",
    "--check",
    "--help",
}
"""Options of torchrun, of prepare-text and of docs/generate.py."""


def test_generated_pages_are_up_to_date():
    checked = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_to_a_file(path):
    text = path.read_text(encoding="utf-8")
    relative = [target for target in links(text) if not re.match(r"[a-z]+:|#", target)]

    assert [target for target in relative if not (path.parent / target.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_to_a_heading_has_its_heading(path):
    missing = []
    for target in links(path.read_text(encoding="utf-8")):
        name, mark, anchor = target.partition("#")
        if mark and not re.match(r"[a-z]+:", target):
            page = (path.parent / name) if name else path
            titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}:
                missing.append(target)

    assert missing == []


def test_the_chinese_readme_has_the_same_code():
    assert blocks(read("README.zh-CN.md")) == blocks(read("README.md"))


def test_the_chinese_readme_has_the_same_structure():
    english, chinese = read("README.md"), read("README.zh-CN.md")

    assert headings(chinese) == headings(english)
    assert chinese.count("\n|") == english.count("\n|")
    inside = [target for target in links(english) if "README" not in target]
    assert [target for target in links(chinese) if "README" not in target] == inside


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_names_a_package_registry(path):
    text = path.read_text(encoding="utf-8")

    assert re.findall(r"https?://(?:[\w.-]*\.)?(?:pypi\.|pythonhosted\.)[^\s)]*", text) == []


def test_every_flag_in_the_documentation_exists():
    known = {option for entry in flag_set(Registry.discover()).entries for option in entry.flag.options}
    shown = {
        option
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", path.read_text(encoding="utf-8"))
    }
    # Declared by the examples themselves.
    shown -= {o for o in shown if o.startswith(("--acme-", "--no-acme-"))} | {"--log-gradient-noise"}

    assert shown - known - OF_OTHER_PROGRAMS == set()
