"""Every schedule trains what one process trains, and keeps what the simulator says."""

import pytest
from random_schedules import random_schedule
from trained import distance, flags_of, world

from mindspeed_pp.rule import Context
from mindspeed_pp.schedules import BUILT_IN
from mindspeed_pp.simulator import simulate

NAMES = [rule.name for rule in BUILT_IN]
OTHER_SUMS = ("nanopipe", "chimera")
"""They add the gradients of micro-batches in another order."""
PP2 = ("--pipeline-model-parallel-size", "2")
UNTIED = "--untie-embeddings-and-output-weights"


ALWAYS = ("1f1b", "interleaved", "nanopipe", "zbv")
CASES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in NAMES]


@pytest.fixture(scope="module")
def pp2(asked_for):
    names = [name for name in NAMES if name in asked_for("name")]
    return world({name: (*PP2, *flags_of(name)) for name in names}, 2, UNTIED)


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_trains_what_one_process_trains(pp2, name):
    alone, found = pp2
    tolerance = 1e-6 if name in OTHER_SUMS else 0.0
    assert found[name][0].executed == name
    assert distance(found[name][0].gradients, alone.gradients) <= tolerance
    # Adam divides a small gradient by itself.
    assert distance(found[name][0].parameters, alone.parameters) <= 2 * tolerance
    for rank in found[name]:
        assert rank.losses == pytest.approx(alone.losses, rel=tolerance, abs=0)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_keeps_as_many_micro_batches_as_the_simulator_says(pp2, name):
    _, found = pp2
    rule = next(rule for rule in BUILT_IN if rule.name == name)
    schedule = rule.schedule(Context(2, rule.chunks or 2, 8))
    parts = schedule.placement.parts(0)
    assert [rank.alive for rank in found[name]] == [peak * parts for peak in simulate(schedule).peaks]
    assert max(rank.posted for rank in found[name]) <= 4


MORE = [pytest.param(range(max(2, n), n + 20), marks=pytest.mark.thorough) for n in range(0, 100, 20)]


@pytest.mark.parametrize("seeds", [range(2), *MORE], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_schedules_train_what_one_process_trains(tmp_path, seeds):
    cases = {}
    for seed in seeds:
        schedule = random_schedule(seed, ranks=2, chunks=1 + seed % 2, microbatches=8)
        path = tmp_path / f"{seed}.txt"
        path.write_text(schedule.text())
        cases[seed] = (*PP2, "--pipeline-schedule-file", str(path))
    alone, found = world(cases, 2, UNTIED)
    for ranks in found.values():
        assert distance(ranks[0].gradients, alone.gradients) < 1e-6
        assert ranks[0].losses == pytest.approx(alone.losses, rel=1e-6)
