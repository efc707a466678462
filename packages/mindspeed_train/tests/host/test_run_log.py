"""Output and records of a run."""

import errno
import io
import json
import os
import resource
from argparse import Namespace
from types import SimpleNamespace

import pytest

from mindspeed_core.resolver.plan import HeldBack, Note, Plan
from mindspeed_core.run import LoadInfo
from mindspeed_train.launch import last_save
from mindspeed_train.launch.last_save import LastSave
from mindspeed_train.monitoring.curves import draw_loss_curve
from mindspeed_train.monitoring.live import Status
from mindspeed_train.monitoring.records import read_metrics
from mindspeed_train.monitoring.run_log import RunLog, announce
from mindspeed_train.monitoring.step_line import format_step

STEP = {
    "step": 3,
    "loss": 2.123456789012345,
    "learning_rate": 1e-3,
    "grad_norm": 0.5,
    "tokens_per_second": 12345.0,
    "step_ms": 20.0,
    "peak_memory_bytes": 2**20,
    "memory_source": "process RSS",
}


def watch(folder, **options):
    return RunLog(folder, total=10, start=options.pop("start", 0), progress=True, output=io.StringIO())


def test_a_step_is_recorded_with_its_whole_precision(tmp_path):
    seen = watch(tmp_path)
    seen.step(STEP)
    seen.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record == {name: value for name, value in STEP.items() if name != "memory_source"}


WHOLE = "step  3/10 | loss 2.123457 | lr 1.000e-03 | grad norm 0.5000 | 12,345 tokens/s | 20.0 ms | 1 MiB"


@pytest.mark.parametrize("columns", [None, 120, len(WHOLE)])
def test_a_step_is_one_whole_line_where_it_fits(columns):
    assert format_step(STEP, 10, columns) == WHOLE


@pytest.mark.parametrize("columns", [30, 40, 60, 80, len(WHOLE) - 1])
def test_a_narrow_terminal_gets_a_step_in_shorter_words_with_what_matters_most(columns):
    line = format_step({**STEP, "share_of_peak": 0.5, "tflops_per_device": 3.0, "noise": 0.25}, 10, columns)
    assert len(line) <= columns
    assert line.startswith("step  3/10 | loss 2.1235")
    assert ("12,345 tok/s" in line) == (columns >= 40)
    assert ("50.0% MFU" in line) == (columns >= 60)


def test_memory_from_one_gibibyte_on_is_in_gibibytes():
    assert format_step({**STEP, "peak_memory_bytes": 3 * 2**29}, 10).endswith(" | 1.5 GiB")


def test_the_status_of_a_run_is_a_file_with_the_numbers_of_the_last_step(tmp_path):
    seen = watch(tmp_path, start=2)
    seen.step(STEP)
    training = json.loads((tmp_path / "status.json").read_text())
    seen.close()
    ended = json.loads((tmp_path / "status.json").read_text())
    assert training.pop("seconds_left") >= 0
    assert training == {
        "state": "training",
        "step": 3,
        "total_steps": 10,
        "loss": STEP["loss"],
        "tokens_per_second": 12345.0,
        "peak_memory_bytes": 2**20,
    }
    assert ended["state"] == "ended"
    assert ended["step"] == 3


def test_the_time_left_follows_from_the_steps_of_this_start_and_the_file_is_written_once_a_second(tmp_path):
    seconds = iter([0.0, 10.0, 10.0, 10.5, 10.5, 12.0])
    status = Status(total=10, start=2, clock=lambda: next(seconds))
    status.step({**STEP, "step": 4})
    status.write(tmp_path)
    status.values["step"] = 5
    status.write(tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["seconds_left"] == 30.0
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 4
    status.write(tmp_path, at_once=True)
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 5


@pytest.mark.parametrize(
    ("arguments", "checkpoint", "command"),
    [
        ("--lr 1 --save ck", "ck/iter_0000007", "--lr 1 --save ck --load ck --run-dir runs/x"),
        (
            "--load=old --ckpt-step 3 --finetune --save ck --run-dir a",
            "ck/iter_0000007",
            "--save ck --load ck --run-dir runs/x",
        ),
        (
            "--load old --ckpt-step 3 --save ck --run-dir a",
            "old/iter_0000003",
            "--load old --ckpt-step 3 --save ck --run-dir runs/x",
        ),
    ],
)
def test_the_command_that_goes_on_loads_what_is_saved(arguments, checkpoint, command):
    found = last_save.way_on(arguments.split(), LastSave(7, checkpoint), "runs/x")
    assert found == f"mindspeed-train {command}"


def test_nothing_goes_on_where_nothing_is_saved():
    assert last_save.way_on(["--lr", "1"], None, "runs/x") == ""


def test_the_start_of_a_run_says_what_is_held_back_and_what_features_note(tmp_path):
    plan = Plan(held_back=(HeldBack("fast", "it is broken"),), notes=(Note("uneven", "12 % idle"),))
    sizes = dict.fromkeys(("tensor", "pipeline", "context"), 1)
    args = Namespace(
        **{f"{name}_model_parallel_size": 1 for name in sizes},
        context_parallel_size=1,
        data_parallel_size=1,
        skip_train=False,
        train_iters=3,
        explain=False,
    )
    peak = SimpleNamespace(source="process RSS")
    platform = SimpleNamespace(name="cpu", kinds=lambda: ("cpu",), dry_run=False, peak_memory=lambda: peak)
    session = SimpleNamespace(plan=plan, platform=platform, provenance={}, state=lambda record: record())
    run = SimpleNamespace(
        args=args,
        session=session,
        model=[],
        dist=SimpleNamespace(world_size=1),
        iteration=0,
        run_dir=tmp_path,
        loaded=LoadInfo(None),
    )
    seen = watch(tmp_path)
    announce(run, seen, 1.0)
    said = seen._output.getvalue()
    assert "held back: fast: it is broken" in said
    assert "note: uneven: 12 % idle" in said
    assert "memory is process RSS of rank 0" in said


def test_a_metric_of_a_feature_is_shown_by_its_name():
    assert "noise 0.25" in format_step({**STEP, "noise": 0.25}, 10)


def test_a_validation_is_a_record_of_its_own(tmp_path):
    seen = watch(tmp_path)
    seen.validation(5, {"lm loss": 1.5})
    seen.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 5, "validation_loss": 1.5}]


def test_each_validation_set_is_recorded_and_shown(tmp_path):
    seen = watch(tmp_path)
    seen.validation(5, {"lm loss": 1.5, "lm loss news": 1.0, "lm loss code": 2.0})
    seen.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record == {
        "step": 5,
        "validation_loss": 1.5,
        "validation_loss news": 1.0,
        "validation_loss code": 2.0,
    }
    assert "validation loss 1.500000 | news 1.000000 | code 2.000000" in seen._output.getvalue()


def write_records(folder, *steps, rest=""):
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + rest)
    return path


def steps_in(path):
    return [record["step"] for record in read_metrics(path)]


def test_records_beyond_the_checkpoint_are_moved_aside_and_a_cut_line_is_dropped_on_resume(tmp_path):
    path = write_records(tmp_path, 1, 2, 3, rest='{"step": 4, "lo')
    watch(tmp_path, start=2).close()
    assert steps_in(path) == [1, 2]
    assert steps_in(tmp_path / "metrics.1.jsonl") == [3]


def test_a_record_that_is_resumed_where_it_ends_stays_as_it_is(tmp_path):
    path = write_records(tmp_path, 1, 2)
    before = path.stat().st_ino
    watch(tmp_path, start=2).close()
    assert path.stat().st_ino == before
    assert list(tmp_path.glob("metrics.*.jsonl")) == []


def test_a_fresh_start_moves_the_record_aside_with_all_that_describes_it(tmp_path):
    for text in ("first", "second"):
        write_records(tmp_path, 1, 2, 3)
        (tmp_path / "summary.md").write_text(text)
        last_save.write(tmp_path, LastSave(3, text))
        watch(tmp_path, start=0).close()
    assert steps_in(tmp_path / "metrics.jsonl") == []
    for number, text in enumerate(("first", "second"), 1):
        assert steps_in(tmp_path / f"metrics.{number}.jsonl") == [1, 2, 3]
        assert (tmp_path / f"summary.{number}.md").read_text() == text
        assert json.loads((tmp_path / f"last_save.{number}.json").read_text())["checkpoint"] == text
    assert not (tmp_path / "summary.md").exists()
    assert last_save.read(tmp_path) is None


@pytest.fixture
def small_files():
    """Let no file grow beyond 100 bytes, as a full disk would; gives the way to let them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_without_room_is_left_out_whole_and_told_once(tmp_path, small_files, caplog):
    seen = watch(tmp_path)
    for step in range(1, 9):
        seen.validation(step, {"lm loss": 1.0})
    full = steps_in(tmp_path / "metrics.jsonl")
    small_files()
    seen.validation(9, {"lm loss": 1.0})
    seen.close()
    assert full == list(range(1, len(full) + 1))
    assert len(full) < 8
    assert steps_in(tmp_path / "metrics.jsonl") == [*full, 9]
    (told,) = caplog.messages
    assert told.startswith(f"--run-dir {tmp_path}: File too large")


class Failing(io.StringIO):
    """An output that fails with one error."""

    def __init__(self, number):
        super().__init__()
        self.number, self.writes = number, 0

    def write(self, text):
        self.writes += 1
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(("number", "tries"), [(errno.EPIPE, 1), (errno.ENOSPC, 3)])
def test_an_output_that_fails_is_told_once_and_tried_again_where_it_may_recover(number, tries, caplog):
    output = Failing(number)
    seen = RunLog(None, total=1, start=0, progress=False, output=output)
    seen.active = True
    for _ in range(3):
        seen.say("a line")
    assert output.writes == tries
    assert len(caplog.messages) == 1


def test_ranks_that_only_listen_write_nothing(tmp_path):
    seen = RunLog(None, total=10, start=0, progress=True)
    seen.step(STEP)
    seen.say("nothing")
    seen.close()
    assert list(tmp_path.iterdir()) == []


def test_the_loss_curve_is_a_png(tmp_path):
    path = tmp_path / "curve.png"
    draw_loss_curve([STEP, {"step": 3, "validation_loss": 2.0}], path, {"unigram entropy": 6.0})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_line_that_the_output_has_no_letters_for_is_shown_all_the_same():
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    seen = RunLog(None, total=1, start=0, progress=False, output=output)
    seen.active = True
    seen.say("loss \u00e9")
    seen.say("goes on")
    assert output.buffer.getvalue() == b"loss \\xe9\ngoes on\n"
