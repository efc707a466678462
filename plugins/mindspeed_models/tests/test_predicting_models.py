"""DeepSeek-V3's module that predicts a token further on: weights, logits and loss."""

import pytest
import torch
from loaded_logits import predictions_of
from predicting_models import LAYERS, make_predicting
from safetensors.torch import load_file
from test_families_logits import BOUND, PP2, SP
from test_weights_round_trip import call, digests

from mindspeed_models.weights.mcore_files import McoreFiles
from mindspeed_testing import run_world


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicting") / "hf"
    make_predicting(folder)
    return folder


@pytest.fixture(scope="module")
def converted(model):
    target = model.parent / "mc"
    call("convert", "--input-model-dir", model, "--output-model-dir", target)
    return target


def far(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.thorough
def test_predictions_are_those_of_a_plain_computation(model):
    ((found,),) = run_world(predictions_of, 1, [(str(model), [])])
    logits, further, loss = found
    reference = torch.load(model / "reference.pt")
    assert far(logits, reference["logits"]) <= BOUND
    assert far(further, reference["further"]) <= BOUND
    assert loss == pytest.approx(reference["loss"], rel=1e-5)


@pytest.mark.thorough
def test_predictions_are_the_same_on_two_ranks_and_from_a_checkpoint(model, converted):
    given = ["--model-config", str(model), "--pretrained-checkpoint", str(converted)]
    reference = torch.load(model / "reference.pt")
    for layout, load in ((SP, []), (PP2, []), (SP, given)):
        results = run_world(predictions_of, 2, [(str(model), [*layout, *load])])
        (found, *_) = [each for (each,) in results if each is not None]
        assert far(found[0], reference["logits"]) <= BOUND, layout
        assert far(found[1], reference["further"]) <= BOUND, layout


def test_weights_of_predictions_are_converted_and_come_back(model, converted, tmp_path):
    source = load_file(model / "model.safetensors")
    prefix = f"model.layers.{LAYERS}."
    plain = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    inside = {
        "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
        "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
        "mlp.router": "mlp.gate",
        "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
    }
    with McoreFiles(converted) as files:

        def read(key):
            shape = files.shape(key, key)
            return files.read(key, key, [0] * len(shape), shape)

        for key, name in plain.items():
            assert torch.equal(read(f"mtp.layers.0.{key}.weight"), source[f"{prefix}{name}.weight"])
        for key, name in inside.items():
            found = read(f"mtp.layers.0.transformer_layer.{key}.weight")
            assert torch.equal(found, source[f"{prefix}{name}.weight"])
        experts = read("mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight")
        parts = [source[f"{prefix}mlp.experts.2.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(experts[2], torch.cat(parts))
    call("export", "--load", converted, "--output-model-dir", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(model)
