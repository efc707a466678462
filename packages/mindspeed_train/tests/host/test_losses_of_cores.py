"""Models of every kind reach, on each megatron-core, the losses that they reached on 0.16.1.

`losses_of_cores.json` was written on 0.16.1, by this file run as a program. The megatron-cores from 0.15.3 to
0.19.2 compute all of these models alike: a kind that an installed one computes otherwise is a change to find.
"""

import json
import shlex
import tempfile
from pathlib import Path

import pytest
import script_runs

from mindspeed_testing.worlds import run_world

RECORD = Path(__file__).with_name("losses_of_cores.json")
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-layers 2"
)
LATENT = (
    f"{LLAMA} --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 12 --qk-layernorm"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
MIXTRAL = f"{LLAMA} {EXPERTS} {EP2} --moe-router-topk 2 --moe-aux-loss-coeff 0.02"
KINDS = {
    "gpt": PP2,
    "gpt, dropout": f"{TP2} --attention-dropout 0.1 --hidden-dropout 0.1",
    "gpt, bfloat16, sharded optimizer": (
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    ),
    "llama, shared key heads": f"{LLAMA} --group-query-attention --num-query-groups 2 {TP2}",
    "attention in a window": f"--window-size 8,0 --window-attn-skip-freq 2 {PP2}",
    "mixtral": f"{MIXTRAL} --moe-z-loss-coeff 0.01",
    "experts that drop tokens": f"{MIXTRAL} --moe-expert-capacity-factor 1.0",
    "deepseek-v2-lite": (
        f"{LATENT} {EXPERTS} {EP2} --moe-shared-expert-intermediate-size 48 --moe-layer-freq [0,1] "
        "--moe-router-topk 3 --moe-router-pre-softmax --moe-router-topk-scaling-factor 16 "
        "--moe-aux-loss-coeff 0.003"
    ),
    "deepseek-v3": (
        f"{LATENT} {EXPERTS} {EP2} --q-lora-rank 16 --moe-shared-expert-intermediate-size 48 "
        "--moe-layer-freq [0,1] --moe-router-topk 4 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 0.0001 --mtp-num-layers 1"
    ),
    "deepseek's attention": (
        f"{LATENT} {TP2} --q-lora-rank 16 --rotary-scaling-factor 4 --original-max-position-embeddings 16 "
        "--mscale 1.0 --mscale-all-dim 1.0"
    ),
}
NUMBERS = ("loss", "grad_norm")


def train(folder):
    """Train every kind on two ranks; losses and norms of three steps each."""
    runs = {name: ["--use-cpu-initialization", *shlex.split(flags)] for name, flags in KINDS.items()}
    found = run_world(script_runs.run_all, 2, str(folder), runs, timeout=300)[0]
    return {
        kind: {name: [record[name] for record in records] for name in NUMBERS}
        for kind, records in found.items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_norms_are_those_of_0_16_1(trained, kind):
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    bound = 1e-3 if "bfloat16" in kind else 2e-6
    for name in NUMBERS:
        assert trained[kind][name] == pytest.approx(recorded[kind][name], rel=bound)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        RECORD.write_text(json.dumps(train(made), indent=1) + "\n", encoding="utf-8")
