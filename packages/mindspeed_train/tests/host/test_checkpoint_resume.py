"""Resuming continues exactly where a run stopped, and any other layout can take over.

Each world trains, saves, trains on, and resumes several times in one set of processes, since starting one
costs more than everything that happens in it.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import resource
import shlex
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_core.registry import Registry
from mindspeed_testing.worlds import run_world

SMALL = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 16 "
    "--vocab-size 64 --make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 8 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --mock-data --num-workers 0 --eval-iters 0 "
    "--platform cpu --use-cpu-initialization"
)
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]


def open_run(flags, extra_plugins=(), registry=None):
    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    # The ranks of a world are daemons, which may not fork; the writers of a checkpoint are forks.
    multiprocessing.current_process()._config["daemon"] = False
    _join_world()
    session = activate([*SMALL, *flags], extra_plugins=extra_plugins, registry=registry, host="standalone")
    return loop.setup(session)


_joined = itertools.count()


def _join_world():
    """Start the process group on keys of its own: a store remembers what an earlier group told it."""
    import torch.distributed as dist

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world > 1:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"run{next(_joined)}", store)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )


def close_run(run):
    from mindspeed_train import loop

    loop.teardown(run.session)
    run.session.close()


def train(run, steps):
    from mindspeed_train.checkpoint.save import Saver

    results = []
    for _ in range(steps):
        run.session.state(Saver).poll(blocking=False)
        result = run.session.call("train_step", run=run)
        run.iteration += 1
        run.consumed_train_samples += run.args.global_batch_size
        rate = run.optimizer.param_groups[0]["lr"]
        results.append((result.losses["lm loss"].hex(), float(result.grad_norm).hex(), float(rate).hex()))
    return results


def save(run, reason="interval"):
    return run.session.call("save_checkpoint", run=run, reason=reason)


class Messages(logging.Handler):
    """Messages of the project's logger, as text."""

    def __init__(self):
        super().__init__()
        self.said = []
        logging.getLogger("mindspeed_core").addHandler(self)

    def emit(self, record):
        self.said.append(record.getMessage())

    def end(self):
        logging.getLogger("mindspeed_core").removeHandler(self)
        return self.said


def uninterrupted_and_resumed(directory, flags, resume_plugins=(), registry=None):
    """Train 2, save, train 4 more; then resume from the checkpoint and train 4: both courses."""
    save_flags = ["--save", directory, *flags]
    run = open_run(save_flags, registry=registry)
    train(run, 2)
    save(run)
    expected = train(run, 4)
    from mindspeed_train.checkpoint.save import Saver

    run.session.state(Saver).poll(blocking=True)
    close_run(run)
    messages = Messages()
    run = open_run(["--load", directory, *flags], resume_plugins, registry)
    start = (run.iteration, run.consumed_train_samples)
    resumed = train(run, 4)
    close_run(run)
    return expected, resumed, start, messages.end()


def error_of(action):
    """The text of the error that an action ends with, the session closed again."""
    from mindspeed_core.errors import UserError
    from mindspeed_core.session import current

    try:
        close_run(action())
    except UserError as error:
        from mindspeed_train import loop

        session = current()
        loop.teardown(session)
        session.close()
        return str(error)
    return ""


class Drawing:
    """Draws from the generator of dropout after the checkpoint was loaded, as building iterators may."""

    @hookimpl(wrapper=True)
    def build_data_iterators(self):
        import torch

        iterators = yield
        torch.rand(3)
        return iterators


class Average:
    """Keeps a vector of four numbers, spread over the ranks, and a count."""

    def __init__(self, scale=0.0, updates=0, name="average"):
        self.scale = scale
        self.updates = updates
        self.name = name
        self.part = None
        self.restored = None

    @hookimpl
    def checkpoint_state(self, run):
        import torch
        from megatron.core.dist_checkpointing import ShardedTensor

        world, rank = run.dist.world_size, run.dist.rank
        size = 4 // world
        if self.part is None:
            self.part = self.scale * torch.arange(rank * size, (rank + 1) * size, dtype=torch.float32)
        shard = ShardedTensor.from_rank_offsets("vector", self.part, (0, rank, world), replica_id=0)
        return {self.name: {"vector": shard, "updates": self.updates}}

    @hookimpl
    def restore_checkpoint_state(self, run, state):
        self.restored = state.get(self.name)


class Unsaveable:
    @hookimpl
    def checkpoint_state(self, run):
        return {"unsaveable": {"when": Path("x")}}


class Twisted(Feature):
    name = "twisted-weights"
    family = "test"
    summary = "stores weights in its own way"
    flags = (Flag("--twisted", help="twist"),)
    affects_checkpoint = True


def other_features(root):
    """Resuming with a feature removed, in each strictness."""
    registry = Registry.of([Twisted])
    directory = str(root / "twisted")
    run = open_run(["--save", directory, "--twisted"], registry=registry)
    save(run)
    close_run(run)
    load = ["--load", directory]
    error = error_of(lambda: open_run(load, registry=registry))
    messages = Messages()
    close_run(open_run([*load, "--strict-plan-resume", "warn"], registry=registry))
    warned = messages.end()
    messages = Messages()
    close_run(open_run([*load, "--twisted"], registry=registry))
    close_run(open_run([*load, "--strict-plan-resume", "off"], registry=registry))
    return error, warned, messages.end()


def copy_of(source, target):
    shutil.copytree(source, target, symlinks=True)
    return Path(target), next(Path(target).glob("iter_*"))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def with_tensor_unreadable_class(path):
    import torch

    torch.save({"iteration": 2, "class": Unsaveable}, path)


def damaged(root):
    """Every kind of damage, each in its own copy, and what loading it says."""
    source = root / "plain"
    errors = {}
    damages = {
        "bit flip in shard": ("__0_0.distcp", flip),
        "truncated shard": ("__0_1.distcp", truncate),
        "bit flip in index": (".metadata", flip),
        "bit flip in common": ("common.pt", flip),
        "missing shard": ("__0_0.distcp", Path.unlink),
        "damaged manifest": ("manifest.json", truncate),
    }
    for name, (file, damage) in damages.items():
        folder, checkpoint = copy_of(source, root / name.replace(" ", "-"))
        damage(checkpoint / file)
        errors[name] = error_of(lambda folder=folder: open_run(["--load", str(folder)]))
    folder, checkpoint = copy_of(source, root / "size-only")
    truncate(checkpoint / "__0_1.distcp")
    size = ["--load", str(folder), "--verify-checkpoint", "size"]
    errors["truncated shard, sizes"] = error_of(lambda: open_run(size))
    off = ["--load", str(folder), "--verify-checkpoint", "off"]
    errors["truncated shard, unverified"] = error_of(lambda: open_run(off))
    folder, checkpoint = copy_of(source, root / "forged")
    with_tensor_unreadable_class(checkpoint / "common.pt")
    forged = ["--load", str(folder), "--verify-checkpoint", "off"]
    errors["forged common"] = error_of(lambda: open_run(forged))
    errors["forged, trusted"] = error_of(lambda: open_run([*forged, "--trust-checkpoint"]))
    errors["wider model"] = error_of(lambda: open_run(["--load", str(source), "--hidden-size", "64"]))
    errors["larger vocabulary"] = error_of(lambda: open_run(["--load", str(source), "--vocab-size", "128"]))
    errors["more layers"] = error_of(lambda: open_run(["--load", str(source), "--num-layers", "4"]))
    errors["other optimizer"] = error_of(
        lambda: open_run(["--load", str(source), "--use-distributed-optimizer"])
    )
    errors["nothing there"] = error_of(
        lambda: open_run(["--load", str(root / "nowhere"), "--exit-on-missing-checkpoint"])
    )
    errors["missing step"] = error_of(lambda: open_run(["--load", str(source), "--ckpt-step", "7"]))
    return errors


def of_an_earlier_version(root):
    """The state that is loaded from a checkpoint as it is, and from one with the pickled index alone."""
    import torch

    found = []
    for name in ("as-it-is", "pickled"):
        folder, checkpoint = copy_of(root / "plain", root / name)
        if name == "pickled":
            (checkpoint / "index.json").unlink()
        run = open_run(["--load", str(folder), "--verify-checkpoint", "off"])
        state = [p.detach().clone() for chunk in run.model for p in chunk.parameters()]
        for _, values in run.optimizer.state.items():
            state += [value.clone() for value in values.values() if isinstance(value, torch.Tensor)]
        found.append((run.iteration, state, train(run, 2)))
        close_run(run)
    (step, state, course), (other_step, other_state, other_course) = found
    return step == other_step, all(map(torch.equal, state, other_state)), course == other_course, len(state)


def weights_only_ways(root):
    """Finetuning and loading without optimizer: where they start, and that weights arrive."""
    import torch

    found = {}
    for flag in ("--finetune", "--no-load-optim", "--no-load-rng"):
        run = open_run(["--load", str(root / "plain"), flag])
        state = [s for _, s in run.optimizer.state.items() if "step" in s and float(s["step"]) > 0]
        weight = sum(float(p.double().sum()) for chunk in run.model for p in chunk.parameters())
        found[flag] = (run.iteration, len(state) > 0, weight)
        close_run(run)
    run = open_run(["--load", str(root / "nothing-here")])
    found["scratch"] = (run.iteration, torch.is_grad_enabled())
    close_run(run)
    return found


def names(directory):
    """Names in a folder of checkpoints, without the file of the run that saves into it."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".owner.json")


def full_disk(root):
    """A save that the operating system refuses to write: what is said and what is left."""
    directory = root / "full"
    run = open_run(["--save", str(directory)])
    train(run, 1)
    save(run)
    train(run, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        save(run)
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = names(directory)
    save(run)
    after = names(directory)
    close_run(run)
    return text, left, after


def features_round_trip(root):
    directory = str(root / "features")
    run = open_run(["--save", directory], [Average(scale=3.0, updates=7)])
    save(run)
    close_run(run)
    messages = Messages()
    old, new = Average(), Average(name="newcomer")
    run = open_run(["--load", directory], [old, new])
    close_run(run)
    run = open_run(["--save", directory], [Unsaveable()])
    try:
        save(run)
        refused = ""
    except Exception as error:
        refused = str(error)
    close_run(run)
    restored = {
        key: getattr(value, "tolist", lambda value=value: value)() for key, value in old.restored.items()
    }
    return restored, new.restored, messages.end(), refused


def rotation(root):
    """Three saves with --keep-last-n 2, one of them in the background, and what remains each time."""
    from mindspeed_train.checkpoint.save import Saver

    directory = root / "rotation"
    run = open_run(["--save", str(directory), "--keep-last-n", "2", "--async-save"])
    remains = []
    for _ in range(3):
        train(run, 1)
        save(run)
        run.session.state(Saver).poll(blocking=True)
        remains.append(names(directory))
    mode = (directory / "iter_0000003" / "common.pt").stat().st_mode & 0o777
    close_run(run)
    return remains, mode


def single_world(directory):
    os.umask(0o027)
    root = Path(directory)
    return {
        "plain": uninterrupted_and_resumed(str(root / "plain"), []),
        "drawing": uninterrupted_and_resumed(str(root / "drawing"), [], [Drawing()]),
        "bf16": uninterrupted_and_resumed(str(root / "bf16"), ["--bf16"]),
        "async": uninterrupted_and_resumed(str(root / "async"), ["--async-save"]),
        "damaged": damaged(root),
        "earlier version": of_an_earlier_version(root),
        "weights": weights_only_ways(root),
        "full": full_disk(root),
        "features": features_round_trip(root),
        "rotation": rotation(root),
        "twisted": other_features(root),
    }


def weights_of_all_ranks(flags):
    """The sum of each rank's weights, and its next random number, before the first step."""
    import torch
    import torch.distributed as dist

    run = open_run(flags)
    weights = sum(parameter.double().sum().item() for parameter in run.model[0].parameters())
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (weights, torch.rand(()).item()))
    close_run(run)
    return everyones


INTERLEAVED = shlex.split(
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
)
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


PAIRS = {
    "plain dp2": [],
    "sharded dp2": SHARDED[:2],
    "sharded bf16 dp2": ["--bf16", SHARDED[0]],
    "interleaved": INTERLEAVED,
    "async dp2": [*SHARDED[:1], "--async-save"],
    "own seeds dp2": ["--data-parallel-random-init"],
}


def pair_world(directory, cases):
    root = Path(directory)
    results = {
        case: uninterrupted_and_resumed(str(root / case), flags)
        for case, flags in PAIRS.items()
        if case in cases
    }
    results["first weights"] = weights_of_all_ranks(["--data-parallel-random-init"])
    source = str(root / "reshard")
    run = open_run(["--save", source, *NO_DROPOUT, SHARDED[0]], [Average(scale=5.0, updates=1)])
    train(run, 2)
    save(run)
    results["reshard source"] = train(run, 3)
    close_run(run)
    for name, flags in {
        "tp2": ["--tensor-model-parallel-size", "2"],
        "pp2": ["--pipeline-model-parallel-size", "2"],
    }.items():
        messages = Messages()
        run = open_run(["--load", source, *NO_DROPOUT, SHARDED[0], *flags])
        results[name] = train(run, 3), messages.end()
        close_run(run)
    return results


def reshard_to_one(source):
    average = Average()
    run = open_run(["--load", source, *NO_DROPOUT, SHARDED[0]], [average])
    continued = train(run, 3)
    close_run(run)
    return continued, average.restored["vector"].tolist(), average.restored["updates"]


def numbers(steps):
    return [float.fromhex(value) for step in steps for value in step]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run_world(single_world, 1, str(tmp_path_factory.mktemp("single")), timeout=200)[0]


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(pair_folder, asked_for):
    return run_world(pair_world, 2, str(pair_folder), asked_for("case"), timeout=200)[0]


@pytest.mark.parametrize("case", ["plain", "drawing", "bf16", "async"])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(single, case):
    expected, resumed, start, said = single[case]
    assert start == (2, 8)
    assert resumed == expected
    assert said == []


@pytest.mark.parametrize("case", PAIRS)
def test_a_resumed_parallel_run_repeats_the_uninterrupted_one_bit_for_bit(pair, case):
    expected, resumed, start, _ = pair[case]
    assert start == (2, 8)
    assert resumed == expected


def test_data_parallel_ranks_with_seeds_of_their_own_start_from_the_same_weights(pair):
    (weights, drawn), (other_weights, other_drawn) = pair["first weights"]
    assert other_weights == weights
    assert other_drawn != drawn


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_another_layout_continues_with_the_same_losses(pair, layout):
    continued, said = pair[layout]
    assert numbers(continued) == pytest.approx(numbers(pair["reshard source"]), rel=1e-6)
    assert any("random states are seeded anew" in line for line in said)


def test_one_process_continues_what_two_saved(pair, pair_folder):
    continued, vector, updates = run_world(reshard_to_one, 1, str(pair_folder / "reshard"))[0]
    assert numbers(continued) == pytest.approx(numbers(pair["reshard source"]), rel=1e-6)
    assert (vector, updates) == ([0.0, 5.0, 10.0, 15.0], 1)


def test_a_checkpoint_without_the_index_as_data_is_loaded_bit_for_bit(single):
    *equal, tensors = single["earlier version"]
    assert equal == [True, True, True]
    assert tensors > 20


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("bit flip in shard", ["__0_0.distcp", "SHA-256"]),
        ("truncated shard", ["__0_1.distcp", "truncated", "--ckpt-step"]),
        ("truncated shard, sizes", ["__0_1.distcp", "truncated"]),
        ("truncated shard, unverified", ["iter_0000002", "__0_1.distcp", "--ckpt-step"]),
        ("bit flip in index", [".metadata", "SHA-256"]),
        ("bit flip in common", ["common.pt", "SHA-256"]),
        ("missing shard", ["__0_0.distcp", "missing"]),
        ("damaged manifest", ["manifest.json", "damaged"]),
        ("forged common", ["common.pt", "Unsaveable", "--trust-checkpoint"]),
        ("forged, trusted", ["holds no optimizer state"]),
    ],
)
def test_damage_is_named(single, damage, words):
    for word in words:
        assert word in single["damaged"][damage]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "wider model",
            ["--hidden-size 32 (checkpoint) / 64 (this run)", "--allow-other-model"],
        ),
        ("larger vocabulary", ["--vocab-size 64", "(checkpoint) / 128 (this run)"]),
        ("more layers", ["--num-layers 2 (checkpoint) / 4 (this run)"]),
        ("other optimizer", ["--use-distributed-optimizer", "--no-load-optim"]),
        ("nothing there", ["nowhere", "no checkpoint"]),
        ("missing step", ["--ckpt-step 7", "complete ones in --load: 2"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_explained(single, case, words):
    for word in words:
        assert word in single["damaged"][case]


def test_weights_can_be_loaded_without_the_rest(single):
    found = single["weights"]
    assert found["--finetune"][:2] == (0, False)
    assert found["--no-load-optim"][:2] == (2, False)
    assert found["--no-load-rng"][:2] == (2, True)
    assert found["--finetune"][2] == found["--no-load-rng"][2]
    assert found["scratch"][0] == 0


def test_a_refused_write_leaves_the_old_checkpoint_alone(single):
    text, left, after = single["full"]
    assert text.startswith("CheckpointError")
    assert "refused a write" in text
    assert left == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert "iter_0000002" in after


def test_a_features_state_returns_and_a_new_feature_is_told_by_absence(single):
    restored, new, said, _ = single["features"]
    assert restored == {"vector": [0.0, 3.0, 6.0, 9.0], "updates": 7}
    assert new is None
    assert len([line for line in said if "newcomer" in line]) == 1


def test_state_that_would_need_unpickling_is_refused_when_saved(single):
    assert "feature 'unsaveable'" in single["features"][3]


def test_old_checkpoints_make_room(single):
    remains, _ = single["rotation"]
    tracker = "latest_checkpointed_iteration.txt"
    assert remains == [
        ["iter_0000001", tracker],
        ["iter_0000001", "iter_0000002", tracker],
        ["iter_0000002", "iter_0000003", tracker],
    ]


def test_a_removed_feature_stops_the_resume_unless_told_otherwise(single):
    error, warned, silent = single["twisted"]
    assert "twisted-weights was active" in error
    assert "--strict-plan-resume" in error
    assert len([line for line in warned if "twisted-weights" in line]) == 1
    assert silent == []


def test_files_have_the_users_permissions(single):
    assert single["rotation"][1] == 0o640
