"""Flags that stand in most launch scripts of Megatron-LM do here what they do there."""

import gc
import json
import shlex
from pathlib import Path

import pytest
import script_runs

from mindspeed_core.activation import prepare
from mindspeed_core.errors import ArgumentError
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.worlds import WorldError, run_world

THOROUGH = pytest.mark.thorough
BASE = shlex.split("--log-params-norm --use-cpu-initialization --global-batch-size 4 --micro-batch-size 1")
SHARDED = shlex.split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
MOE = shlex.split("--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall")
TP2 = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")
PP2 = shlex.split("--pipeline-model-parallel-size 2")
CYCLIC = ["--dataloader-type", "cyclic"]
WHOLE = [*CYCLIC, "--no-data-sharding"]
PADDED = ["--padded-vocab-size", "512"]
BY_HAND = shlex.split("--manual-gc --manual-gc-interval 2")
HASHES = ["--check-weight-hash-across-dp-replicas-interval", "1"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saved"))


NEEDED = {"retained", "float32", "whole", "cyclic"}
"""Runs that tests without parameters look at."""


@pytest.fixture(scope="module")
def one(tmp_path_factory, saved, asked_for):
    retained = ["--save", saved, "--save-interval", "1", "--save-retain-interval", "2"]
    runs = {
        "retained": [*BASE, *retained, *PADDED],
        "float32": BASE,
        "bfloat16": [*BASE, "--bf16"],
        "experts": [*BASE, *MOE],
        "whole": [*BASE, *WHOLE],
        "padded": [*BASE, *PADDED],
    }
    asked = NEEDED | asked_for("there")
    return run_world(script_runs.run_all, 1, str(tmp_path_factory.mktemp("one")), chosen(runs, asked))[0]


def chosen(runs, names):
    return {name: flags for name, flags in runs.items() if name in names}


@pytest.fixture(scope="module")
def two(tmp_path_factory, asked_for):
    runs = {
        "tensor": [*BASE, *TP2],
        "bfloat16": [*BASE, *SHARDED, "--bf16"],
        "float32": [*BASE, *SHARDED, *HASHES, *BY_HAND, "--log-energy"],
        "experts": [*BASE, *MOE, "--expert-model-parallel-size", "2"],
        "cyclic": [*BASE, *CYCLIC],
        "whole": [*BASE, *WHOLE],
        "padded": [*BASE, *PADDED],
    }
    asked = NEEDED | asked_for("here")
    return run_world(script_runs.run_all, 2, str(tmp_path_factory.mktemp("two")), chosen(runs, asked))[0]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("tensor", "float32"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("experts", "experts"),
        ("whole", "whole"),
        ("padded", "padded"),
    ],
)
def test_losses_and_the_norm_of_parameters_are_those_of_one_process(one, two, here, there):
    for name in ("loss", "grad_norm", "params_norm"):
        mine, its = ([record[name] for record in side] for side in (two[here], one[there]))
        assert mine == pytest.approx(its, rel=1e-4 if there == "bfloat16" else 1e-5)


def test_a_sharded_random_order_is_another_one(two):
    assert [r["loss"] for r in two["cyclic"]] != pytest.approx([r["loss"] for r in two["whole"]], rel=1e-4)


def test_a_device_that_tells_no_energy_writes_none(two):
    assert "energy_joules_per_step" not in two["float32"][0]


def test_the_checkpoint_before_the_newest_stays_where_the_interval_divides_its_step(one, saved):
    assert {path.name for path in Path(saved).glob("iter_*")} == {"iter_0000002", "iter_0000003"}


def test_a_model_is_described_by_the_checkpoint_where_no_flag_says_it(one, saved):
    session = prepare(["--platform", "cpu", "--use-checkpoint-args", "--load", saved], host="standalone")
    manifest = json.loads((Path(saved) / "iter_0000003" / "manifest.json").read_text())["model"]
    assert session.args.num_layers == manifest["num_layers"]
    assert session.args.asked_padded_vocab_size == manifest["padded_vocab_size"] == 512
    assert session.provenance["num_layers"].startswith("checkpoint ")
    given = ["--use-checkpoint-args", "--load", saved, "--num-layers", "7"]
    assert prepare([*given, "--platform", "cpu"], host="standalone").args.num_layers == 7


def test_arguments_of_no_checkpoint_are_those_of_the_flags(tmp_path):
    flags = ["--platform", "cpu", "--use-checkpoint-args", "--num-layers", "3"]
    assert prepare([*flags, "--load", str(tmp_path)], host="standalone").args.num_layers == 3
    with pytest.raises(PlanError, match="add --load FOLDER"):
        prepare(flags, host="standalone")


@THOROUGH
def test_other_orders_of_ranks_and_instances_of_the_optimizer_train_alike(tmp_path):
    single = {"float32": BASE, "bfloat16": [*BASE, "--bf16"], "experts": [*BASE, *MOE]}
    one = run_world(script_runs.run_all, 1, str(tmp_path / "one"), single)[0]
    instances = ["--num-distributed-optimizer-instances", "2"]
    swapped = "--use-tp-pp-dp-mapping"
    runs = {
        "pipeline": [*BASE, *PP2],
        "swapped": [*BASE, *PP2, swapped],
        "swapped-tensor": [*BASE, *TP2, *PP2, swapped],
        "swapped-sharded": [*BASE, *PP2, *SHARDED, swapped],
        "instances": [*BASE, "--use-distributed-optimizer", *instances],
        "instances-overlapped": [*BASE, *SHARDED, *instances, "--ddp-bucket-size", "20000"],
        "instances-bfloat16": [*BASE, *SHARDED, *instances, "--bf16"],
        "instances-experts": [*BASE, *MOE, *SHARDED, *instances, "--expert-model-parallel-size", "2"],
    }
    found = run_world(script_runs.run_all, 4, str(tmp_path), runs, timeout=500)[0]
    # Where the layers are cut decides which ones are drawn from which seed.
    alike = {
        "pipeline": ("swapped", "swapped-tensor", "swapped-sharded"),
        "float32": ("instances", "instances-overlapped"),
        "bfloat16": ("instances-bfloat16",),
        "experts": ("instances-experts",),
    }
    for there, names in alike.items():
        for name in names:
            for key in ("loss", "params_norm"):
                its = [record[key] for record in (found if there == "pipeline" else one)[there]]
                assert [record[key] for record in found[name]] == pytest.approx(its, rel=2e-4), (name, key)


@THOROUGH
@pytest.mark.parametrize(
    "flags",
    [
        [*SHARDED, "--num-distributed-optimizer-instances", "2", "--bf16"],
        [*SHARDED, *PP2, "--use-tp-pp-dp-mapping"],
    ],
    ids=["instances", "swapped"],
)
def test_another_layout_goes_on_from_their_checkpoint(tmp_path, flags):
    saved = str(tmp_path / "saved")
    first = {"first": [*BASE, *flags, "--save", saved, "--exit-interval", "2"]}
    run_world(script_runs.run_all, 4, str(tmp_path / "four"), first, 4, timeout=300)
    bits = [flag for flag in flags if flag == "--bf16"]
    here = [*BASE, *flags, "--load", saved]
    other = [*BASE, *bits, "--load", saved, "--use-distributed-optimizer"]
    same = run_world(script_runs.run_all, 4, str(tmp_path / "same"), {"on": here}, 4, timeout=300)[0]["on"]
    else_ = run_world(script_runs.run_all, 1, str(tmp_path / "one"), {"on": other}, 4, timeout=300)[0]["on"]
    assert [r["step"] for r in else_] == [3, 4]
    for name in ("loss", "params_norm"):
        assert [r[name] for r in else_] == pytest.approx([r[name] for r in same], rel=2e-4)


def test_replicas_that_differ_end_the_run_on_every_rank(tmp_path):
    with pytest.raises(WorldError, match="after step 1 the weights of data-parallel replicas differ"):
        run_world(script_runs.run_with_a_broken_replica, 2, str(tmp_path), [*BASE, *HASHES])


def test_garbage_is_collected_after_the_same_steps_and_at_no_other_time(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: seen.append(generation))
    from argparse import Namespace

    from mindspeed_train.manual_collection import (
        collect_after_step,
        collected_around_validation,
        collecting_by_hand,
    )

    args = Namespace(manual_gc=True, manual_gc_interval=2, manual_gc_eval=True)
    with collecting_by_hand(args):
        assert not gc.isenabled()
        for step in range(1, 6):
            collect_after_step(args, step)
        assert seen == [2, 2, 2]
        with collected_around_validation(args):
            assert seen == [2, 2, 2, 2]
        assert seen[-1] == 0
    assert gc.isenabled()


def validated(flags, monkeypatch, world=1):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    small = shlex.split(
        "--platform cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--micro-batch-size 1 --vocab-size 128 --mock-data --train-iters 4 --lr 1e-3"
    )
    return prepare([*small, *shlex.split(flags)], host="standalone").validated(world_size=world)


def test_a_vocabulary_is_padded_to_the_size_that_is_asked_for(monkeypatch):
    assert validated("--padded-vocab-size 200", monkeypatch).padded_vocab_size == 200
    assert validated("--make-vocab-size-divisible-by 96", monkeypatch).padded_vocab_size == 192


@pytest.mark.parametrize(
    ("flags", "world", "says"),
    [
        ("--padded-vocab-size 100", 1, "less than the 128 ids"),
        ("--padded-vocab-size 129 --tensor-model-parallel-size 2", 2, "not divisible by --tensor-model"),
        ("--save x --save-retain-interval 3 --keep-last-n 2", 1, "keep one of the two"),
        ("--num-distributed-optimizer-instances 2", 2, "--use-distributed-optimizer"),
        ("--num-distributed-optimizer-instances 3 --use-distributed-optimizer", 2, "does not divide the 2"),
        ("--manual-gc --manual-gc-interval -1", 1, "must not be negative"),
        (
            "--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --num-experts 4 --disable-bias-linear "
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            4,
            "whose pipelines would not meet",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(flags, world, says, monkeypatch):
    with pytest.raises(ArgumentError, match=says):
        validated(flags, monkeypatch, world)
