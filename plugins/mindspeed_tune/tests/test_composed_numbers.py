"""Composed numbers count while dry runs of members agree with them, and no longer."""

import shlex
from dataclasses import replace

import pytest
from synthetic_process import SyntheticProcess

from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_tune import compose
from mindspeed_tune.candidate import (
    GRADIENT_OVERLAP,
    LAYERS_PER_CHUNK,
    MICRO_BATCH,
    PARAMETER_OVERLAP,
    PIPELINE,
    RECOMPUTE,
    TENSOR,
    ZERO,
)
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.report_pages import markdown
from mindspeed_tune.search import Search
from mindspeed_tune.search_report import report_of
from mindspeed_tune.space_file import Space

COMMAND = (
    "mindspeed-train --fake-world-size 16 --mock-data --num-layers 16 --hidden-size 1024 "
    "--num-attention-heads 16 --seq-length 4096 --vocab-size 32000 --max-position-embeddings 4096 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --bf16 "
    "--micro-batch-size 1 --global-batch-size 64 --train-iters 2 --lr 1e-3 --attention-dropout 0"
)
ONE = {MICRO_BATCH: (1,), RECOMPUTE: (False,), ZERO: (True,)}
NO_OVERLAP = {GRADIENT_OVERLAP: (False,), PARAMETER_OVERLAP: (False,)}
SPACE = Space({**ONE, **NO_OVERLAP, TENSOR: (1, 2), PIPELINE: (1, 2, 4), LAYERS_PER_CHUNK: (False,)})


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


@pytest.fixture(scope="module")
def machine():
    return read_hardware("h100")


def search_of(registry, machine, process=None, space=SPACE, **options):
    with Journal(None, {}) as journal:
        process = process or SyntheticProcess()
        options = {"trials": 2, **options}
        return Search(
            read_command(shlex.split(COMMAND), {}), space, machine, process, journal, registry, **options
        )


def test_cells_whose_members_agree_stand_in_the_ranking(registry, machine):
    search = search_of(registry, machine)
    search.run()
    assert len(search.ranked) == 6
    assert search.unranked == {}
    assert [one for one in search.trust.compared.values() if not one.agrees] == []
    composed = [one for one in search.ranked.values() if not one.planned]
    assert composed
    assert all(search.trust.is_checked(one.candidate) for one in composed)


def test_a_wrong_formula_is_caught_by_dry_runs_and_its_cells_are_run_directly(registry, machine, monkeypatch):
    right = search_of(registry, machine, trials=6)
    names = [one.candidate.name for one in right.run()]
    # As if every stage kept the activations of all micro-batches.
    monkeypatch.setattr(compose, "in_flight", lambda layout, stage, microbatches: microbatches)
    wrong = search_of(registry, machine, trials=6)
    assert [one.candidate.name for one in wrong.run()] == names
    piped = [one for one in wrong.ranked.values() if one.candidate.size(PIPELINE) > 1]
    assert piped
    assert all(one.planned for one in piped)
    report = report_of(wrong)
    assert report["composition"]["direct"]
    assert report["composition"]["within"] < report["composition"]["compared"]
    assert "composed numbers of its cell are off (bytes +" in markdown(report)


def test_where_trials_end_members_of_a_wrong_cell_are_left_out_with_the_reason(
    registry, machine, monkeypatch
):
    monkeypatch.setattr(compose, "in_flight", lambda layout, stage, microbatches: microbatches)
    search = search_of(registry, machine, trials=1)
    search.run()
    assert search.unranked
    assert all("only its own dry run counts" in reason for reason in search.unranked.values())
    assert all(one.planned or not search.trust.why_not(one.candidate) for one in search.ranked.values())


def test_interleaved_layouts_follow_from_the_plain_pipeline(registry, machine):
    space = Space({**ONE, **NO_OVERLAP, TENSOR: (2,), PIPELINE: (2, 4), LAYERS_PER_CHUNK: (False, 1, 2)})
    search = search_of(registry, machine, space=space, trials=20)
    search.run()
    chunked = [one for one in search.trust.compared.values() if "chunks-of" in one.name]
    assert len(chunked) >= 3
    assert all(one.agrees for one in chunked), list(map(str, chunked))


def test_exchanges_behind_passes_are_hidden_by_plans_and_by_composition_alike(registry, machine):
    overlaps = {GRADIENT_OVERLAP: (False, True), PARAMETER_OVERLAP: (False, True)}
    space = Space({**ONE, **overlaps, TENSOR: (2,), PIPELINE: (1, 2), LAYERS_PER_CHUNK: (False,)})
    search = search_of(registry, machine, space=space, trials=20)
    search.run()
    assert all(one.agrees for one in search.trust.compared.values()), list(search.trust.compared.values())
    for stages in (1, 2):
        alone, hidden = (
            next(
                one
                for one in search.ranked.values()
                if one.candidate.size(PIPELINE) == stages
                and one.candidate.settings[PARAMETER_OVERLAP] is overlap
            )
            for overlap in (False, True)
        )
        assert hidden.planned
        assert hidden.estimate.update < alone.estimate.update
        assert hidden.composed.update == pytest.approx(hidden.estimate.update)


def test_a_candidate_whose_ranks_die_is_refused_with_its_words_and_the_others_are_ranked(registry, machine):
    search = search_of(registry, machine, SyntheticProcess(dying=4), trials=6)
    found = search.run()
    assert all(one.candidate.size(PIPELINE) != 4 for one in found)
    reasons = [one.reason for one in search.validity.refused.values()]
    assert any("its process ended with status -9" in reason for reason in reasons)


def test_where_nothing_fits_the_shortage_and_the_nearest_layout_that_fits_are_named(registry, machine):
    bare = replace(machine, context=0.0, per_group=0.0)
    needed = min(one.estimate.needed for one in search_of(registry, bare, trials=6).run())
    small = replace(bare, memory=needed * 0.8)
    search = search_of(registry, small, trials=6)
    with pytest.raises(UserError, match=r"no layout of 16 ranks fits into the .* needs .* more; ") as told:
        search.run()
    assert "the nearest layout that fits, estimated at" in str(told.value)
    assert "takes 32 ranks: --tensor-model-parallel-size" in str(told.value)


def test_where_no_number_of_ranks_would_help_that_is_said(registry, machine):
    search = search_of(registry, replace(machine, memory=1e6), trials=2)
    with pytest.raises(UserError, match=r"no layout of up to .* ranks fits either: the smallest needs an"):
        search.run()
