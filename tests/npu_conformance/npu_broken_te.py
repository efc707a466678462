"""Latent attention on a value device beside a TransformerEngine that is installed and cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mindspeed_testing.model_flags import training_flags

LATENT = (
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *("--v-head-dim", "12", "--position-embedding-type", "rope", "--num-layers", "1"),
)
RANK = """
import json, sys

from mindspeed_megatron.broken_packages import take_broken_as_absent

take_broken_as_absent()

from mindspeed_testing.training import SideRequest
from mindspeed_testing.npu.value_training import value_rank

record, operations, _ = value_rank(SideRequest(json.loads(sys.argv[1]), 2, platform="npu"), "910B")
print(json.dumps({"losses": [step["lm loss"] for step in record.losses], "operations": len(operations)}))
"""


@pytest.mark.parametrize(
    "place", ["__init__.py", pytest.param("pytorch/__init__.py", marks=pytest.mark.thorough)]
)
def test_one_rank_trains(place, tmp_path):
    for name in ("__init__.py", place):
        path = tmp_path / "transformer_engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "raise OSError('libcudart.so.12: cannot open shared object file')\n" * (name == place)
        )
    info = tmp_path / "transformer_engine-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.13.0\n")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", RANK, json.dumps(training_flags(LATENT, 3))],
        env={**os.environ, **alone, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(told["losses"]) == 2
    assert told["losses"][1] < told["losses"][0]
