"""A whole search without devices: ranked by composition, planned by dry runs, resumed from its journal."""

import json
import shlex

import pytest
from click.testing import CliRunner

from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import (
    GRADIENT_OVERLAP,
    MICRO_BATCH,
    PARAMETER_OVERLAP,
    PIPELINE,
    RECOMPUTE,
    TENSOR,
    ZERO,
    Candidate,
)
from mindspeed_tune.command import program
from mindspeed_tune.estimate import PLANNED
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.report_pages import html, markdown
from mindspeed_tune.search import Search
from mindspeed_tune.search_report import report_of
from mindspeed_tune.space_file import Space
from mindspeed_tune.warm_process import WarmProcess

FLAGS = (
    "--mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --bf16 "
    "--micro-batch-size 1 --global-batch-size 16 --train-iters 2 --lr 1e-3 --attention-dropout 0"
)
COMMAND = f"mindspeed-train --fake-world-size 4 {FLAGS}"
SPACE = Space(
    {
        TENSOR: (1, 2),
        PIPELINE: (1, 2),
        MICRO_BATCH: (1,),
        RECOMPUTE: (False,),
        ZERO: (True,),
        GRADIENT_OVERLAP: (False,),
        PARAMETER_OVERLAP: (False,),
        "--num-layers-per-virtual-pipeline-stage": (False,),
    }
)


@pytest.fixture(scope="module")
def process():
    with WarmProcess() as process:
        yield process


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def searched(process, registry, journal, command=COMMAND, space=SPACE, **options):
    search = Search(
        read_command(shlex.split(command), {}),
        space,
        read_hardware("h100"),
        process,
        journal,
        registry,
        trials=2,
        **options,
    )
    search.run()
    return search


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("journal")


@pytest.fixture(scope="module")
def search(process, registry, folder):
    with Journal(folder, {}) as journal:
        return searched(process, registry, journal)


@pytest.fixture(scope="module")
def report(search):
    return report_of(search)


def test_every_valid_layout_is_ranked_and_the_leading_ones_are_planned(search):
    assert len(search.ranked) == 4
    assert search.unranked == {}
    leading = search.best()[:2]
    assert [one.estimate.source for one in leading] == [PLANNED, PLANNED]
    assert all(one.estimate.problems == () for one in leading)


def test_composed_numbers_agree_with_the_layouts_own_dry_runs(search):
    compared = list(search.trust.compared.values())
    assert compared
    assert all(one.agrees for one in compared), list(map(str, compared))


def test_the_report_names_the_command_and_why_the_others_lost(search, report):
    best = report["top"][0]
    assert report["start"] == best["start"]
    assert "torchrun --nnodes 1 --nproc-per-node 4 -m mindspeed_core.train" in report["start"]
    assert best["lost_by"] is None
    assert all(row["lost_by"]["term"] in best["terms"] for row in report["top"][1:])
    assert sum(best["terms"].values()) == pytest.approx(best["seconds"])
    assert report["composition"]["compared"] >= 2
    text = markdown(report)
    assert best["label"] in text
    assert "| 1 |" in text
    assert best["label"] in html(report)
    json.dumps(report)


def test_the_best_command_is_a_valid_one(search, report, registry):
    from mindspeed_core import check

    arguments = shlex.split(report["start"])[7:]
    assert check(arguments, world_size=4, platform="cpu", registry=registry).ok


class NoProcess:
    """Stands where no rank may be run."""

    platform, parallel = "fake", 2

    def submit(self, job):
        raise AssertionError("a rank is run again, though its result is in the journal")


def test_a_search_that_was_killed_ends_with_the_same_report_and_runs_nothing_again(report, folder, registry):
    with Journal(folder, {}) as journal:
        assert report_of(searched(NoProcess(), registry, journal)) == report


@pytest.mark.thorough
def test_a_search_killed_at_any_result_goes_on_behind_it(report, folder, tmp_path, process, registry):
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        (tmp_path / str(kept)).mkdir()
        # The line that was being written when the process died is half there.
        text = "".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2]
        (tmp_path / str(kept) / "journal.jsonl").write_text(text)
        with Journal(tmp_path / str(kept), {}) as journal:
            assert journal.remembered == kept - 1
            assert report_of(searched(process, registry, journal)) == report


def test_a_strategy_and_a_cost_of_a_package_are_asked(process, registry, search, folder):
    asked = []

    def cost(estimate, args, hardware):
        from dataclasses import replace

        asked.append(args.tensor_model_parallel_size)
        return replace(estimate, seconds=estimate.seconds * args.tensor_model_parallel_size)

    def nothing(found):
        return []

    other = Search(
        search.command,
        SPACE,
        search.hardware,
        process,
        search.journal,
        registry,
        trials=2,
        strategy=nothing,
        cost=cost,
    )
    best = other.run()
    assert {1, 2} <= set(asked)
    assert all(one.estimate.source != PLANNED for one in best)
    assert best[0].candidate.size(TENSOR) == 1


def test_a_device_that_is_too_small_is_named_with_what_is_missing(process, registry, search):
    from dataclasses import replace

    small = replace(search.hardware, memory=2.0**20, context=0.0, per_group=0.0)
    other = Search(
        search.command, SPACE, small, process, search.journal, registry, trials=2, strategy=lambda s: []
    )
    with pytest.raises(UserError, match=r"no layout of 4 ranks fits into the 1\.00 MiB of NVIDIA H100"):
        other.run()


def test_a_world_that_no_layout_divides_is_refused(process, registry):
    with Journal(None, {}) as journal, pytest.raises(UserError, match="no layout divides 7 ranks"):
        searched(process, registry, journal, COMMAND.replace("size 4", "size 7"))


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (f"{COMMAND} --profile", 1, "--profile: a search runs no training to look at"),
        (f"{COMMAND} --platform fake", 1, "--platform fake: a search plans by itself"),
        (COMMAND.replace("--global-batch-size 16", ""), 1, "--global-batch-size: a search needs it"),
        (f"{COMMAND} --no-such-flag", 2, "--no-such-flag"),
    ],
)
def test_a_command_that_cannot_be_searched_is_refused(command, status, says):
    arguments = ["search", "--tune-hardware", "h100", "--no-tune-features", "--", *shlex.split(command)]
    found = CliRunner().invoke(program, arguments)
    assert found.exit_code == status
    assert says in found.stderr


def test_a_contribution_that_is_not_installed_is_refused():
    arguments = ["search", "--tune-hardware", "h100", "--tune-strategy", "lucky", "--", *shlex.split(COMMAND)]
    found = CliRunner().invoke(program, arguments)
    assert found.exit_code == 1
    assert "--tune-strategy lucky: is not installed" in found.stderr


def test_a_candidate_is_named_by_its_flags():
    assert Candidate({TENSOR: 2, RECOMPUTE: None, ZERO: True}).name == (
        "--tensor-model-parallel-size 2 --use-distributed-optimizer"
    )


def test_a_label_leaves_out_what_is_one():
    settings = {
        TENSOR: 2,
        PIPELINE: 1,
        MICRO_BATCH: 1,
        RECOMPUTE: "full",
        ZERO: True,
        "--use-flash-attn": True,
    }
    assert Candidate(settings).label == "tp2 b1 recompute-full zero1 use-flash-attn"
