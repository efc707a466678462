"""Analyses of traces: every moment counts once, and folders that hold none are refused."""

import gzip
import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_core.errors import UserError
from mindspeed_profile.command import main
from mindspeed_profile.intervals import length, union, within, without
from mindspeed_profile.trace_analysis import PIPELINE, analyse_traces

TENSOR = "TENSOR_MODEL_PARALLEL_GROUP"
spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def moments(intervals):
    return {at for begin, end in intervals for at in range(int(begin), int(end))}


@given(a=spans, b=spans)
def test_intervals_are_sets_of_moments(a, b):
    first, second = union(a), union(b)
    assert moments(first) == moments(a)
    assert moments(within(first, second)) == moments(a) & moments(b)
    assert moments(without(first, second)) == moments(a) - moments(b)
    assert length(first) == len(moments(a))
    assert all(one[1] < other[0] for one, other in pairwise(first))


def event(category, name, begin, duration, tid=1, **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": duration,
        "pid": 9,
        "tid": tid,
        "args": args,
    }


def write(folder, events, rank=0, world=2, groups=()):
    content = {
        "distributedInfo": {"rank": rank, "world_size": world, "pg_config": list(groups)},
        "traceEvents": [{"ph": "M", "name": "process_name"}, *events],
    }
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / f"rank{rank:05d}_steps1-3.pt.trace.json.gz", "wt", encoding="utf-8") as file:
        json.dump(content, file)


CPU = [
    event("user_annotation", "step", 0, 1000),
    event("user_annotation", "step", 2000, 1000),
    event("cpu_op", "aten::linear", 100, 200),
    event("cpu_op", "aten::mm", 150, 100),
    event("user_annotation", f"wait {PIPELINE}", 400, 300),
    event("cpu_op", "c10d::recv_", 410, 100),
    event("cpu_op", "aten::mm", 2100, 100),
    # Of other threads, and between steps.
    event("cpu_op", "aten::copy_", 2300, 500, tid=2),
    event("cpu_op", "aten::add", 1500, 100),
]


def test_the_time_of_a_cpu_is_divided_without_rest(tmp_path):
    write(tmp_path, CPU)
    (found,) = analyse_traces(tmp_path)
    assert (found.device, found.steps, found.step) == ("cpu", 2, 1.0)
    assert found.compute == pytest.approx(0.15)
    assert found.waiting == {PIPELINE: pytest.approx(0.15)}
    assert found.compute + sum(found.waiting.values()) + found.idle == pytest.approx(found.step)
    assert found.bubble == pytest.approx(0.15)
    assert found.named


def test_operators_have_their_own_time(tmp_path):
    write(tmp_path, CPU)
    (found,) = analyse_traces(tmp_path, top=2)
    assert [(one.name, round(one.milliseconds, 6), one.calls) for one in found.top] == [
        ("aten::mm", 0.1, 1.0),
        ("aten::linear", 0.05, 0.5),
    ]


CUDA = [
    event("user_annotation", "step", 0, 900),
    event("kernel", "gemm", 100, 300, tid=7),
    # Hidden behind the product in part.
    event("kernel", "ncclDevKernel_AllReduce", 200, 400, tid=8, **{"Process Group Name": "12"}),
    event(
        "kernel",
        "ncclDevKernel_SendRecv",
        700,
        200,
        tid=8,
        **{"Process Group Name": "14", "Process Group Description": PIPELINE},
    ),
]


def test_communication_of_a_device_counts_where_nothing_hides_it(tmp_path):
    write(tmp_path, CUDA, groups=[{"pg_name": "12", "pg_desc": TENSOR}])
    (found,) = analyse_traces(tmp_path)
    assert found.device == "cuda"
    assert found.compute == pytest.approx(0.3)
    assert found.waiting == {PIPELINE: pytest.approx(0.2), TENSOR: pytest.approx(0.2)}
    assert found.idle == pytest.approx(0.2)
    assert found.bubble == pytest.approx(2 / 9)
    assert found.top[0].name == "ncclDevKernel_AllReduce"


def test_a_trace_of_kernels_alone_is_one_step(tmp_path):
    write(tmp_path, CUDA[1:])
    (found,) = analyse_traces(tmp_path)
    assert found.step == pytest.approx(0.8)


def test_ranks_are_printed_in_order_and_as_data(tmp_path, capsys):
    for rank in (1, 0):
        write(tmp_path, CPU, rank=rank)
    assert main(["analyse", str(tmp_path), "--top", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("rank 0 (cpu), 2 steps of 1.00 ms") < printed.index("rank 1 (cpu)")
    assert f"waiting {PIPELINE} 0.15 ms" in printed
    assert main(["analyse", str(tmp_path), "--json"]) == 0
    assert [one["rank"] for one in json.loads(capsys.readouterr().out)] == [0, 1]


def test_a_trace_without_names_of_waits_says_so(tmp_path, capsys):
    write(tmp_path, CPU[:3])
    main(["analyse", str(tmp_path)])
    assert "--profile-level level1 names them by group" in capsys.readouterr().out


def test_an_empty_and_a_missing_folder_are_refused(tmp_path, capsys):
    assert main(["analyse", str(tmp_path)]) == 1
    assert "holds no *.pt.trace.json.gz" in capsys.readouterr().err
    assert main(["analyse", str(tmp_path / "nowhere")]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_a_truncated_trace_is_refused(tmp_path):
    write(tmp_path, CPU)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cut short"):
        analyse_traces(tmp_path)


@pytest.mark.parametrize("content", [b"no trace", b"[]", b'{"other": 1}', b'{"traceEvents": 3}'])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "rank00000_steps1-3.pt.trace.json").write_bytes(content)
    with pytest.raises(UserError, match="is no trace of torch's profiler"):
        analyse_traces(tmp_path)


def test_a_trace_without_a_step_is_refused(tmp_path):
    write(tmp_path, CPU[2:])
    with pytest.raises(UserError, match="has no recorded step"):
        analyse_traces(tmp_path)


def npu_record(folder, analysed):
    record = folder / "rank00000_20260101_ascend_pt"
    record.mkdir(parents=True)
    if analysed:
        (record / "ASCEND_PROFILER_OUTPUT").mkdir()


def test_records_of_npus_are_handed_to_their_program(tmp_path, monkeypatch):
    npu_record(tmp_path / "traces", analysed=True)
    program = tmp_path / "bin" / "msprof-analyze"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert main(["analyse", str(tmp_path / "traces")]) == 0
    assert (tmp_path / "called").read_text(encoding="utf-8").strip() == f"-m all -d {tmp_path}/traces"


def test_records_of_npus_need_their_program_and_an_analysis(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    npu_record(tmp_path / "raw", analysed=False)
    assert main(["analyse", str(tmp_path / "raw")]) == 1
    assert "is not analysed yet" in capsys.readouterr().err
    npu_record(tmp_path / "done", analysed=True)
    assert main(["analyse", str(tmp_path / "done")]) == 1
    assert "pip install msprof-analyze" in capsys.readouterr().err


def test_the_program_loads_no_torch():
    code = (
        "import sys, mindspeed_profile.command, mindspeed_profile.trace_analysis, "
        "mindspeed_profile.dump_comparison; print({'torch', 'megatron'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
