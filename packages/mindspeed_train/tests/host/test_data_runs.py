"""Whole runs: the samples of a step whatever the world, a growing batch and its resume, validation alone."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mindspeed_testing.worlds import run_world

SMALL = shlex.split(
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --lr 1e-2 --num-workers 0 --no-progress "
    "--use-cpu-initialization --log-interval 1"
)


def train(*flags):
    """Train in this world and return what was recorded."""
    import multiprocessing

    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    # The ranks of a world are daemons, which may not fork; the writers of a checkpoint are forks.
    multiprocessing.current_process()._config["daemon"] = False
    with activate([*SMALL, *flags], host="standalone") as session:
        run = loop.train(session)
        assert run.run_dir is not None
        records = [json.loads(line) for line in Path(run.run_dir, "metrics.jsonl").read_text().splitlines()]
        return records, run.consumed_train_samples


def course(records):
    return [(r["step"], r["loss"], r["learning_rate"], r["grad_norm"]) for r in records if "loss" in r]


def ramp(folder):
    """A run with a growing batch, and the same in three parts with a resume inside and after the ramp."""
    data = ["--data-path", str(folder / "train"), "--eval-iters", "0"]
    flags = [
        *data,
        *shlex.split("--train-samples 60 --rampup-batch-size 2 2 20 --global-batch-size 8"),
        *shlex.split("--lr-warmup-samples 10 --lr-decay-samples 50"),
    ]
    whole = train(*flags, "--run-dir", str(folder / "whole"))
    parts = [
        "--save",
        str(folder / "ckpt"),
        "--load",
        str(folder / "ckpt"),
        "--run-dir",
        str(folder / "parts"),
    ]
    train(*flags, *parts, "--exit-interval", "5")
    saved = sorted(path.name for path in (folder / "ckpt").glob("iter_*"))
    train(*flags, *parts, "--exit-interval", "10")
    resumed = train(*flags, *parts)
    return whole, resumed, saved, with_other_data(folder, flags, parts)


def schedule(folder):
    """A run with batches of a schedule, and the same in two parts; tokens are counted in samples of 16."""
    flags = [
        *("--data-path", str(folder / "train"), "--eval-iters", "0", "--train-samples", "30"),
        *shlex.split("--step-batch-size-schedule 0:2 96:4 0.256K:8 --lr-warmup-samples 10"),
    ]
    whole = train(*flags, "--run-dir", str(folder / "scheduled"))
    parts = ["--save", str(folder / "steps"), "--load", str(folder / "steps")]
    parts += ["--run-dir", str(folder / "scheduled parts")]
    train(*flags, *parts, "--exit-interval", "4")
    saved = sorted(path.name for path in (folder / "steps").glob("iter_*"))
    return whole, train(*flags, *parts), saved


def with_other_data(folder, flags, parts):
    """Resuming with another dataset, refused and allowed, and with the same one elsewhere: what is said."""
    from mindspeed_core.errors import DataError

    said = {}
    for suffix in (".bin", ".idx"):
        shutil.copy(folder / f"train{suffix}", folder / f"moved{suffix}")
    two, moved = str(folder / "two"), str(folder / "moved")
    for name, path, more in (
        ("refused", [two], ()),
        ("moved", [moved], ()),
        ("allowed", ["1", two], ["--allow-other-data"]),
    ):
        try:
            train(*flags, "--data-path", *path, *parts, *more)
            said[name] = ""
        except DataError as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    generator = np.random.default_rng(0)
    for name, documents in (("train", 60), ("one", 11), ("two", 7)):
        builder = IndexedDatasetBuilder(f"{root / name}.bin", dtype=np.uint16)
        for _ in range(documents):
            text = generator.integers(1, 63, size=30).tolist()
            builder.add_document(text, [len(text)])
        builder.finalize(f"{root / name}.idx")
    return root


@pytest.fixture(scope="module")
def ramped(folder):
    return run_world(ramp, 1, folder, timeout=120)[0]


def test_a_growing_batch_uses_the_samples_that_were_asked_for(ramped):
    (records, consumed), *_ = ramped
    steps = course(records)
    # 4 batch sizes of 20/3 samples each: 2 2 2 2, 4 4, 6 (from 16 on), then 8.
    assert [step for step, *_ in steps] == list(range(1, len(steps) + 1))
    assert consumed <= 60 < consumed + 8


def test_the_learning_rate_follows_the_samples_of_each_step(ramped):
    (records, _), *_ = ramped
    rates = [rate for _, _, rate, _ in course(records)]
    # The rate that is recorded is the one after the step: warm-up over 10 samples, in steps of 2.
    assert rates[:4] == pytest.approx([0.002, 0.004, 0.006, 0.008])
    assert rates[-1] == 0.0


def test_a_run_resumed_inside_the_ramp_goes_on_as_if_undisturbed(ramped):
    (whole, consumed), (parts, consumed_in_parts), *_ = ramped
    assert course(parts) == course(whole)
    assert consumed_in_parts == consumed


def test_the_last_state_of_each_batch_size_is_kept(ramped):
    _, _, saved, _ = ramped
    assert "iter_0000004" in saved


def test_a_run_is_not_resumed_with_other_data_unless_that_is_wanted(ramped):
    *_, said = ramped
    assert "the training data are others than those of" in said["refused"]
    assert "the content of " in said["refused"]
    assert "--allow-other-data" in said["refused"]
    assert said["allowed"] == ""


def test_the_same_data_may_lie_elsewhere(ramped):
    *_, said = ramped
    assert said["moved"] == ""


def samples(folder, world_flags):
    """The tokens of this rank for three steps, and a validation of whole sets."""
    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    flags = [
        *("--train-data-path", "3", str(folder / "train"), "1", str(folder / "one")),
        *("--valid-data-path", str(folder / "one"), str(folder / "two")),
        *("--data-cache-path", str(folder / "cache"), "--global-batch-size", "8", "--train-iters", "3"),
        *("--full-validation", "--multiple-validation-sets", *world_flags),
    ]
    with activate([*SMALL, *flags], host="standalone") as session:
        run = loop.setup(session)
        losses = [session.call("evaluate", run=run, split="valid") for _ in range(2)]
        steps = []
        for _ in range(3):
            tokens = [next(run.data.train[0])["tokens"].tolist() for _ in range(run.args.num_microbatches)]
            steps.append([sample for batch in tokens for sample in batch])
        loop.teardown(session)
    return steps, losses, run.consumed_valid_samples


@pytest.fixture(scope="module")
def worlds(folder):
    return [run_world(samples, size, folder, [], timeout=120) for size in (1, 2)]


def test_the_samples_of_a_step_do_not_depend_on_the_world(worlds):
    alone, together = worlds
    for step in range(3):
        shared = [sample for steps, _, _ in together for sample in steps[step]]
        assert len(shared) == 8
        assert sorted(shared) == sorted(alone[0][0][step])


def test_whole_sets_give_one_number_each_whatever_the_world(worlds):
    alone, together = worlds
    first, second = alone[0][1]
    assert set(first) == {"lm loss", "lm loss one", "lm loss two"}
    assert first["lm loss one"] != first["lm loss two"]
    assert first["lm loss"] == pytest.approx((first["lm loss one"] + first["lm loss two"]) / 2)
    assert second == first
    for _, losses, _ in together:
        assert losses[0] == pytest.approx(first, rel=1e-6)


def validate_alone(folder):
    flags = ["--data-path", str(folder / "train"), "--split", "60,30,10", "--global-batch-size", "4"]
    saved = ["--save", str(folder / "alone"), "--train-iters", "2", "--eval-iters", "2"]
    trained, _ = train(*flags, *saved, "--run-dir", str(folder / "trained"))
    alone = ["--skip-train", "--load", str(folder / "alone"), "--eval-iters", "2"]
    found, _ = train(*flags, *alone, "--run-dir", str(folder / "validated"))
    return trained, found


def test_a_checkpoint_can_be_validated_without_training(folder):
    trained, found = run_world(validate_alone, 1, folder, timeout=120)[0]
    wanted = [record for record in trained if "validation_loss" in record or "test_loss" in record]
    assert len(wanted) == 2
    assert found == wanted


def skip_first_and_save(folder):
    overlap = shlex.split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    flags = shlex.split(
        "--mock-data --fp16 --train-iters 2 --save-interval 1 --eval-interval 1 --eval-iters 1"
    )
    places = ["--save", str(folder / "skipped"), "--run-dir", str(folder / "skipping")]
    return train(*flags, "--global-batch-size", "2", *overlap, *places)[0]


def test_a_first_step_that_was_skipped_is_validated_and_saved(folder):
    records = run_world(skip_first_and_save, 1, folder, timeout=120)[0]
    assert [record["skipped"] for record in records if "loss" in record] == [True, True]
    assert sum("validation_loss" in record for record in records) == 2
    assert len(list((folder / "skipped").glob("iter_*"))) == 2


def losses_of_two_documents(folder, flags):
    """The loss at each position of a sample of two documents, for two versions of the first document."""
    import torch

    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    end = 63
    flags = ["--data-path", str(folder / "ends"), "--split", "100,0,0", "--global-batch-size", "2", *flags]
    common = ["--train-iters", "1", "--eval-iters", "0", "--attention-dropout", "0", "--hidden-dropout", "0"]
    with activate([*SMALL, *common, *flags], host="standalone") as session:
        run = loop.setup(session)
        batch = session.call("get_batch", run=run, data_iterator=run.data.train[0], vp_stage=None)
        first_end = int((batch.tokens[0] == end).nonzero()[0])
        other = batch.tokens.clone()
        other[0, :first_end] = (other[0, :first_end] + 7) % 60 + 1
        losses = [
            run.model[0](tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)[0]
            for tokens in (batch.tokens, other)
        ]
        loop.teardown(session)
    same = torch.isclose(losses[0], losses[1], rtol=0, atol=0).tolist()
    return first_end, same, batch.position_ids[0].tolist(), batch.loss_mask[0].tolist()


def both_attentions(folder):
    builder = IndexedDatasetBuilder(f"{folder / 'ends'}.bin", dtype=np.uint16)
    generator = np.random.default_rng(1)
    for _ in range(40):
        text = [*generator.integers(1, 60, size=6).tolist(), 63]
        builder.add_document(text, [len(text)])
    builder.finalize(f"{folder / 'ends'}.idx")
    reset = ["--reset-attention-mask", "--create-attention-mask-in-dataloader", "--reset-position-ids"]
    return losses_of_two_documents(folder, []), losses_of_two_documents(folder, reset)


def test_a_document_sees_nothing_of_the_one_before_it_when_attention_is_reset(folder):
    plain, reset = run_world(both_attentions, 1, folder, timeout=120)[0]
    end, same, positions, _ = plain
    assert positions == list(range(16))
    assert not any(same[end:])
    end, same, positions, mask = reset
    assert all(same[end + 1 :])
    assert not any(same[:end])
    assert positions[end : end + 3] == [end, 0, 1]
    assert mask == [1.0] * 16


@pytest.fixture(scope="module")
def scheduled(folder):
    return run_world(schedule, 1, folder, timeout=120)[0]


def test_batches_of_a_schedule_are_those_of_its_tokens(scheduled):
    (records, consumed), _, saved = scheduled
    # 2 2 2, then 4 4 4 from sample 6 on, then 8 from sample 16 on, the last of them beyond the end.
    assert consumed == 3 * 2 + 3 * 4 + 2 * 8
    rates = [rate for _, _, rate, _ in course(records)]
    # The warm-up is over after 10 samples, in the fourth step.
    assert rates[:4] == pytest.approx([0.002, 0.004, 0.006, 0.01])
    assert len(rates) == 8
    # As with a ramp, the last state of each batch size is saved.
    assert saved == ["iter_0000003", "iter_0000004"]


def test_a_run_resumed_inside_a_schedule_goes_on_as_if_undisturbed(scheduled):
    (whole, consumed), (parts, consumed_in_parts), _ = scheduled
    assert course(parts) == course(whole)
    assert consumed_in_parts == consumed


def ramp_in_this_world(folder, name):
    flags = shlex.split("--train-samples 60 --rampup-batch-size 4 4 24 --global-batch-size 12 --eval-iters 0")
    no_dropout = ["--attention-dropout", "0", "--hidden-dropout", "0"]
    data = ["--data-path", str(folder / "train"), "--run-dir", str(folder / name)]
    records, consumed = train(*flags, *no_dropout, *data)
    return course(records), consumed


def test_a_growing_batch_trains_the_same_on_one_and_on_two_ranks(folder):
    (alone, consumed), *_ = run_world(ramp_in_this_world, 1, folder, "ramp1", timeout=120)
    (together, consumed_together), *_ = run_world(ramp_in_this_world, 2, folder, "ramp2", timeout=120)
    assert consumed == consumed_together
    for one, two in zip(alone, together, strict=True):
        assert two == pytest.approx(one, rel=1e-4)
