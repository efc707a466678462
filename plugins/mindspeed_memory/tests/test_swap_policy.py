"""Smart swap: the choice from a trace, the policy's file, and who is refused."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_core.activation import activate, prepare
from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_memory.features.proofs import MODEL, PP2
from mindspeed_memory.policy.swap_policy_file import (
    ChunkSwaps,
    Settings,
    SwapPolicy,
    read_policy,
    write_policy,
)
from mindspeed_memory.policy.tensor_swaps import Life, Trace, by_chunk, chosen_swaps
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

INSTALLED = Registry.discover()
SMART = ("--smart-swap", "--swap-min-bytes", "1024")


def forward_and_backward(sizes, *, gap=1.0):
    """A pass that saves tensors one after another, and reads them in the opposite order."""
    lives, alive, now, total = [], [], 0.0, 0
    saved = []
    for size in sizes:
        now += gap
        total += size
        saved.append(now)
        alive.append((now, total))
    read = {}
    for number in reversed(range(len(sizes))):
        now += gap
        read[number] = now
        alive.append((now, total))
        total -= sizes[number]
    lives = [Life((0, n), size, saved[n], read[n]) for n, size in enumerate(sizes)]
    return Trace(tuple(lives), tuple(alive))


def test_what_was_saved_first_is_away_longest_and_all_that_is_in_time_goes():
    trace = forward_and_backward([100] * 6)
    swaps = chosen_swaps(trace, bandwidth=1000.0)
    # The last one is read at once.
    assert {(0, 0), (0, 1), (0, 2)} <= swaps.places
    assert swaps.plain_peak == 600
    assert swaps.peak < 350


def test_a_slow_link_takes_little_and_nothing_that_would_be_late():
    slow = chosen_swaps(forward_and_backward([100] * 6), bandwidth=40.0)
    fast = chosen_swaps(forward_and_backward([100] * 6), bandwidth=1000.0)
    assert 0 < len(slow.places) < len(fast.places)
    assert chosen_swaps(forward_and_backward([100] * 6), bandwidth=1.0).places == frozenset()


def test_the_choice_ends_when_the_peak_is_low_enough():
    trace = forward_and_backward([100] * 6)
    swaps = chosen_swaps(trace, bandwidth=1000.0, reduction=100)
    assert len(swaps.places) == 1
    assert swaps.peak <= swaps.plain_peak - 100
    assert chosen_swaps(trace, bandwidth=1000.0, reduction=0).places == frozenset()


def test_large_tensors_come_first_and_what_does_not_help_stays():
    trace = forward_and_backward([10, 200, 10, 400, 10])
    # The largest is back again too early to lower any peak.
    assert chosen_swaps(trace, bandwidth=1000.0, reduction=100).places == {(0, 1)}


def test_all_values_of_a_storage_are_swapped():
    assert by_chunk(frozenset({(0, 1), (1, 0)}), {(0, 1): [1, 4], (1, 0): [0]}) == {0: [1, 4], 1: [0]}


FACTS = {"num_layers": 4, "hidden_size": 64}
POLICY = SwapPolicy(FACTS, Settings(10.0, 5), ((ChunkSwaps(9, (0, 8)),), (ChunkSwaps(3, ()),)))


def test_a_policy_is_read_as_it_was_written(tmp_path):
    write_policy(tmp_path / "policy.json", POLICY)
    assert read_policy(tmp_path / "policy.json", FACTS) == POLICY
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]


def test_settings_alone_ask_for_a_policy(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text('{"settings": {"reduction_bytes": 7}}')
    assert read_policy(path, FACTS) == SwapPolicy(FACTS, Settings(reduction_bytes=7))


def changed(content, **changes):
    return json.dumps({**json.loads(content), **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no JSON, or cut off"),
        (lambda text: "\udc80".encode("utf-8", "surrogateescape").decode("latin-1"), "is no JSON"),
        (lambda text: "[]", "is damaged: it is no object"),
        (
            lambda text: changed(text, version=9),
            "is damaged: format 'mindspeed-memory swap policy', version 9",
        ),
        (
            lambda text: changed(text, settings={"speed": 1}),
            "settings have no 'speed'; there are bandwidth_gb_s",
        ),
        (lambda text: changed(text, settings={"bandwidth_gb_s": 0}), "bandwidth_gb_s is 0"),
        (lambda text: changed(text, settings={"reduction_bytes": -1}), "reduction_bytes is -1"),
        (lambda text: changed(text, stages=[[{"saved": 3}]]), "'swapped' is missing"),
        (
            lambda text: changed(text, stages=[[{"saved": 3, "swapped": [3]}]]),
            "of 3 saved values number 3 is",
        ),
        (lambda text: changed(text, stages=[[{"saved": 3, "swapped": ["x"]}]]), "whole numbers"),
        (lambda text: changed(text, stages=[1]), "is damaged"),
        (lambda text: changed(text, settings=3), "is damaged"),
        (lambda text: changed(text, model=None), "does not say which model it is of"),
        (
            lambda text: changed(text, model={**FACTS, "hidden_size": 128}),
            "is of another model: made for hidden_size 128, this run has 64",
        ),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_with_its_name(tmp_path, change, message):
    path = tmp_path / "policy.json"
    write_policy(path, POLICY)
    path.write_text(change(path.read_text()))
    with pytest.raises(ArgumentError) as error:
        read_policy(path, FACTS)
    assert message in str(error.value)
    assert str(error.value).startswith(f"--swap-policy '{path}': ")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_policy(tmp_path, FACTS)


def test_a_policy_needs_its_switch():
    with pytest.raises(PlanError, match=r"--swap-policy here needs --smart-swap; add it"):
        prepare(
            training_flags(("--swap-policy", "here"), 1, INSTALLED),
            platform="cpu",
            registry=INSTALLED,
            host="standalone",
        )


def train(*flags, steps=5):
    """Return the loss of each step, and the bytes that each swapped."""
    line = training_flags((*MODEL, *SMART, *flags), steps, INSTALLED)
    with activate(line, platform="cpu", registry=INSTALLED, host="standalone") as session:
        run = loop.setup(session)
        smart = next(feature for feature in session._features if feature.name == "smart-swap")
        losses, moved = [], []
        for _ in range(steps):
            before = smart._copies.moved
            losses.append(float(session.call("train_step", run=run).losses["lm loss"]))
            moved.append(smart._copies.moved - before)
        peaks, used = smart._policy.peaks, smart._copies.pool.used
        loop.teardown(session)
    return losses, moved, peaks, used


def refused(*flags):
    with pytest.raises(UserError) as error:
        train(*flags, steps=1)
    return str(error.value)


def train_all(folder):
    path = f"{folder}/policy.json"
    policy = ("--swap-policy", path)
    return {
        "made": train(*PP2, *policy),
        "read": train(*PP2, *policy, steps=2),
        "other": refused(*policy, *PP2, "--ffn-hidden-size", "128"),
        "nowhere": refused(*PP2, "--swap-policy", f"{folder}/none/policy.json"),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    return run_world(train_all, 2, str(folder)), folder / "policy.json"


def test_steps_are_traced_before_anything_is_swapped(trained):
    for rank in trained[0]:
        _, moved, (plain, expected), used = rank["made"]
        assert moved[:3] == [0, 0, 0]
        assert moved[3] == moved[4] > 0
        assert expected < plain
        assert used == 0


def test_a_file_is_followed_from_the_first_step(trained):
    for rank in trained[0]:
        losses, moved, *_ = rank["made"]
        again, at_once, *_ = rank["read"]
        assert again == losses[:2]
        assert at_once == [moved[3]] * 2


def test_a_file_has_every_stage_and_the_model(trained):
    content = json.loads(trained[1].read_text())
    assert len(content["stages"]) == 2
    assert content["model"]["hidden_size"] == 64


def test_a_file_of_another_model_is_refused_by_what_differs(trained):
    for rank in trained[0]:
        assert "is of another model: made for ffn_hidden_size" in rank["other"]
        assert "policy.json" in rank["other"]
        assert "its folder does not exist" in rank["nowhere"]


def peak_one_by_one(trace, bandwidth, places):
    """Return the most bytes with copies made one after another, or None where one is late."""
    lives = [life for life in trace.lives if life.place in places]
    gone, back, free = {}, {}, 0.0
    for index in sorted(range(len(lives)), key=lambda index: lives[index].saved):
        free = gone[index] = max(free, lives[index].saved) + lives[index].nbytes / bandwidth
    free = float("inf")
    for index in sorted(range(len(lives)), key=lambda index: -lives[index].needed):
        free = back[index] = min(free, lives[index].needed) - lives[index].nbytes / bandwidth
        if back[index] < gone[index]:
            return None
    alive, before = [], float("-inf")
    for time, nbytes in trace.alive:
        away = [i for i in gone if gone[i] <= before and back[i] >= time]
        alive.append(nbytes - sum(lives[i].nbytes for i in away))
        before = time
    return max(alive)


def trace_of(microbatches):
    """Return a step whose micro-batches each save storages of these sizes, and read them backwards."""
    lives, changes, start = [], [], 0
    for sizes in microbatches:
        for place, nbytes in enumerate(sizes):
            saved, needed = float(start + place), float(start + 2 * len(sizes) - place)
            lives.append(Life((0, place), nbytes, saved, needed))
            changes += [(saved, nbytes), (needed, -nbytes)]
        start += 2 * len(sizes)
    alive, now = [], 0
    for time, change in sorted(changes):
        alive.append((time, now + max(change, 0)))
        now += change
    return Trace(tuple(lives), tuple(alive))


@given(
    st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=6), min_size=1, max_size=3),
    st.sampled_from([1.0, 2.0, 8.0, 64.0]),
    st.sampled_from([None, 5, 40, 100]),
)
def test_the_reported_peak_is_that_of_what_is_swapped(microbatches, bandwidth, reduction):
    trace = trace_of(microbatches)
    swaps = chosen_swaps(trace, bandwidth=bandwidth, reduction=reduction)
    assert peak_one_by_one(trace, bandwidth, swaps.places) == swaps.peak


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_random_traces_reach_their_reported_peak(seed):
    source = random.Random(seed)
    for _ in range(1000):
        sizes = [source.randint(1, 200) for _ in range(source.randint(1, 30))]
        trace = trace_of([sizes] * source.randint(1, 4))
        bandwidth, reduction = source.uniform(1, 200), source.choice((None, source.randint(1, 600)))
        swaps = chosen_swaps(trace, bandwidth=bandwidth, reduction=reduction)
        assert peak_one_by_one(trace, bandwidth, swaps.places) == swaps.peak
