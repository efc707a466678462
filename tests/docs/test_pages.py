"""The pages agree with the code, with each other and with the files they point to."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import click
import pytest
from markdown_files import ROOT, blocks, files, headings, links, read, without_blocks
from mindspeed_flags import answers
from mindspeed_imports import ENTRANCES

from mindspeed_core.cli.features import program
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.discovery.slots import NORM_ROLES
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_megatron.doctor.supported_versions import NPU_CANN
from mindspeed_megatron.upstream.table import is_judged
from mindspeed_megatron.upstream.verdicts import USED

OF_OTHER_PROGRAMS = {
    "--deepspeed",
    "--standalone",
    "--feature",
    "--side-by-side",
    "--slice",
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-id",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-conf",
    "--check",
    "--again",
    "--dist",
    "--resume",
    "--help",
    "--help-flag",
    "--contract",
    "--features",
    "--no-loops",
    "--contract-platform",
    "--contract-without-proofs",
    "--no-build-isolation",
    "--no-deps",
    "--source",
    "--schemas",
    "--write-schemas",
    "--contracts",
    "--write-contracts",
    "--out",
    "--no-scenarios",
    "--no-measurements",
    "--count",
    "--list",
    "--section",
    "--smoke",
    "--wheels",
    "--minutes",
    "--results",
    "--nodes",
    "--gres",
    "--ntasks-per-node",
    "--cpus-per-task",
    "--gpus-per-task",
    "--signal",
    "--batch",
    "--requeue",
    "--image",
    "--dryrun",
}
"""Options of torchrun, Slurm, torchx, pip, docs/generate.py, pytest, benchmarks/gpu, tools/, our packages."""

WIDEST_COMMAND = 70
"""Columns of a command: what a page of 390 pixels and half a screen show."""

OF_EXAMPLES = {"--log-gradient-noise", "--sentences", "--some-size", "--my-flag", "--lrr"}
"""Flags that a page declares or makes up itself."""


def options_of_our_tools():
    """The options of the commands of our programs."""
    tools = [path.partition(":") for path, _ in Registry.discover().host(DEFAULT_HOST).commands.values()]
    commands = [getattr(import_module(module), name) for module, _, name in tools]
    commands.append(import_module("mindspeed_tune.command").program)
    commands.append(import_module("mindspeed_models.program").program)
    context = click.Context(program)
    commands += [program, *(program.get_command(context, name) for name in program.list_commands(context))]
    for group in [command for command in commands if isinstance(command, click.Group)]:
        commands += [group.get_command(context, name) for name in group.list_commands(context)]
    return {
        option
        for command in commands
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }


def test_generated_pages_are_up_to_date():
    checked = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert checked.returncode == 0, checked.stderr


def test_drawings_of_the_programs_are_up_to_date():
    checked = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "screens.py"), "--check"],
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


@pytest.mark.parametrize("line", [new for _, new, _ in ENTRANCES])
def test_what_is_imported_instead_of_mindspeed_exists(line):
    (statement,) = ast.parse(line).body
    if isinstance(statement, ast.Import):
        assert find_spec(statement.names[0].name) is not None
    else:
        assert hasattr(import_module(statement.module), statement.names[0].name)


def test_a_page_stands_once_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r": (\S+\.md)$", navigation, re.M)
    assert len(pages) > 40
    assert len(pages) == len(set(pages))


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_says_its_language_and_commands_fit_a_narrow_page(path):
    found = blocks(path.read_text(encoding="utf-8"))
    long = [
        line
        for block in found
        if block.language == "bash"
        for line in block.text.splitlines()
        # One word stays whole; a plan is what a program wrote.
        if len(line) > WIDEST_COMMAND and len(line.split()) > 3 and path.name != "plan.md"
    ]

    assert [block.text for block in found if not block.language] == []
    assert long == []


def test_every_build_of_torch_npu_stands_in_the_table():
    page = read("docs/reference/compatibility.md")

    assert [build for builds in NPU_CANN.values() for build in builds if f"`{build}`" not in page] == []


TWINS = (
    "README",
    *sorted(f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md") if not path.stem.endswith(".zh-CN")),
)
"""Every guide has a Chinese twin."""
OTHER_TERMS = ("重叠", "通讯", "特征", "重新计算", "显卡")
"""Words for which CONTRIBUTING has others: 掩盖, 通信, 特性, 重计算, 设备."""


def without_language(target: str) -> str:
    """A link target as it is in both twins: without the page's language and the title it points to."""
    return target.replace(".zh-CN", "").partition("#")[0]


@pytest.mark.parametrize("page", TWINS)
def test_the_chinese_twin_has_the_same_code(page):
    assert blocks(read(f"{page}.zh-CN.md")) == blocks(read(f"{page}.md"))


@pytest.mark.parametrize("page", TWINS)
def test_the_chinese_twin_has_the_same_structure(page):
    english, chinese = read(f"{page}.md"), read(f"{page}.zh-CN.md")

    assert headings(chinese) == headings(english)
    assert chinese.count("\n|") == english.count("\n|")
    assert len(re.findall(r"^(?:- |\d+\. )", chinese, re.MULTILINE)) == len(
        re.findall(r"^(?:- |\d+\. )", english, re.MULTILINE)
    )


@pytest.mark.parametrize("page", TWINS)
def test_the_chinese_twin_uses_the_terms_of_contributing(page):
    text = without_blocks(read(f"{page}.zh-CN.md"))

    assert [word for word in OTHER_TERMS if word in text] == []
    # A page that was left in English has few Chinese characters.
    assert len(re.findall("[\u4e00-\u9fff]", text)) > 300


@pytest.mark.parametrize("page", TWINS)
def test_the_chinese_twin_leads_to_the_same_pages(page):
    english, chinese = (
        sorted(without_language(target) for target in links(read(name)))
        for name in (f"{page}.md", f"{page}.zh-CN.md")
    )

    assert chinese == english


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_names_a_package_registry(path):
    text = path.read_text(encoding="utf-8")

    assert re.findall(r"https?://(?:[\w.-]*\.)?(?:pypi\.|pythonhosted\.)[^\s)]*", text) == []


def test_every_flag_in_the_documentation_exists():
    registry = Registry.discover()
    known = {option for entry in flag_set(registry).entries for option in entry.flag.options}
    known |= options_of_our_tools() | OF_OTHER_PROGRAMS | OF_EXAMPLES
    shown = {
        option
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", path.read_text(encoding="utf-8"))
    }
    # The guide's plugin declares flags of its own; what ends in a dash is the beginning of several names.
    shown = {option for option in shown if not option.startswith(("--acme-", "--no-acme-"))}
    unknown = {option for option in shown - known if not option.endswith("-")}

    assert {option for option in unknown if not is_judged(option)} == set()


def test_the_table_of_roles_has_every_role_that_the_editor_and_its_norms_name():
    page = read("docs/reference/layer-specs.md")
    told, _, table = page.partition("\n## Roles\n")
    shown = {role.rpartition(".")[2] for role in re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)}
    named = set(re.findall(r"`(\w+)`", told.partition("A role is")[2].partition("A dotted")[0]))

    assert named - shown - {"linear_"} == set()
    assert set(NORM_ROLES) - shown == set()


def test_the_pages_of_classes_give_every_attribute_its_type():
    pages = ("records", "session", "declarations", "platform", "scenarios", "layer-specs")
    rows = [
        row
        for name in pages
        for row in re.findall(r"^\| `(\w+)` \| (\S*)", read(f"docs/reference/{name}.md"), re.M)
    ]

    assert {("loss_mask", "`torch.Tensor"), ("consumed_train_samples", "`int`")} <= set(rows)
    assert "## Loss" in read("docs/reference/records.md")
    assert "### Metrics.add" in read("docs/reference/records.md")
    assert "| `--num-layers` | `4` | Transformer layers. |" in read("docs/reference/scenarios.md")


@pytest.mark.parametrize("option", ["--muon-momentum", "--muon-nesterov", "--muon-no-split-qkv"])
def test_a_flag_that_a_feature_takes_care_of_is_not_called_refused(option):
    found = {answer.option: answer for answer in answers(Registry.discover())}

    assert found[option].status == USED
    assert "opt-muon" in found[option].text
