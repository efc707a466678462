"""``mindspeed-train inspect`` describes a checkpoint without a process group and finds damage of any kind."""

import io
import json
import os
import pickle
import shutil

import pytest
import torch

from mindspeed_testing.worlds import run_world
from mindspeed_train.checkpoint.inspection import inspect, part_of
from mindspeed_train.program import main

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 "
    "--train-iters 2 --eval-iters 0 --use-distributed-optimizer --no-progress"
).split()


def train(folder, poison):
    import torch

    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    with activate([*FLAGS, "--save", folder], host="standalone") as session:
        run = loop.setup(session)
        session.call("train_step", run=run)
        run.iteration += 1
        if poison:
            with torch.no_grad():
                run.model[0].module.get_parameter("decoder.final_layernorm.weight")[3] = float("nan")
        session.call("save_checkpoint", run=run, reason="interval")
        loop.teardown(session)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_world(train, 2, str(folder), False)
    return folder


def test_it_tells_shapes_sizes_plan_and_versions(saved, capsys):
    assert main(["inspect", str(saved), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["iteration"] == 1
    assert found["manifest"]["layout"]["dp"] == 2
    assert found["manifest"]["model"]["hidden_size"] == 32
    assert "torch" in found["manifest"]["versions"]
    assert found["manifest"]["plan"]["digest"]
    tensors = {tensor["key"]: tensor for tensor in found["tensors"]}
    assert tensors["embedding.word_embeddings.weight"]["shape"] == [64, 32]
    assert tensors["embedding.word_embeddings.weight"]["dtype"] == "float32"
    assert found["parts"]["optimizer"]["elements"] == 3 * found["parts"]["model"]["elements"]
    assert found["problems"] == []


def test_people_get_a_summary_and_a_verdict(saved, capsys):
    assert main(["inspect", str(saved / "iter_0000001"), "--values", "--tensors"]) == 0
    text = capsys.readouterr().out
    for words in ("step 1", "versions: ", "embedding.word_embeddings.weight", "health: all files unchanged"):
        assert words in text
    assert "all values finite" in text


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "bit flip": (lambda d: flip(d / "__0_0.distcp"), ["__0_0.distcp", "SHA-256"]),
    "truncated": (lambda d: os.truncate(d / "__1_0.distcp", 100), ["__1_0.distcp", "truncated"]),
    "missing": (lambda d: (d / "__1_0.distcp").unlink(), ["__1_0.distcp", "missing"]),
    "foreign": (lambda d: (d / "note.txt").write_text("x"), ["note.txt", "not in the manifest"]),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damage_is_named_and_is_a_failure(saved, tmp_path, damage, capsys):
    action, words = DAMAGE[damage]
    directory = tmp_path / "iter_0000001"
    shutil.copytree(saved / "iter_0000001", directory)
    action(directory)
    assert main(["inspect", str(directory)]) == 1
    text = capsys.readouterr().out
    assert "health" not in text
    for word in words:
        assert word in text


def test_values_that_are_not_finite_are_found(tmp_path):
    run_world(train, 1, str(tmp_path), True)
    assert inspect(tmp_path)["problems"] == []
    (problem,) = (p for p in inspect(tmp_path, values=True)["problems"] if "optimizer" not in p)
    assert "decoder.final_layernorm.weight holds 1 elements" in problem


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_forged_file_is_not_executed(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "iter_0000001"
    shutil.copytree(saved / "iter_0000001", directory)
    content = io.BytesIO()
    torch.save(Bomb(), content)
    (directory / "common.pt").write_bytes(content.getvalue())
    assert main(["inspect", str(directory)]) == 1
    assert "mkdir" in capsys.readouterr().out
    # Written by an earlier version, or by Megatron-LM.
    (directory / "index.json").unlink()
    (directory / ".metadata").write_bytes(pickle.dumps(Bomb()))
    assert main(["inspect", str(directory)]) == 1
    assert "mkdir" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists()


def test_a_folder_without_checkpoint_is_one_message(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err


def test_keys_belong_to_parts():
    assert part_of("features.average.shadow") == "feature average"
    assert part_of("optimizer.state.exp_avg.decoder.layers.0") == "optimizer"
    assert part_of("chained_0.optimizer.state") == "optimizer"
    assert part_of("decoder.final_layernorm.weight") == "model"
