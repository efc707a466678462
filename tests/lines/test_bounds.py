"""Sizes and files that would take all memory, or all time, are refused before anything is allocated."""

import os
import random
from argparse import Namespace
from types import SimpleNamespace

import pytest

from mindspeed_core import check
from mindspeed_core.errors import ArgumentError, NamedFileError
from mindspeed_core.feature import Feature
from mindspeed_testing import run_world
from mindspeed_train import setup
from mindspeed_train.arguments import run_length, sizes
from mindspeed_train.arguments.folders import check_folders
from mindspeed_train.arguments.model import _too_long
from mindspeed_train.arguments.run_length import batch_at
from mindspeed_train.named_files import read_named_file


def ramp(start, increment, sizes, samples, train_samples):
    return Namespace(
        rampup_batch_size=[start, increment, samples],
        step_batch_size_schedule=None,
        global_batch_size=start + increment * sizes,
        train_samples=train_samples,
        micro_batch_size=1,
        data_parallel_size=1,
    )


def step_by_step(args):
    steps = consumed = 0
    while consumed <= args.rampup_batch_size[2] and consumed <= args.train_samples:
        consumed += batch_at(args, consumed).samples
        steps += 1
    constant = max(0, args.train_samples - consumed) // args.global_batch_size
    return steps + constant, consumed + constant * args.global_batch_size


def test_a_ramp_is_counted_as_step_by_step():
    draw = random.Random(3)
    for _ in range(60):
        args = ramp(*(draw.randint(1, most) for most in (8, 5, 12, 3000, 4000)))
        assert run_length._whole_run(args) == step_by_step(args), args


def test_a_ramp_of_any_length_is_counted_at_once():
    steps, samples = run_length._whole_run(ramp(1, 1, 10_000, 2**62, 2**62))
    assert samples >= 2**62 - 10_001
    assert steps < samples


def test_a_ramp_through_too_many_sizes_is_refused():
    args = ramp(1, 1, 10**12, 100, 100)
    with pytest.raises(ArgumentError, match=r"--rampup-batch-size .*larger increment"):
        list(run_length._batch_sizes(args))


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "missing", "null byte", "loop"])
def test_what_is_no_file_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "named"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    path = {"device": "/dev/zero", "null byte": "a\0b"}.get(kind, path)
    with pytest.raises(NamedFileError, match=r"--data-args-path .*; check the path") as caught:
        read_named_file("--data-args-path", path, "check the path")
    assert caught.value.value == str(path)


@pytest.mark.parametrize("path", ["file", "file/below", "link"])
def test_a_folder_that_cannot_be_one_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ArgumentError, match=r"--save .*name a folder"):
        check_folders(Namespace(save=str(tmp_path / path)))
    check_folders(Namespace(save=str(tmp_path / "new" / "folder"), load=None))


def test_a_layout_is_measured_before_it_is_written_out():
    assert _too_long("Et*1000000000|L")
    assert _too_long("E(t*1000)*1000|L")
    assert not _too_long("Ettt|(tt|)*29,m|L")


@pytest.mark.parametrize(
    ("samples", "flag"),
    [((2**40, 0, 0), "--train-iters"), ((0, 2**40, 0), "--eval-iters"), ((0, None, 2**40), "--eval-iters")],
)
def test_an_index_larger_than_the_memory_names_the_flag(samples, flag):
    args = Namespace(train_samples=None, train_iters=2**40, eval_iters=2**40 + 1, micro_batch_size=1)
    args.global_batch_size = 1
    if flag == "--train-iters":
        args.eval_iters = 0
    with pytest.raises(
        ArgumentError, match=rf"{flag} \d+: a rank needs at least .* GiB for the index of 1,099"
    ):
        sizes.check_index_fits(args, samples)
    sizes.check_index_fits(args, (1000, None, 1000))


MODELS = (
    "",
    "--swiglu --group-query-attention --num-query-groups 2 --position-embedding-type rope",
    "--untie-embeddings-and-output-weights --max-position-embeddings 640",
    "--multi-latent-attention --position-embedding-type rope",
    "--num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 48 --disable-bias-linear",
    "--num-experts 4 --moe-layer-freq [0,1,0,1] --disable-bias-linear",
    "--tensor-model-parallel-size 2 --vocab-size 6400",
    "--pipeline-model-parallel-size 2 --max-position-embeddings 6400",
    "--use-torch-fsdp2 --untie-embeddings-and-output-weights --position-embedding-type rope",
)


@pytest.fixture(scope="module")
def weighed():
    return list(zip(*run_world("weighed_models:weights", 2, MODELS), strict=True))


@pytest.mark.parametrize("position", range(len(MODELS)), ids=lambda position: MODELS[position] or "plain")
def test_no_model_is_thought_larger_than_it_is(weighed, position):
    counted = sum(there for there, _ in weighed[position]) / 2
    (bound,) = {bound for _, bound in weighed[position]}
    assert 0 < bound <= counted
    if "moe-layer-freq" not in MODELS[position] and "latent" not in MODELS[position]:
        assert bound > 0.8 * counted


def start(total_memory, **more):
    flags = {"platform": "cpu", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "lr": 1.0}
    flags |= {"micro_batch_size": 1, "mock_data": True, "train_iters": 1, "seq_length": 8, "vocab_size": 64}
    checked = check(flags | more)
    assert checked.ok, checked.problems
    session = SimpleNamespace(
        plan=SimpleNamespace(names=("built",)),
        registry=SimpleNamespace(features={"built": SimpleNamespace(cls=Feature)}),
        platform=SimpleNamespace(total_memory=lambda: total_memory),
        provenance=dict.fromkeys(flags | more, "given"),
        implementations=lambda stage: (),
    )
    return session, checked.args


@pytest.mark.parametrize(
    ("size", "flag"),
    [
        ({"vocab_size": 10**6}, "--vocab-size 1000000"),
        ({"hidden_size": 10**4}, "--hidden-size 10000"),
        ({"num_layers": 10**4}, "--num-layers 10000"),
        ({"ffn_hidden_size": 10**6}, "--ffn-hidden-size 1000000"),
        ({"max_position_embeddings": 10**6}, "--max-position-embeddings 1000000"),
        ({"num_experts": 10**4, "add_bias_linear": False}, "--num-experts 10000"),
    ],
)
def test_weights_larger_than_the_device_name_the_largest_size(size, flag):
    session, args = start(2**20, **size)
    with pytest.raises(ArgumentError, match=rf"{flag}: .* GiB for its weights, .* start on more or larger"):
        sizes.check_weights_fit(session, args)
    session.platform.total_memory = lambda: 2**50
    sizes.check_weights_fit(session, args)


def test_a_model_that_a_feature_builds_is_not_weighed():
    session, args = start(0)
    session.implementations = lambda stage: ("built",) if stage == "build_model_chunk" else ()
    sizes.check_weights_fit(session, args)


def test_a_gate_that_a_feature_adds_is_weighed():
    class Gated(Feature):
        @classmethod
        def model_facts(cls, args):
            return {"gated_linear_unit": True}

    session, args = start(0)
    without = sizes._weights(session, args)["ffn_hidden_size"]
    session.registry.features["built"].cls = Gated
    assert sizes._weights(session, args)["ffn_hidden_size"] == without * 3 / 2


def test_a_device_is_asked_for_its_memory_once_the_rank_has_chosen_it(monkeypatch):
    stages = []

    class Asked(Exception):
        pass

    def asked(*_):
        raise Asked

    def call(stage, **values):
        stages.append(stage)
        return values.get("args")

    monkeypatch.setattr(setup, "check_weights_fit", asked)
    monkeypatch.setattr(setup, "check_ranks", lambda *_: None)
    monkeypatch.setattr(setup, "_check_dtype", lambda *_: None)
    with pytest.raises(Asked):
        setup._build_model(SimpleNamespace(args=Namespace(), plan=None, platform=None, call=call))
    assert stages[-1] == "init_distributed"


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_memory_that_runs_out_names_a_size(error, explained):
    found = sizes.exhausted(*start(0), error)
    assert bool(found) is explained
    assert not explained or "no memory for a model of this size" in str(found)
