"""What ranks own, compute and send, told without torch."""

import json
import subprocess
import sys

from mindspeed_core.testing.model_flags import training_flags

FLAGS = training_flags(("--context-parallel-size", "4", "--hidden-dropout", "0"), 1)


def told(*flags):
    code = (
        "import sys; from mindspeed_cp.stats_command import program; "
        "program(sys.argv[1:], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "stats", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_volume_of_a_ring_is_the_formula():
    ranks = json.loads(told("--json", "--", *FLAGS))
    # 32 tokens, 4 heads of width 16, one sample, float32.
    keys = 8 * 4 * 16 * 4
    assert [rank["tokens"] for rank in ranks] == [8] * 4
    assert sum(rank["pairs"] for rank in ranks) == 32 * 33 // 2
    assert {rank["sent"] for rank in ranks} == {6 * 3 * keys}


def test_work_and_bytes_of_documents_are_a_table():
    text = told("--documents", "8", "--", *FLAGS, "--context-parallel-algo", "kvallgather_cp_algo")
    assert "largest work over the mean: 1.000" in text
    assert "bytes of all ranks in one layer: 0" in text
