"""Files of AscendSpeed's layout are written and read, and its two programs take their command lines."""

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from test_weights_round_trip import digests

from mindspeed_core.errors import UserError
from mindspeed_models.program import program
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
