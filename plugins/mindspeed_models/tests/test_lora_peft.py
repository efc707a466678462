"""Adapters to peft and from peft, and merged into their base; peft and transformers are the judges."""

import json
import shutil
from pathlib import Path

import peft_runs as runs
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make

from mindspeed_core.errors import UserError
from mindspeed_models.lora.peft_files import read_config
from mindspeed_models.program import main
from mindspeed_testing import run_world

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(16).reshape(1, 16) * 3 % 96
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def model_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # A wrong mapping is to be seen: matrices five times as large, others around one.
            parameter.mul_(5) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("hf") / "base"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained_by_peft(base, tmp_path_factory):
    """Directories of peft, each with the logits that peft computes."""
    found = {}
    for name, more in {"plain": {}, "rank stabilized": {"use_rslora": True}}.items():
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=MODULES, init_lora_weights=False, task_type="CAUSAL_LM", **more
        )
        model = peft.get_peft_model(model_of(base), config).eval()
        folder = tmp_path_factory.mktemp("peft") / name.replace(" ", "-")
        model.save_pretrained(folder)
        found[name] = str(folder), logits_of(model)
    return found


@pytest.mark.parametrize("layout", [(), TP2], ids=["tp1", "tp2"])
def test_adapters_of_peft_compute_the_same_here(base, trained_by_peft, layout):
    folders = {name: folder for name, (folder, _) in trained_by_peft.items()}
    (found, *_) = run_world(runs.from_peft, 2 if layout else 1, str(base), folders, IDS, *layout)
    plain = logits_of(model_of(base))
    for name, (_, expected) in trained_by_peft.items():
        assert float((expected - plain).abs().max()) > 0.1
        assert float((found[name] - expected).abs().max()) < 1e-5 * float(expected.abs().max()) + 1e-5


@pytest.fixture(scope="module")
def for_peft(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (found,) = run_world(runs.to_peft, 1, str(base), str(folder), IDS)
    return folder, found


def test_peft_computes_what_was_trained_here(base, for_peft):
    folder, found = for_peft
    assert found["export"] == 0
    model = peft.PeftModel.from_pretrained(model_of(base), folder / "peft").eval()
    expected = found["trained"]
    assert float((expected - logits_of(model_of(base))).abs().max()) > 1e-3
    assert float((logits_of(model) - expected).abs().max()) < 1e-5 * float(expected.abs().max()) + 1e-5


def test_what_is_exported_is_read_back_with_its_rank(base, for_peft):
    folder, found = for_peft
    (read,) = run_world(runs.from_peft, 1, str(base), {"own": str(folder / "peft")}, IDS)
    assert float((read["own"] - found["trained"]).abs().max()) < 1e-5


def test_merged_weights_compute_the_same(for_peft):
    folder, found = for_peft
    assert found["merge"] == 0
    merged = logits_of(model_of(folder / "merged"))
    assert float((merged - found["trained"]).abs().max()) < 1e-5 * float(merged.abs().max()) + 1e-5


def test_what_has_no_adapter_is_the_bases_to_the_bit(base, for_peft):
    folder, _ = for_peft
    before, after = (load_file(place / "model.safetensors") for place in (base, folder / "merged"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.split(".")[-2] not in MODULES}
    assert (folder / "merged" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def said(capsys, *command):
    capsys.readouterr()
    status = main(list(map(str, command)))
    return status, capsys.readouterr().err


def test_another_base_is_refused_when_merging(base, for_peft, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    command = (
        "merge-lora",
        "--load",
        other,
        "--lora-load",
        for_peft[0] / "adapter",
        "--save",
        tmp_path / "out",
    )
    status, text = said(capsys, *command)
    assert status == 1
    assert "were trained beside weights" in text
    assert not (tmp_path / "out").exists()
    assert said(capsys, *command, "--any-base")[0] == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_dora": True}, "use_dora True: DoRA"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not LORA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"target_modules": "all-linear"}, "target_modules 'all-linear'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": 0}, "r 0"),
    ],
)
def test_adapters_of_another_kind_are_refused(trained_by_peft, tmp_path, change, text):
    folder = tmp_path / "changed"
    shutil.copytree(trained_by_peft["plain"][0], folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError) as caught:
        read_config(folder)
    assert text in str(caught.value)


def test_a_pickle_is_not_read(trained_by_peft, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(trained_by_peft["plain"][0], folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model\.bin is a pickle"):
        read_config(folder)


def test_a_truncated_adapter_is_named(base, trained_by_peft, tmp_path, capsys):
    folder = tmp_path / "truncated"
    shutil.copytree(trained_by_peft["plain"][0], folder)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, text = said(
        capsys, "merge-lora", "--load", base, "--lora-load", folder, "--save", tmp_path / "out"
    )
    assert status == 1
    assert "adapter_model.safetensors: cannot be read" in text


@pytest.mark.thorough
def test_adapters_merge_into_a_checkpoint(base, tmp_path):
    model = ("--model-config", str(base))
    (found,) = run_world(runs.merged_checkpoint, 1, Path(tmp_path), *model)
    assert found["said"] == 0
    assert (
        float((found["merged"] - found["beside"]).abs().max())
        < 1e-5 * float(found["beside"].abs().max()) + 1e-5
    )


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [(), TP2], ids=["tp1", "tp2"])
def test_adapters_of_latent_attention_compute_as_in_peft(tmp_path, layout):
    base = tmp_path / "base"
    make("deepseek-v3", base)
    plain = logits_of(model_of(base))
    targets = ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"]
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model_of(base), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    expected = logits_of(model)
    flags = ("--lora-target-modules", *targets, *layout)
    ranks = 2 if layout else 1
    (found, *_) = run_world(runs.from_peft, ranks, str(base), {"it": str(tmp_path / "adapter")}, IDS, *flags)
    assert float((expected - plain).abs().max()) > 0.1
    assert float((found["it"] - expected).abs().max()) < 2e-5 * float(expected.abs().max())
