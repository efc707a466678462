"""MindSpeed's flags of automatic tuning in whole programs: mindspeed-train, and a script of Megatron-LM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SPACE = """
[flags]
"--tensor-model-parallel-size" = [1, 2]
"--pipeline-model-parallel-size" = [1]
"--micro-batch-size" = [1]
"--recompute-granularity" = [false]
"--use-distributed-optimizer" = [false]
"--overlap-grad-reduce" = [false]
"""
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0"
).split()
DATA = "--mock-data --vocab-size 64 --position-embedding-type rope".split()
TRAIN = [*MODEL, *DATA, "--platform", "cpu", "--log-interval", "1"]
SEARCHING = "--auto-settings --nnodes 1 --nproc-per-node 2 --tune-hardware h100 --tune-trials 1".split()
MADE_UP = Path(__file__).resolve().parents[3] / "packages/mindspeed_megatron/tests/megatron_lm_host/fake"
"""A package that has Megatron-LM's names, and a script of its form."""


def ended(folder, program, flags):
    space = folder / "space.toml"
    space.write_text(SPACE)
    options = [*SEARCHING, "--tune-space", str(space), "--auto-settings-work-dir", str(folder / "found")]
    told = os.environ.get("PYTHONPATH")
    found = subprocess.run(
        [sys.executable, *program, *flags, *options],
        env={
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
            "PYTHONPATH": os.pathsep.join([str(MADE_UP), *([told] if told else [])]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
    report = json.loads((folder / "found" / "search.json").read_text())
    assert found.stdout.count("expected step") == min(3, len(report["top"]))
    return found, report


@pytest.mark.thorough
def test_a_training_searches_and_the_best_layout_is_started(tmp_path):
    program = ["-m", "mindspeed_core.train"]
    trained = tmp_path / "run"
    _, report = ended(tmp_path, program, [*TRAIN, "--auto-settings-launch", "--run-dir", str(trained)])
    assert report["start"].startswith("torchrun --nnodes 1 --nproc-per-node 2 -m mindspeed_core.train")
    assert "--auto-settings" not in report["start"]
    assert "--tune-hardware" not in report["start"]
    steps = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps] == [1, 2]


@pytest.mark.thorough
def test_a_script_of_megatron_lm_searches_for_its_own_command(tmp_path):
    text = (MADE_UP / "pretrain_fake.py").read_text()
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(
        text.replace("import torch\n", "import torch\nimport mindspeed_core.megatron_adaptor\n", 1)
    )
    found, report = ended(tmp_path, [str(script)], [*MODEL, *DATA, "--no-persist-layer-norm"])
    assert report["start"].startswith(f"torchrun --nnodes 1 --nproc-per-node 2 {script}")
    assert "lm loss" not in found.stdout
