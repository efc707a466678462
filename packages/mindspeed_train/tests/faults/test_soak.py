"""A training that saves, evaluates and is restarted holds what it held before, and the trend tells a leak."""

import random
from dataclasses import replace

import pytest

from mindspeed_testing.soak import Sample, as_json, fit, held_throughout, soak

FLAGS = (
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 "
    "--micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 --eval-iters 1 --eval-interval 20 "
    "--no-progress"
).split()
STEPS = 300
LARGEST_GROWTH = 32 << 10
"""Bytes per step: caches still fill in so few steps, and a leak of one saved state would be more."""


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    modes = ((), ("--async-save",))
    return soak(FLAGS, folder, processes=1, steps=STEPS, restarts=1, every=10, modes=modes, timeout=200.0)


def test_each_attempt_continues_the_one_before(attempts):
    (first,), (second,) = attempts
    assert 0 < first[-1].step < STEPS // 2 < second[0].step
    # A slow machine may still write in the background when a sample is due.
    assert {sample.step for sample in (*first, *second)} <= set(range(8, STEPS, 10))


@pytest.mark.parametrize("of", ["descriptors", "threads"])
def test_descriptors_and_threads_are_no_more_at_the_end(attempts, of):
    for (samples,) in attempts:
        before, after = held_throughout(samples, of)
        assert after <= before


def test_memory_stays_where_it_is(attempts):
    for (samples,) in attempts:
        for number in ("memory", "resident"):
            trend = fit([samples], number)
            assert trend.slope - 3 * trend.error < LARGEST_GROWTH


def held(slope, seed):
    draw = random.Random(seed)
    return [
        Sample(step, int(4e8 + seed * 1e7 + slope * step + draw.gauss(0, 1e5)), 300_000, 500_000_000, 9, 3)
        for step in range(0, 5000, 50)
    ]


@pytest.mark.parametrize(("slope", "flat"), [(0.0, True), (-300.0, True), (300.0, False)])
def test_a_trend_tells_growth_from_noise(slope, flat):
    trend = fit([held(slope, seed) for seed in range(4)])
    assert trend.is_flat() == flat
    assert trend.excludes(slope + 100)
    assert not trend.excludes(slope + 1)
    assert trend.slope == pytest.approx(slope, abs=4 * trend.error)


def test_what_stays_open_is_listed():
    samples = held(0.0, 1)
    last = [replace(sample, descriptors=10) for sample in samples[len(samples) * 3 // 5 :]]
    found = as_json([[*samples[: len(samples) * 3 // 5], *last]])
    assert found["descriptors"] == [9, 10]
    assert found["threads"] == [3]


def test_a_thread_that_is_about_to_end_is_no_leak():
    samples = held(0.0, 1)
    samples[-1] = replace(samples[-1], threads=4)
    assert held_throughout(samples, "threads") == (3, 3)


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="at least 3"):
        fit([held(0.0, 1)[:2]])
