"""A model finetuned inside of a Megatron-LM script: data, adapters, merge and export are those of a run."""

from __future__ import annotations

import json
import random

import fake_training as fake
import pytest
import torch

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_models.features import DECLARATIONS
from mindspeed_models.program import main
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone

pytestmark = pytest.mark.thorough
WORDS = "the cat saw a dog and it ran to its house where nobody had ever been before that day".split()
NAME = "tiny-aquila"
BASE = (
    *("--seq-length", "16", "--micro-batch-size", "2", "--train-iters", "1", "--lr", "1e-3", "--mock-data"),
    *("--num-workers", "0", "--eval-iters", "0", "--make-vocab-size-divisible-by", "16"),
    *("--verify-checkpoint", "off"),
)
TRAIN = (
    *("--platform", "cpu", "--use-cpu-initialization", "--seq-length", "128", "--vocab-size", "320"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "10", "--eval-iters", "0"),
    *("--is-instruction-dataset", "--variable-seq-lengths", "--split", "1,0,0"),
)
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LORA = ("--lora-target-modules", "query_key_value", "dense", "--lora-r", "4", "--lr", "1e-2")


def write_texts(work):
    draw = random.Random(3)

    def words(count):
        return " ".join(draw.choices(WORDS, k=count))

    texts = [{"text": words(60)} for _ in range(100)]
    questions = [{"instruction": words(5), "input": "", "output": words(4)} for _ in range(64)]
    for name, records in (("texts", texts), ("questions", questions)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def step(work, name):
    sources = ("--corpus", str(work / "texts.jsonl"), "--instructions", str(work / "questions.jsonl"))
    assert main(["run", NAME, name, "--work-dir", str(work), *sources]) == 0, name


def scripts(work):
    """Finetune everything, then adapters, in the made-up script on two tensor-parallel ranks."""
    found = {}
    shared = (*TRAIN, *TP2, "--model-config", f"{work}/model", "--data-path", f"{work}/data/instructions")
    for name, flags in {
        "finetuned": ("--lr", "3e-3", "--save", f"{work}/finetuned"),
        "adapters": (*LORA, "--load", f"{work}/finetuned", "--save", f"{work}/adapters"),
    }.items():
        fake.adapt(*declared_features(DECLARATIONS))
        ran = fake.run_script(*shared, *flags)
        fake.forget_run()
        found[name] = [line["lm loss"] for line in ran["log"] if "lm loss" in line], ran["err"]
    return found


def logits(work, ids):
    """The logits of the merged checkpoint in the standalone host."""
    from mindspeed_core.activation import prepare
    from mindspeed_megatron.unwrap import unwrap

    flags = [*BASE, "--model-config", f"{work}/model", "--pretrained-checkpoint", f"{work}/merged"]
    with prepare(flags, host="standalone") as session:
        run = _standalone.setup(session)
        model = unwrap(run.model[0]).eval()
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        with torch.no_grad():
            found = model(ids, positions, None)[..., : run.args.vocab_size].clone()
        _standalone.teardown(session)
    return found


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    work = tmp_path_factory.mktemp("chain")
    write_texts(work)
    step(work, "convert")
    step(work, "preprocess")
    trained = run_world(scripts, 2, str(work), timeout=300)
    assert [error for rank in trained for losses, error in rank.values() if len(losses) != 10] == []
    for name in ("merge", "export"):
        step(work, name)
    return work, trained


def test_a_script_learns_from_prepared_conversations(chain):
    for rank in chain[1]:
        losses, errors = rank["finetuned"]
        assert len(losses) == 10, errors
        assert sum(losses[-3:]) < sum(losses[:3])


def test_transformers_computes_the_logits_of_what_the_script_trained(chain):
    import transformers

    work, _ = chain
    content = json.loads((work / "exported" / "config.json").read_text())
    known = {name: value for name, value in content.items() if name not in ("architectures", "model_type")}
    config = transformers.LlamaConfig(**known)
    config._attn_implementation = "eager"
    from safetensors.torch import load_file

    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(load_file(work / "exported" / "model.safetensors"), strict=True)
    ids = torch.randint(3, content["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
    (found,) = run_world(logits, 1, str(work), ids, timeout=200)
    assert float((found - expected).abs().max()) <= 2e-5 * float(expected.abs().max())
