"""Ranks that do not run the same thing stop together, and rank 0 says who differs in what."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import rank_worlds

from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.registry import Registry
from mindspeed_megatron import rank_check
from mindspeed_megatron.devices.npu import NpuPlatform
from mindspeed_megatron.rank_check import (
    argument_facts,
    check_ranks,
    content_hash,
    differences,
    format_table,
)
from mindspeed_testing.worlds import run_world


@pytest.fixture(scope="module")
def worlds():
    return run_world(rank_worlds.everything, 1, env={"GLOO_SOCKET_IFNAME": "lo"})[0]


def rows(world):
    lines = [line.split(" | ") for line in world["printed"].splitlines() if " | " in line]
    return [[cell.strip() for cell in line] for line in lines[1:]]


def test_equal_ranks_go_on_without_a_word_though_their_paths_differ(worlds):
    assert worlds["equal"] == {"codes": [0, 0, 0, 0], "printed": ""}


def test_another_plugin_version_on_one_rank_stops_every_rank(worlds):
    assert worlds["other_version"]["codes"] == [1, 1, 1, 1]


def test_the_table_is_printed_once_and_names_rank_item_and_both_values(worlds):
    assert worlds["other_version"]["printed"].count("E-RANKS") == 1
    assert ["2", "version demo-plugin", "1.1", "1.0"] in rows(worlds["other_version"])
    assert {row[0] for row in rows(worlds["other_version"])} == {"2"}


def test_rank_zero_is_compared_with_the_majority_too(worlds):
    world = worlds["other_version_on_rank_zero"]
    assert world["codes"] == [1, 1, 1, 1]
    assert ["0", "version demo-plugin", "1.1", "1.0"] in rows(world)
    assert {row[0] for row in rows(world)} == {"0"}


def test_other_arguments_and_another_plan_are_differences(worlds):
    world = worlds["other_arguments"]
    assert world["codes"] == [1, 1, 1, 1]
    found = rows(world)
    assert ["1", "argument lr", "0.2", "0.1"] in found
    assert ["3", "argument ring", "false", "true"] in found
    assert ["3", "active features", "", "ring"] in found


def test_a_rank_that_never_comes_is_named_and_the_others_stop(worlds):
    assert worlds["silent"]["codes"] == [1, 1, 1, 7]
    printed = worlds["silent"]["printed"]
    assert "no answer from rank 3 within 5 s (--distributed-timeout-minutes)" in printed
    assert "c10d" not in printed


def test_rank_zero_that_compares_nothing_is_named_by_who_waits(worlds):
    world = worlds["without_rank_zero"]
    assert world["codes"] == [0, 5, 0, 0]
    assert world["printed"].startswith("rank 1 waited 1 s for rank 0 to compare what the ranks run")
    assert world["printed"].count("\n") == 1


def test_the_check_of_a_host_passes_skips_and_stops(worlds):
    assert worlds["whole"]["codes"] == [1, 1, 1, 1]
    assert worlds["whole"]["printed"].count("E-RANKS") == 1
    assert "version demo-plugin" in worlds["whole"]["printed"]


def test_a_world_of_one_compares_nothing():
    class Info:
        world_size = 1

    check_ranks(None, Info())


def test_an_edited_source_file_changes_the_hash_of_its_package(tmp_path, monkeypatch):
    package = tmp_path / "edited_plugin"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "ops" / "ring.py").write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = content_hash(["edited_plugin"])
    assert content_hash(["edited_plugin"]) == before
    (package / "ops" / "ring.pyc").write_bytes(b"not a source file")
    assert content_hash(["edited_plugin"]) == before
    (package / "ops" / "ring.py").write_text("SIZE = 2\n")
    assert content_hash(["edited_plugin"]) != before


def test_values_of_one_rank_and_values_without_a_text_are_not_compared():
    facts = argument_facts({"rank": 3, "cache": "/x", "lr": 0.1, "dtype": object()}, per_rank={"cache"})
    assert facts == {"argument lr": "0.1"}


def test_an_item_that_one_rank_lacks_is_a_difference():
    (difference,) = differences({0: {"a": "1"}, 1: {"a": "1", "b": "2"}}, typical=0)
    assert (difference.rank, difference.item, difference.here, difference.most) == (1, "b", "2", "absent")


def facts_with(build, monkeypatch):
    """Return what a rank on the platform npu tells of itself where this torch_npu is installed."""
    versions = {"torch_npu": build, "torch": "2.9.0"}
    monkeypatch.setattr(rank_check, "installed_version", versions.get)
    session = SimpleNamespace(
        plan=SimpleNamespace(digest="d", names=()),
        registry=Registry.of([]),
        host=SimpleNamespace(name=DEFAULT_HOST),
        platform=NpuPlatform(),
        args=Namespace(lr=0.1),
    )
    return rank_check.rank_facts(session)


def test_two_builds_of_torch_npu_are_named_with_both_versions(monkeypatch):
    older, newer = (facts_with(build, monkeypatch) for build in ("2.9.0", "2.9.0.post6"))
    [found] = differences({0: newer, 8: older}, 0)

    assert (found.rank, found.item) == (8, "version torch_npu")
    assert (found.here, found.most) == ("2.9.0", "2.9.0.post6")
    assert "8    | version torch_npu | 2.9.0     | 2.9.0.post6" in format_table([found], 16, (), 8)


def test_a_long_table_is_cut_and_says_so():
    found = differences({0: {}, **{rank: {"a": "x" * 500} for rank in range(1, 100)}}, typical=0)
    text = format_table(found, 16384, (), 16000)
    assert "and 59 more differences" in text
    assert max(map(len, text.splitlines())) < 200
