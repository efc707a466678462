"""Files that are damaged, incomplete, of another model or unsafe: one sentence each, and nothing lost."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_core.errors import UserError
from mindspeed_models.config_file import read_config
from mindspeed_models.families import family_of
from mindspeed_models.weights.convert import Conversion, convert
from mindspeed_models.weights.export import Export, export
from mindspeed_models.weights.hf_files import HfFiles
from mindspeed_models.weights.reader import TableReader
from mindspeed_testing.small_llama import write_small_llama


@pytest.fixture
def model(tmp_path):
    return write_small_llama(tmp_path / "hf")


def open_model(folder, **options):
    config = read_config(folder)
    recipe = family_of(config)
    plan = recipe.make_plan(config)
    return TableReader(HfFiles(folder), recipe, plan, plan, **options)


def conversion(source, target, **options):
    recipe = family_of(read_config(source))
    return Conversion(source, target, recipe, recipe.make_plan(read_config(source)), **options)


def back(source, target, **options):
    config = read_config(source / "iter_0000000/hf")
    recipe = family_of(config)
    return export(Export(source, target, recipe, recipe.make_plan(config), config, **options))


def refusal(action, *arguments, **options):
    with pytest.raises(UserError) as error:
        action(*arguments, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


def change(folder, function):
    tensors = load_file(folder / "model.safetensors")
    function(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_unused_tensors_are_all_named(model):
    change(
        model, lambda t: (t.pop("model.norm.weight"), t.pop("lm_head.weight"), t.update(extra=torch.ones(2)))
    )
    text = refusal(open_model, model)
    assert "2 tensors are missing: lm_head.weight, model.norm.weight" in text
    assert "1 tensors belong to no part of the model: extra" in text


def test_a_tensor_of_another_size_is_named(model):
    change(model, lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(12, 32)}))
    assert "k_proj" in refusal(open_model, model)


def test_a_truncated_file_is_named(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    text = refusal(open_model, model)
    assert "model.safetensors" in text
    assert "truncated" in text
    path.write_bytes(b"\x01")
    assert "truncated" in refusal(open_model, model)


def test_shards_and_their_index_have_to_agree(model):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = list(tensors)
    for number, part in enumerate((names[:10], names[10:]), 1):
        save_file({name: tensors[name] for name in part}, model / f"model-0000{number}-of-00002.safetensors")
    homes = {name: f"model-0000{1 + (name in names[10:])}-of-00002.safetensors" for name in names}
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    assert open_model(model).shape("decoder.final_layernorm.weight") == (32,)
    index.write_text(json.dumps({"weight_map": {**homes, "ghost": "model-00001-of-00002.safetensors"}}))
    assert "ghost" in refusal(open_model, model)
    index.write_text(json.dumps({"weight_map": {**homes, "ghost": "model-3.safetensors"}}))
    assert "model-3.safetensors" in refusal(open_model, model)
    index.write_text("{")
    assert "no index of weights" in refusal(open_model, model)


def test_a_folder_without_weights_or_configuration_is_named(tmp_path):
    assert "is no folder" in refusal(HfFiles, tmp_path / "nothing")
    assert "holds no weights" in refusal(HfFiles, tmp_path)
    assert "config.json" in refusal(read_config, tmp_path)


def test_remote_code_is_never_run_and_its_family_has_to_be_named():
    text = refusal(family_of, {"model_type": "mystery", "auto_map": {"AutoModel": "x.Y"}})
    assert "auto_map) is never run" in text
    assert "--model" in text


def test_weights_without_safetensors_are_read_and_nothing_else_in_a_pickle(model):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    reader = open_model(model)
    assert torch.equal(reader.read("output_layer.weight", (5, 0), (3, 32)), tensors["lm_head.weight"][5:8])

    class Attack:
        def __reduce__(self):
            return (Path.touch, (model / "ran",))

    torch.save({"x": Attack()}, model / "pytorch_model.bin")
    assert "nothing in it was run" in refusal(HfFiles, model)
    assert not (model / "ran").exists()


def test_a_tied_output_layer_that_differs_is_refused(tmp_path):
    folder = write_small_llama(tmp_path / "tied", tie_word_embeddings=True)
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    assert "lm_head.weight" in refusal(open_model(folder).check_repeats)
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    open_model(folder).check_repeats()


def test_numbers_in_eight_bits_need_their_scales(model):
    name = "model.layers.0.mlp.down_proj.weight"
    whole = load_file(model / "model.safetensors")[name]
    quantized = (whole / 0.5).to(torch.float8_e4m3fn)
    change(model, lambda t: t.update({name: quantized}))
    reader = open_model(model)
    key = "decoder.layers.0.mlp.linear_fc2.weight"
    assert "no scales" in refusal(reader.read, key, (0, 0), (32, 48))
    change(model, lambda t: t.update({name + "_scale_inv": torch.full((1, 1), 0.5)}))
    reader = open_model(model)
    assert reader.dtype(key) == torch.bfloat16
    expected = (quantized.float() * 0.5).to(torch.bfloat16)
    assert torch.equal(reader.read(key, (0, 0), (32, 48)), expected)
    assert torch.equal(reader.read(key, (7, 5), (9, 20)), expected[7:16, 5:25])


def test_blocks_of_scales_are_cut_where_rows_and_columns_are(tmp_path):
    weight = torch.randn(300, 260).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3)
    save_file({"w": weight, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    files = HfFiles(tmp_path)
    factor = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :260]
    expected = (weight.float() * factor).to(torch.bfloat16)
    assert torch.equal(files.read("w"), expected)
    assert torch.equal(files.read("w", (100, 290), (120, 257)), expected[100:290, 120:257])
    assert list(files.names()) == ["w"]


def test_a_rank_reads_the_bytes_of_its_share_alone(model):
    reader = open_model(model)
    for key in reader.keys:
        reader.read(key, tuple(0 for _ in reader.shape(key)), reader.shape(key))
    total = sum(t.numel() * 4 for t in load_file(model / "model.safetensors").values())
    assert reader.files.bytes_read == total
    before = reader.files.bytes_read
    reader.read("decoder.layers.0.mlp.linear_fc2.weight", (0, 24), (32, 24))
    reader.read("decoder.layers.0.mlp.linear_fc1.weight", (24, 0), (48, 32))
    assert reader.files.bytes_read - before == 4 * (32 * 24 + 48 * 32)


def test_added_tokens_begin_as_the_mean_of_all_others(model):
    reader = open_model(model, added_tokens=3)
    weight = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    rows = reader.read("embedding.word_embeddings.weight", (248, 0), (8, 32))
    assert torch.equal(rows[:2], weight[248:])
    torch.testing.assert_close(rows[2:5], weight.mean(0).expand(3, 32))
    assert not rows[5:].any()


def test_unfinished_work_on_other_files_is_not_continued(model, tmp_path):
    target = tmp_path / "out"
    work = target / ".converting"
    work.mkdir(parents=True)
    (work / "work.json").write_text("{}")
    assert "--resume" in refusal(convert, conversion(model, target, resume=True))
    assert convert(conversion(model, target)).is_dir()
    assert not work.exists()


def test_a_conversion_that_is_finished_is_finished_and_no_other_one(model, tmp_path):
    target = tmp_path / "out"
    convert(conversion(model, target))
    said = []
    assert convert(conversion(model, target, resume=True, say=said.append)) == target / "iter_0000000"
    assert said == [f"{target / 'iter_0000000'}: finished earlier"]
    other = conversion(model, target, resume=True, dtype=torch.bfloat16)
    assert "holds a checkpoint already" in refusal(convert, other)


def test_an_existing_checkpoint_or_folder_is_never_overwritten(model, tmp_path):
    target = tmp_path / "out"
    convert(conversion(model, target))
    assert "holds a checkpoint already" in refusal(convert, conversion(model, target))
    (tmp_path / "there").mkdir()
    assert "exists already" in refusal(back, target, tmp_path / "there")


def test_workers_and_sizes_of_files_change_no_tensor(model, tmp_path):
    convert(conversion(model, tmp_path / "out", workers=3, chunk_bytes=1000))
    back(tmp_path / "out", tmp_path / "back", shard_bytes=20_000, workers=2)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    found = {
        name: tensor
        for path in (tmp_path / "back").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    expected = load_file(model / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in expected.values())
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_of_another_model_is_not_exported(model, tmp_path):
    convert(conversion(model, tmp_path / "out"))
    config = {**read_config(model), "num_hidden_layers": 5}
    recipe = family_of(config)
    text = refusal(export, Export(tmp_path / "out", tmp_path / "x", recipe, recipe.make_plan(config), config))
    assert "missing: decoder.layers.4." in text
    assert not (tmp_path / "x").exists()
