"""``mindspeed-models run tiny-FAMILY``: from text to an exported model on two processes, step by step."""

import json

import pytest
from chains import logits_of_export, run_chain
from loaded_logits import logits_of

from mindspeed_testing.worlds import run_world

FAMILIES = ("aquila", "baichuan", "baichuan2", "bloom", "internlm", "llama", "llama2")
LOSSES = ("pretrain", "finetune", "lora")


@pytest.fixture(scope="module", params=FAMILIES)
def chain(request, tmp_path_factory):
    work = tmp_path_factory.mktemp(request.param)
    return run_chain(work, f"tiny-{request.param}")


@pytest.mark.parametrize("step", LOSSES)
def test_every_training_learns(chain, step):
    records = map(json.loads, (chain / "logs" / step / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "grad_norm" in record]
    assert len(losses) == (20 if step == "pretrain" else 10)
    assert losses[-1] < losses[0]


def test_transformers_computes_the_logits_of_the_merged_model(chain):
    expected, largest = logits_of_export(chain / "exported")
    flags = ["--model-config", str(chain / "exported"), "--pretrained-checkpoint", str(chain / "merged")]
    (found,) = run_world(logits_of, 1, [(str(chain / "exported"), flags)], False, timeout=200)
    assert float((found[0] - expected).abs().max()) <= 2e-5 * largest
