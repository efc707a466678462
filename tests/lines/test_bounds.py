"""Sizes and files that would take all memory, or all time, are refused before anything is allocated."""

import os
import random
from argparse import Namespace

import pytest

from mindspeed_core.errors import ArgumentError, NamedFileError
from mindspeed_core.hosts.standalone.arguments import run_length, sizes
from mindspeed_core.hosts.standalone.arguments.folders import check_folders
from mindspeed_core.hosts.standalone.arguments.model import _too_long
from mindspeed_core.hosts.standalone.arguments.run_length import batch_at
from mindspeed_core.hosts.standalone.named_files import read_named_file


def ramp(start, increment, sizes, samples, train_samples):
    return Namespace(
        rampup_batch_size=[start, increment, samples],
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
