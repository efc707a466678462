"""The operations of a step with adapters: frozen weights get no gradient, and the formula leaves it out."""

import lora_runs as runs
import pytest

from mindspeed_megatron.flops import count_run
from mindspeed_megatron.instruments.operations import operations
from mindspeed_megatron.instruments.passes import BACKWARD, FORWARD, RECOMPUTED, current_pass
from mindspeed_megatron.instruments.work_counter import WorkCounter
from mindspeed_testing import run_world

LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "24", "--normalization", "RMSNorm", "--swiglu"),
    *("--position-embedding-type", "rope", "--disable-bias-linear", "--lora-r", "4", "--lora-target-modules"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"),
)
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-router-topk", "2", "--disable-bias-linear"),
    *("--swiglu", "--lora-target-modules", "linear_qkv", "linear_proj", "--lora-modules-to-save", "router"),
)
CASES = {
    "all linears": runs.LORA,
    "grouped heads, output layer": (
        *(*runs.PLAIN, "--group-query-attention", "--num-query-groups", "2"),
        *("--lora-target-modules", "q_proj", "up_proj", "lm_head", "--lora-r", "4"),
    ),
    "output layer trained whole": (*runs.LORA, "--lora-modules-to-save", "lm_head", "norm"),
    "latent": LATENT,
    "experts": EXPERTS,
    "predictions": (*runs.LORA, "--mtp-num-layers", "1"),
    "recomputed": (*runs.LORA, *runs.FULL),
}
OFTEN = ("all linears", "output layer trained whole", "latent")
OF_TWO = {"tp2": (*runs.LORA, *runs.TP2), "pp2": (*runs.LORA, *runs.PP2)}


def counted(cases):
    """Return of each case what this rank executes in a step, and the formula's count."""
    found = {}
    for name, flags in cases.items():
        with runs.course(*flags) as course:
            run = course.run
            with WorkCounter(current_pass) as counter:
                course.train(1)
            passes = {key: operations(work) for key, work in counter.work.items()}
            formula = count_run(run, run.args.seq_length, causal=False)
        found[name] = (
            passes[FORWARD] + passes[BACKWARD],
            passes.get(RECOMPUTED, 0),
            formula.model * run.args.global_batch_size,
            formula.recomputed * run.args.global_batch_size,
        )
    return found


@pytest.fixture(scope="module")
def alone(asked_for):
    (found,) = run_world(counted, 1, {case: CASES[case] for case in CASES if case in asked_for("case")})
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in OFTEN else pytest.mark.thorough) for case in CASES],
)
def test_a_step_executes_what_the_formula_says(alone, case):
    needed, recomputed, model, again = alone[case]
    assert (needed, recomputed) == (model, again)


@pytest.mark.thorough
def test_two_ranks_execute_it_together():
    ranks = run_world(counted, 2, OF_TWO)
    for name in OF_TWO:
        assert sum(rank[name][0] for rank in ranks) == ranks[0][name][2]
