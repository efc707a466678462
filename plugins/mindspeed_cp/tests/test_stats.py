"""Tokens, work and bytes of ranks, without torch."""

import json
import subprocess
import sys

from mindspeed_core.activation import prepare
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train.loop import train

FLAGS = training_flags(("--context-parallel-size", "4", "--hidden-dropout", "0"), 1)


def stats_of(*flags):
    code = (
        "import sys; from mindspeed_cp.stats_command import program; "
        "program(sys.argv[1:], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "stats", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_volume_of_a_ring_is_the_formula():
    ranks = json.loads(stats_of("--json", "--", *FLAGS))
    # 32 tokens, 4 heads of width 16, one sample, float32.
    keys = 8 * 4 * 16 * 4
    assert [rank["tokens"] for rank in ranks] == [8] * 4
    assert sum(rank["pairs"] for rank in ranks) == 32 * 33 // 2
    assert {rank["sent"] for rank in ranks} == {6 * 3 * keys}


def test_work_and_bytes_of_documents_are_a_table():
    text = stats_of("--documents", "8", "--", *FLAGS, "--context-parallel-algo", "kvallgather_cp_algo")
    assert "largest work over the mean: 1.000" in text
    assert "bytes of all ranks in one layer: 0" in text


def trained(folder):
    flags = [
        "--context-parallel-size",
        "2",
        "--hidden-dropout",
        "0",
        "--run-dir",
        folder,
        "--cp-log-counters",
    ]
    session = prepare(training_flags(flags, 1), platform="cpu", host="standalone")
    with session:
        train(session)


def test_a_training_logs_what_was_announced(tmp_path):
    run_world(trained, 2, str(tmp_path))
    (row,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    announced = json.loads(stats_of("--json", "--", *FLAGS, "--context-parallel-size", "2"))
    layers_and_samples = 4 * 4
    assert row["cp p2p MiB"] * 2**20 == announced[0]["sent"] * layers_and_samples
    assert (
        row["cp scores"] == row["cp scores of the busiest rank"] == announced[0]["pairs"] * layers_and_samples
    )
