"""Files of AscendSpeed's layout are written and read, and its two programs take their command lines."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from test_weights_round_trip import digests

from mindspeed_core.errors import DataError, UserError
from mindspeed_models.families import families
from mindspeed_models.program import program
from mindspeed_models.weights.legacy import LegacyLayout
from mindspeed_models.weights.legacy_commands import from_huggingface, when_tp_pp_change
from mindspeed_testing.small_llama import write_small_llama

SIZE = 4


def run(command, *arguments):
    done = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(command, *arguments):
    with pytest.raises(UserError) as error:
        CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
    return str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_llama(tmp_path_factory.mktemp("older") / "hf")


@pytest.mark.parametrize("merged", [[], ["--merge-mlp"]], ids=["apart", "merged"])
def test_files_of_each_rank_come_back_as_the_same_bytes(model, tmp_path, merged):
    layout = [
        "--tensor-model-parallel-size",
        2,
        "--pipeline-model-parallel-size",
        2,
        "--legacy-layout",
        *merged,
    ]
    run(from_huggingface, "--input-model-dir", model, "--output-model-dir", tmp_path / "old", *layout)
    ranks = sorted(path.name for path in (tmp_path / "old/release").iterdir())
    assert ranks == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    run(
        program, "export", "--load", tmp_path / "old", "--legacy-layout", "--model-config", model,
        "--output-model-dir", tmp_path / "back",
    )  # fmt: skip
    assert digests(tmp_path / "back") == digests(model)


def test_ranks_have_the_shapes_and_names_that_ascendspeed_loads(model, tmp_path):
    run(
        from_huggingface, "--input-model-dir", model, "--output-model-dir", tmp_path / "old",
        "--tensor-model-parallel-size", 2, "--legacy-layout",
    )  # fmt: skip
    state = torch.load(tmp_path / "old/release/mp_rank_01/model_optim_rng.pt", weights_only=True)
    language = state["model"]["language_model"]
    assert state["checkpoint_version"] == 3.0
    # Padded to a multiple of 128 x 2, of which this rank has a half.
    assert language["embedding"]["word_embeddings"]["weight"].shape == (128, 32)
    whole = load_file(model / "model.safetensors")
    key = language["encoder"]["layers.0.self_attention.query_key_value.weight"]
    assert torch.equal(key[8:12], whole["model.layers.0.self_attn.k_proj.weight"][8:12])
    assert torch.equal(
        language["encoder"]["layers.3.mlp.dense_4h_to_h.weight"],
        whole["model.layers.3.mlp.down_proj.weight"][:, 24:],
    )
    assert (tmp_path / "old/latest_checkpointed_iteration.txt").read_text() == "release"


def test_other_parallel_sizes_are_written_from_files_of_each_rank(model, tmp_path):
    source = ["--input-model-dir", model, "--output-model-dir", tmp_path / "old", "--legacy-layout"]
    run(from_huggingface, *source, "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    sizes = [
        "--num-layers",
        4,
        "--hidden-size",
        32,
        "--num-heads",
        8,
        "--num-kv-heads",
        4,
        "--orig-vocab-size",
        250,
    ]
    run(
        when_tp_pp_change, "--input-model-dir", tmp_path / "old/release",
        "--output-model-dir", tmp_path / "new",
        "--src-tensor-model-parallel-size", 2, "--src-pipeline-model-parallel-size", 2,
        "--tgt-tensor-model-parallel-size", 4, "--legacy-layout", *sizes,
    )  # fmt: skip
    run(
        when_tp_pp_change, "--input-model-dir", tmp_path / "new", "--output-model-dir", tmp_path / "any",
        "--src-tensor-model-parallel-size", 4, "--model-config", model,
    )  # fmt: skip
    run(program, "export", "--load", tmp_path / "any", "--output-model-dir", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(model)


def test_heads_that_older_converters_strided_are_put_in_order(model, tmp_path):
    run(
        from_huggingface,
        "--input-model-dir",
        model,
        "--output-model-dir",
        tmp_path / "old",
        "--legacy-layout",
        "--tensor-model-parallel-size",
        2,
    )
    for rank in range(2):
        path = tmp_path / f"old/release/mp_rank_{rank:02d}/model_optim_rng.pt"
        state = torch.load(path, weights_only=True)
        encoder = state["model"]["language_model"]["encoder"]
        for layer in range(4):
            name = f"layers.{layer}.self_attention.query_key_value.weight"
            blocks = encoder[name].reshape(2, 4, SIZE, 32).clone()
            heads = blocks[:, :2].reshape(4, SIZE, 32)
            # Group j of the rank gets the heads j, j + 2.
            blocks[:, :2] = torch.stack([heads[[0, 2]], heads[[1, 3]]])
            encoder[name] = blocks.reshape(-1, 32)
        torch.save(state, path)
    export = ["export", "--load", tmp_path / "old", "--legacy-layout", "--model-config", model]
    run(program, *export, "--output-model-dir", tmp_path / "wrong")
    run(program, *export, "--output-model-dir", tmp_path / "back", "--seed-gqa-order")
    assert digests(tmp_path / "wrong") != digests(model)
    assert digests(tmp_path / "back") == digests(model)


def test_the_command_line_of_the_readme_of_old_runs(model, tmp_path):
    line = (
        f"--input-model-dir {model} --output-model-dir {tmp_path / 'ckpt'} --tensor-model-parallel-size 1 "
        "--pipeline-model-parallel-size 1 --pse --use_wpack_rotray --load_weight_map --bias --merge-mlp "
        "--num_layers 4 --num_heads 8 --num_kv_heads 4 --hidden_size 32 --make-vocab-size-divisible-by 8"
    )
    assert "loads under every layout" in run(from_huggingface, *line.split())


def test_what_cannot_be_is_refused_in_one_sentence(model, tmp_path):
    given = ["--input-model-dir", model, "--output-model-dir", tmp_path / "x"]
    assert "--type 7B has --num-layers 32, the model has 4" in refused(
        from_huggingface, *given, "--type", "7B"
    )
    assert "--num-heads 16: the model has 8" in refused(from_huggingface, *given, "--num-heads", 16)
    legacy = [*given, "--legacy-layout"]
    assert "--pipeline-model-parallel-size 3" in refused(
        from_huggingface, *legacy, "--pipeline-model-parallel-size", 3
    )
    assert "key and value heads" in refused(from_huggingface, *legacy, "--tensor-model-parallel-size", 8)
    assert "mp_rank_*" in refused(when_tp_pp_change, "--input-model-dir", model, "--model-config", model)


BLOOM = {"n_layer": 3, "hidden_size": 32, "n_head": 4, "vocab_size": 250, "model_type": "bloom"}


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    """A small Bloom, whose files leave the prefix of names out as the published ones do."""
    folder = tmp_path_factory.mktemp("bloom") / "hf"
    folder.mkdir()
    recipe = families()["bloom"]
    generator = torch.Generator().manual_seed(3)
    rows = {"query_key_value": 96, "dense_h_to_4h": 128, "word_embeddings": 250}
    tensors = {}
    for entry in recipe.entries(recipe.make_plan(BLOOM)).values():
        (name,) = entry.sources
        module, kind = name.split(".")[-2:]
        columns = 128 if module == "dense_4h_to_h" else 32
        shape = (rows.get(module, 32), columns)
        whole = kind == "weight" and "norm" not in module and module != "ln_f"
        tensors[name.removeprefix("transformer.")] = torch.randn(
            shape if whole else shape[:1], generator=generator
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(BLOOM))
    return folder


def test_bloom_has_modules_of_a_pipeline_in_the_older_layout(bloom, tmp_path):
    run(
        from_huggingface, "--input-model-dir", bloom, "--output-model-dir", tmp_path / "old", "--deepspeed",
        "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2,
        "--partition-layers", "2,1", "--legacy-layout",
    )  # fmt: skip
    names = sorted(path.name for path in (tmp_path / "old/release").iterdir())
    assert names == [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)]
    assert (tmp_path / "old/latest").read_text() == "release"
    ranks = [torch.load(tmp_path / "old/release" / name, weights_only=True) for name in names]
    first, second, third, last = (rank["module"]["module"] for rank in ranks)
    whole = load_file(bloom / "model.safetensors")
    # Padded to a multiple of 128 x 2.
    assert first["tied_modules.embed.word_embeddings.weight"].shape == (128, 32)
    assert torch.equal(
        second["tied_modules.embed.word_embeddings.norm.bias"], whole["word_embeddings_layernorm.bias"]
    )
    key = "self_attention.query_key_value.weight"
    assert torch.equal(second[f"4.{key}"], whole[f"h.1.{key}"][48:])
    assert torch.equal(third["5.mlp.dense_4h_to_h.weight"], whole["h.2.mlp.dense_4h_to_h.weight"][:, :64])
    assert torch.equal(last["7.final_layernorm.weight"], whole["ln_f.weight"])
    assert not any(name.startswith(("5.", "7.")) for name in first)
    run(
        program, "export", "--load", tmp_path / "old", "--legacy-layout", "--model-config", bloom,
        "--output-model-dir", tmp_path / "back",
    )  # fmt: skip
    found = {name.removeprefix("transformer."): each for name, each in digests(tmp_path / "back").items()}
    assert found == digests(bloom)


def test_bloom_goes_from_the_older_layout_to_other_sizes_and_to_a_checkpoint(bloom, tmp_path):
    old = ["--input-model-dir", bloom, "--output-model-dir", tmp_path / "old", "--legacy-layout"]
    run(from_huggingface, *old, "--tensor-model-parallel-size", 4)
    sizes = [
        "--model",
        "bloom",
        "--num-layers",
        3,
        "--hidden-size",
        32,
        "--num-heads",
        4,
        "--orig-vocab-size",
        250,
    ]
    run(
        when_tp_pp_change, "--input-model-dir", tmp_path / "old", "--output-model-dir", tmp_path / "new",
        "--src-tensor-model-parallel-size", 4, "--tgt-pipeline-model-parallel-size", 3, "--legacy-layout",
        *sizes,
    )  # fmt: skip
    run(
        when_tp_pp_change, "--input-model-dir", tmp_path / "new", "--output-model-dir", tmp_path / "any",
        "--src-pipeline-model-parallel-size", 3, "--model-config", bloom,
    )  # fmt: skip
    run(program, "export", "--load", tmp_path / "any", "--output-model-dir", tmp_path / "back")
    found = {name.removeprefix("transformer."): each for name, each in digests(tmp_path / "back").items()}
    assert found == digests(bloom)
    (tmp_path / "old/release/mp_rank_01_model_states.pt").unlink()
    text = refused(
        when_tp_pp_change, "--input-model-dir", tmp_path / "old", "--output-model-dir", tmp_path / "no",
        "--src-tensor-model-parallel-size", 4, "--model-config", bloom,
    )  # fmt: skip
    assert "files are missing: mp_rank_01_model_states.pt" in text


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("mixtral", "had no routed experts"),
        ("qwen3-moe", "had no routed experts"),
        ("deepseek-v3", "had no routed experts"),
        ("qwen3", "no norms of queries and keys"),
        ("gemma", "gated MLPs by SiLU alone"),
        ("mistral", "had no sliding windows"),
        ("llama3", "did not scale rotary positions"),
    ],
)
def test_models_without_a_place_in_the_older_layout_are_refused_with_the_reason(family, said):
    recipe = families()[family]
    more = {
        "mistral": {"sliding_window": 8},
        "llama3": {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    }
    plan = recipe.make_plan({**recipe.sizes["tiny"], **more.get(family, {})})
    with pytest.raises(DataError, match=said):
        LegacyLayout().check(plan)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--partition-layers", "1,1"], "needs 1 numbers"),
        (["--pipeline-model-parallel-size", 2, "--partition-layers", "1,x"], "write numbers with commas"),
    ],
)
def test_stages_that_do_not_make_the_model_are_refused(bloom, tmp_path, given, said):
    source = ["--input-model-dir", bloom, "--output-model-dir", tmp_path / "old", "--legacy-layout"]
    assert said in refused(from_huggingface, *source, *given)


def test_the_size_that_blooms_converter_calls_7b_is_blooms(bloom, tmp_path):
    given = ["--input-model-dir", bloom, "--output-model-dir", tmp_path / "old", "--type", "7B"]
    assert "--type 7B has --num-layers 30, the model has 3" in refused(from_huggingface, *given)
