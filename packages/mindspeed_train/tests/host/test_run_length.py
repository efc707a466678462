"""Length of a run: in steps or in samples, with a batch that may grow."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_core.errors import ArgumentError
from mindspeed_train.arguments.run_length import (
    batch_at,
    derive_batch,
    derive_schedule,
    samples_wanted,
)


def run(**given):
    values = {
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "data_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": None,
        "rampup_batch_size": None,
        "step_batch_size_schedule": None,
        "seq_length": 10,
        "load": None,
        "train_iters": None,
        "train_samples": None,
        "lr_decay_iters": None,
        "lr_decay_samples": None,
        "lr_warmup_iters": 0,
        "lr_warmup_samples": 0,
        "lr_warmup_fraction": None,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_samples": None,
        "lr_decay_style": "linear",
        "eval_interval": 10,
        "eval_iters": 3,
        "full_validation": False,
        "skip_train": False,
    }
    args = Namespace(**{**values, **given})
    derive_batch(args)
    if not args.skip_train:
        derive_schedule(args)
    return args


def batches(args):
    consumed, found = 0, []
    for _ in range(args.train_iters):
        found.append(batch_at(args, consumed).samples)
        consumed += found[-1]
    return found


def test_a_run_in_steps_is_counted_in_samples_for_the_schedule():
    args = run(train_iters=10, lr_warmup_iters=2, lr_decay_iters=8, lr_wsd_decay_iters=3)
    assert (args.lr_warmup_steps, args.lr_decay_steps) == (32, 128)
    assert (args.wd_incr_steps, args.wsd_decay_steps) == (160, 48)


def test_a_run_in_samples_leaves_out_the_last_incomplete_batch():
    args = run(train_samples=100, lr_warmup_samples=10)
    assert args.train_iters == 6
    assert (args.lr_warmup_steps, args.lr_decay_steps, args.wd_incr_steps) == (10, 100, 100)


def test_a_warm_up_share_is_that_of_the_decay():
    assert run(train_samples=200, lr_decay_samples=100, lr_warmup_fraction=0.1).lr_warmup_steps == 10


def test_the_batch_grows_over_the_given_samples():
    args = run(train_samples=120, rampup_batch_size=[4, 4, 36])
    assert batches(args) == [4, 4, 4, 8, 8, 12, 16, 16, 16, 16, 16]
    assert sum(batches(args)) <= 120 < sum(batches(args)) + 16
    assert batch_at(args, 0).microbatches == 1
    assert batch_at(args, 100).microbatches == args.num_microbatches == 4


def test_the_batch_depends_on_the_samples_consumed_and_nothing_else():
    args = run(train_samples=120, rampup_batch_size=[4, 4, 36])
    assert [batch_at(args, consumed).samples for consumed in (100, 12, 0, 20)] == [16, 8, 4, 8]


def test_a_run_that_ends_in_the_ramp_has_samples_for_its_last_step():
    args = run(train_samples=21, rampup_batch_size=[4, 4, 36])
    assert samples_wanted(args)[0] == sum(batches(args)) == 28


def scheduled(*words, **given):
    return run(global_batch_size=None, step_batch_size_schedule=list(words), **given)


def test_the_batch_changes_at_the_given_tokens():
    # 10 tokens a sample: from sample 10 on, and from sample 30 on.
    args = scheduled("0:4", "100:8", "0.3K:16", train_samples=100)
    assert batches(args) == [4, 4, 4, 8, 8, 8, 16, 16, 16, 16]
    assert (args.global_batch_size, args.num_microbatches) == (16, 4)
    assert batch_at(args, 0).microbatches == 1


def test_a_schedule_is_read_as_one_word_and_in_any_order_too():
    one = scheduled("100:8, 300:16 0:4", train_samples=100)
    assert batches(one) == batches(scheduled("0:4", "100:8", "300:16", train_samples=100))


def test_a_batch_may_shrink_and_a_large_one_leap_over_a_phase():
    args = scheduled("0:40", "100:8", "200:16", "500:4", train_samples=70)
    assert batches(args) == [40, 16, 4, 4, 4, 4]


def test_suffixes_are_powers_of_ten_in_either_case():
    args = scheduled("0:4", "1k:8", "1M:12", "1B:16", "1T:20", train_samples=100)
    found = [batch_at(args, 10**power // 10).samples for power in (2, 3, 6, 9, 12)]
    assert found == [4, 8, 12, 16, 20]


def test_steps_of_a_long_schedule_are_counted_at_once():
    args = scheduled("0:384", "200B:768", "400B:1152", seq_length=4096, train_samples=195_312_500)
    consumed = steps = 0
    while consumed < args.train_samples:
        consumed += batch_at(args, consumed).samples
        steps += 1
    assert args.train_iters == steps
    assert samples_wanted(args)[0] == consumed


def test_the_last_step_of_a_schedule_may_reach_beyond_the_end():
    args = scheduled("0:16", train_samples=100)
    assert (args.train_iters, samples_wanted(args)[0]) == (7, 112)
    assert args.lr_decay_steps == 100


def test_first_batches_of_a_resumed_run_need_not_suit_its_ranks():
    given = {"train_samples": 100, "data_parallel_size": 4, "micro_batch_size": 2}
    with pytest.raises(ArgumentError, match="multiples of 8"):
        scheduled("0:4", "100:8", **given)
    args = scheduled("0:4", "100:8", load="folder", **given)
    assert batch_at(args, 12).samples == 8
    with pytest.raises(ArgumentError, match="fewer ranks"):
        batch_at(args, 8)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"step_batch_size_schedule": ["0:4"]}, "--global-batch-size 16"),
        ({"step_batch_size_schedule": ["0:4"], "rampup_batch_size": [4, 4, 36]}, "--global-batch-size 16"),
        (
            {"step_batch_size_schedule": ["0:4"], "global_batch_size": None, "rampup_batch_size": [4, 4, 36]},
            "--rampup-batch-size '4 4 36'",
        ),
        (
            {"step_batch_size_schedule": ["0:4"], "global_batch_size": None, "train_samples": None}
            | {"train_iters": 5},
            "--train-samples",
        ),
        *(
            ({"step_batch_size_schedule": words, "global_batch_size": None}, named)
            for words, named in (
                (["100:4"], "begin with 0:SIZE"),
                (["0:4", "5:8"], "two batches from sample 0"),
                (["0:4", "100"], "'100'"),
                (["0:4", "1G:8"], "'1G'"),
                (["0:4", "-1:8"], "'-1'"),
                (["0:4", "100:nan"], "'nan'"),
                (["0:0"], "a batch of 0"),
                (["0:4", "100:6"], "multiples of 4"),
                ([","], "begin with 0:SIZE"),
            )
        ),
    ],
)
def test_schedules_that_do_not_fit_are_refused_by_name(given, named):
    with pytest.raises(ArgumentError) as refused:
        run(**{"train_samples": 100, **given})
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "--train-iters"),
        ({"train_iters": 5, "train_samples": 100}, "--train-samples 100"),
        ({"train_samples": 15}, "--train-samples 15"),
        ({"train_samples": 100, "lr_decay_iters": 5}, "--lr-decay-samples"),
        ({"train_samples": 100, "lr_warmup_iters": 5}, "--lr-warmup-samples"),
        ({"train_iters": 5, "lr_decay_samples": 5}, "--lr-decay-iters"),
        ({"train_iters": 5, "lr_warmup_samples": 5}, "--lr-warmup-iters"),
        ({"train_iters": 5, "rampup_batch_size": [4, 4, 36]}, "--train-samples"),
        ({"train_samples": 100, "lr_warmup_samples": 100}, "--lr-warmup-samples 100"),
        ({"train_samples": 100, "lr_warmup_samples": 5, "lr_warmup_fraction": 0.1}, "--lr-warmup-samples"),
        ({"train_samples": 100, "lr_decay_style": "WSD"}, "--lr-wsd-decay-samples"),
        ({"train_samples": 100, "rampup_batch_size": [4, 5, 36]}, "--rampup-batch-size '4 5 36'"),
        ({"train_samples": 100, "rampup_batch_size": [16, 4, 36]}, "--rampup-batch-size '16 4 36'"),
        ({"train_samples": 100, "rampup_batch_size": [2, 2, 36]}, "multiples of 4"),
        ({"train_samples": 100, "rampup_batch_size": [4, 4, 0]}, "--rampup-batch-size '4 4 0'"),
        ({"train_iters": 5, "global_batch_size": 6}, "--global-batch-size 6"),
        (
            {
                "train_samples": 100,
                "rampup_batch_size": [4, 4, 36],
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
            "a multiple of 2",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused_by_name(given, named):
    with pytest.raises(ArgumentError) as refused:
        run(**given)
    assert named in str(refused.value)


def test_samples_of_validation_follow_from_its_intervals():
    assert samples_wanted(run(train_iters=25)) == (400, 3 * 3 * 16, 3 * 16)
    assert samples_wanted(run(train_iters=25, full_validation=True)) == (400, None, 48)
    assert samples_wanted(run(skip_train=True)) == (0, 48, 48)
