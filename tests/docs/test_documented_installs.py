"""Installs from a clone name every distribution of this repository that they need."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CONTRIBUTING.md", "docs/quick-start.md", "docs/quick-start.zh-CN.md")


def requirements(folder):
    """Distributions of this repository that one of them depends on, by their names; its own name first."""
    metadata = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
    name = re.search(r'^name = "([^"]+)"', metadata, re.M)[1]
    needed = re.search(r"^dependencies = \[(.*?)\]", metadata, re.M | re.S)[1]
    return name, set(re.findall(r'"(mindspeed-[a-z]+)', needed))


@pytest.mark.parametrize("page", PAGES)
def test_nothing_of_this_repository_is_looked_for_elsewhere(page):
    installed = set()
    for line in (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if not line.startswith("pip install -c"):
            continue
        paths = [path.strip("'") for path in re.findall(r"-e (\S+)", line)]
        named = [requirements(path.partition("[")[0]) for path in paths]
        installed |= {name for name, _ in named}
        for name, needed in named:
            assert needed <= installed, name
    assert installed


def test_help_of_the_bootstrap_names_every_session_and_installs_nothing(monkeypatch, capsys):
    import runpy
    import sys

    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "bootstrap.py"), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    sessions = re.findall(r"@nox\.session.*\n(?:@.*\n)*def (\w+)", noxfile)
    assert [line.split()[0] for line in shown.splitlines()[2:]] == sessions
