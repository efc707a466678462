"""Weights go through a checkpoint of megatron-core and come back as the same bytes, tensor by tensor."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from loaded_logits import logits_of, plainly_loaded, started_twice
from safetensors import safe_open
from test_families_logits import PP2, SP, difference
from tiny_models import MODELS, make

from mindspeed_models.program import program
from mindspeed_testing import run_world
from mindspeed_testing.small_llama import write_small_llama

FEW = ("qwen3-moe",)
LATER = [name for name in MODELS if name not in FEW]
EVERY = [*FEW, *(pytest.param(name, marks=pytest.mark.thorough) for name in LATER)]


def digests(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                tensor = file.get_tensor(name)
                kind = (str(tensor.dtype), tuple(tensor.shape))
                content = tensor.contiguous().view(-1).numpy().tobytes()
                found[name] = (*kind, hashlib.sha256(content).hexdigest())
    return found


def call(*arguments):
    done = CliRunner().invoke(program, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")
    known = {}

    def of(name):
        if name not in known:
            make(name, root / name)
            call("convert", "--input-model-dir", root / name, "--output-model-dir", root / f"{name}-mc")
            known[name] = (root / name, root / f"{name}-mc")
        return known[name]

    return of


@pytest.mark.parametrize("name", EVERY)
def test_an_export_has_the_bytes_that_were_converted(converted, tmp_path, name):
    source, target = converted(name)
    call("export", "--load", target, "--output-model-dir", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize("name", EVERY)
def test_a_converted_checkpoint_gives_the_same_logits_in_other_layouts(converted, name):
    source, target = converted(name)
    model = ["--model-config", str(source), "--pretrained-checkpoint", str(target)]
    cases = [(str(source), [*model, *layout]) for layout in (SP, PP2)]
    for found in zip(*run_world(logits_of, 2, cases, False)):
        assert difference(source, found) <= 2e-5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "flags", "missing"),
    [
        ("gemma", ["--swiglu"], ["gated-gelu", "--geglu", "scaled-embedding", "--scale-embedding"]),
        ("bloom", [], ["alibi", "--position-embedding-type alibi", "embed-layernorm", "--embed-layernorm"]),
        ("internlm", [], ["attention-bias", "--row-col-parallel-linear-bias"]),
    ],
)
def test_a_converted_checkpoint_is_refused_without_what_its_model_needs(converted, name, flags, missing):
    source, target = converted(name)
    sizes = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "250"]
    load = ["--pretrained-checkpoint", str(target), *sizes, *flags]
    ((said,),) = run_world(logits_of, 1, [(str(source), load)], False)
    assert isinstance(said, str), said
    assert "the checkpoint needs other features" in said
    assert all(each in said for each in missing), said


@pytest.mark.parametrize("name", EVERY)
def test_megatron_core_alone_loads_a_converted_checkpoint(converted, name):
    source, target = converted(name)
    ((wrong, said),) = run_world(plainly_loaded, 1, str(source), str(target))
    assert wrong == []
    assert f"iteration 0, loaded {source}" in said
    assert f"checkpoint version 3.0, layers {4}" in said
    assert not any("scratch" in text for text in said)
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "release"


@pytest.mark.parametrize(
    "name", ["qwen3-moe", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("llama3", "qwen2"))]
)
def test_a_plain_model_of_megatron_core_gives_the_same_logits(converted, name):
    script = Path(__file__).parent / "plain_megatron.py"
    command = [sys.executable, str(script), *map(str, converted(name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ours"] == []
    assert found["difference"] <= 2e-5


def test_a_run_that_has_saved_is_not_begun_again_by_the_same_command(tmp_path):
    folder = str(write_small_llama(tmp_path / "hf"))
    first, again, resumed, over = run_world(started_twice, 1, folder, str(tmp_path / "saved"))[0]
    assert first == f"0 {folder}"
    assert "--start-over" in again
    assert "holds step 1" in again
    assert resumed.startswith("1 ")
    assert over == f"0 {folder}"
