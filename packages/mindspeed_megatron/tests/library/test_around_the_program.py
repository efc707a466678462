"""A session in a program of its own: in any order with imports and torch.distributed, silent, traceless."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_testing import run_world

BEFORE = """
import json, logging, os, random, sys, warnings
sys.argv = ["train.py", "--their-own", "--use-flash-attn", "no"]
def state():
    own = [text for text in map(str, warnings.filters) if "mindspeed" in text]
    return [len(logging.getLogger().handlers), logging.getLogger().level, own, os.getcwd(),
            random.getstate()[1][:3]]
"""

TRAINING = """
def train(session, torch, config):
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = session.config(config)
    spec = session.layer_spec(config)
    model = session.model(GPTModel(config, spec, 64, 16, position_embedding_type="rope"))
    tokens = torch.arange(32).reshape(2, 16)
    losses = model(tokens, torch.arange(16).expand(2, 16), None, labels=tokens)
    losses.mean().backward()
    return float(losses.mean())

def make_config(torch):
    from megatron.core.transformer import TransformerConfig
    return TransformerConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )

def initialize(torch):
    from megatron.core import parallel_state
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()

def ours():
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "megatron") and module is not None:
            for key, value in list(vars(module).items()):
                if str(getattr(value, "__module__", "")).startswith("mindspeed"):
                    found.append(name + ":" + key)
    return found

FLAGS = {"use_fused_rmsnorm": True, "use_fused_swiglu": True, "use_flash_attn": True}
"""

MEGATRON_FIRST = """
import torch
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel
from mindspeed_testing.leak_check import ProcessState
config = make_config(torch)
initialize(torch)
plain, before, generator = state(), ProcessState.now(), torch.get_rng_state()
from mindspeed_core import activate
session = activate(FLAGS, configs=[config], platform="cpu")
quiet = state() == plain and torch.equal(torch.get_rng_state(), generator)
loss = train(session, torch, config)
session.close()
left = [text for text in ProcessState.now().left_since(before) if "NVTE_" not in text]
"""

SESSION_FIRST = """
import torch
from mindspeed_testing.leak_check import ProcessState
plain, before, generator = state(), ProcessState.now(), torch.get_rng_state()
assert "megatron.core" not in sys.modules
from mindspeed_core import activate
session = activate({**FLAGS, "normalization": "RMSNorm", "swiglu": True}, platform="cpu")
quiet = state() == plain and torch.equal(torch.get_rng_state(), generator)
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel
initialize(torch)
loss = train(session, torch, make_config(torch))
session.close()
left = [text for text in ProcessState.now().left_since(before) if "NVTE_" not in text]
"""

REPORT = """
print(json.dumps({"quiet": quiet, "loss": loss, "left": left, "ours": ours(), "names": session.plan.names}))
"""

WITHOUT = """
import torch
from mindspeed_testing.leak_check import ProcessState
before = ProcessState.now()
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel
print(json.dumps(ProcessState.now().left_since(before)))
"""


PROGRAMS = {
    "megatron first": MEGATRON_FIRST + REPORT,
    "session first": SESSION_FIRST + REPORT,
    "without a session": WITHOUT,
}


@pytest.fixture(scope="module")
def programs():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", BEFORE + TRAINING + body],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, body in PROGRAMS.items()
    }
    found = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
        found[name] = (out, err)
    return found


@pytest.mark.parametrize("order", ["megatron first", "session first"])
def test_nothing_of_torch_and_megatron_differs_after_the_session(programs, order):
    found = json.loads(programs[order][0])
    # Importing megatron-core makes torch complete itself, with and without a session.
    by_imports = json.loads(programs["without a session"][0]) if order == "session first" else []
    assert set(found["left"]) - set(by_imports) == set()
    assert found["ours"] == []


@pytest.mark.parametrize("order", ["megatron first", "session first"])
def test_opening_prints_seeds_and_configures_nothing_and_reads_no_command_line(programs, order):
    out, err = programs[order]
    found = json.loads(out)
    assert len(out.splitlines()) == 1
    assert "mindspeed" not in err
    assert found["quiet"]
    assert found["names"] == ["flash-attn", "fused-rmsnorm", "fused-swiglu"]


def test_the_order_makes_no_difference_to_the_model(programs):
    first, second = (json.loads(programs[order][0]) for order in ("megatron first", "session first"))
    assert first["loss"] == second["loss"]


def run_example(path):
    """Run a script as a program, in the environment that a launcher gives its ranks."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


EXAMPLES = sorted((Path(__file__).resolve().parents[4] / "examples" / "library").glob("*.py"))
RANKS = {"split_sequences.py": 2}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs_and_its_assertions_hold(path):
    printed = run_world(run_example, RANKS.get(path.name, 1), str(path))
    assert printed[0].strip()


def test_the_plain_script_trains_the_same_on_two_processes():
    path = next(path for path in EXAMPLES if path.name == "plain_megatron_core.py")
    (alone,), (two, _) = (run_world(run_example, ranks, str(path)) for ranks in (1, 2))
    first = [line.split(":")[1].split("->")[0].strip() for line in (alone + two).splitlines()]
    assert first[0] == first[2], "with cpu initialization the weights do not depend on the layout"
