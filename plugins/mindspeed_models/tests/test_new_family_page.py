"""The family that the page adds in one file loads, converts and comes back."""

import json
import re
from importlib.resources import files

import torch
from safetensors.torch import load_file

from mindspeed_models.extension_points import check_recipe
from mindspeed_models.weights.convert import Conversion, convert
from mindspeed_models.weights.export import Export, export
from mindspeed_testing.small_llama import tensors_of, write_safetensors

PAGE = files("mindspeed_models").joinpath("docs/new-family.md").read_text(encoding="utf-8")


def family():
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
    names = {}
    exec(compile(code, "new-family.md", "exec"), names)
    return names["ACME"]


def renamed(config):
    """The weights of a small LLaMA under the names of the page's family."""
    llama = tensors_of({**config, "rms_norm_eps": 1e-6})
    found = {
        "net.tokens.weight": llama["model.embed_tokens.weight"],
        "net.norm.weight": llama["model.norm.weight"],
        "head.weight": llama["lm_head.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.", f"net.blocks.{layer}."
        parts = [llama[f"{old}self_attn.{each}_proj.weight"] for each in "qkv"]
        found[new + "qkv.weight"] = torch.cat(parts)
        found[new + "out.weight"] = llama[old + "self_attn.o_proj.weight"]
        found[new + "norm_1.weight"] = llama[old + "input_layernorm.weight"]
        found[new + "norm_2.weight"] = llama[old + "post_attention_layernorm.weight"]
        found |= {
            f"{new}{each}.weight": llama[f"{old}mlp.{each}_proj.weight"] for each in ("gate", "up", "down")
        }
    return found


def test_its_weights_go_there_and_back(tmp_path):
    acme = family()
    check_recipe(acme)
    plan = acme.make_plan(acme.sizes["small"])
    config = acme.config(plan)
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    write_safetensors(source / "model.safetensors", renamed(acme.sizes["small"]))
    convert(Conversion(source, tmp_path / "mc", acme, plan))
    export(Export(tmp_path / "mc", tmp_path / "back", acme, plan, config))
    expected, found = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
