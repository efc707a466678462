"""Command lines of other people, at the worlds they were written for: accepted, or refused for a reason."""

import json
import re
from collections.abc import Mapping

import checked_lines
import pytest

RECORD = checked_lines.LINES.parent / "accepted.json"
LEAST = {"mindspeed": 55, "megatron_lm_0.16.1": 101, "megatron_lm_newest": 135, "mindspeed_llm": 48}
"""Scripts of each source that start today; the others name what is not here."""
LEAST_IN_SCRIPTS = {
    "mindspeed": 55,
    "megatron_lm_0.16.1": 116,
    "megatron_lm_newest": 143,
    "mindspeed_llm": 48,
}
"""The same inside of Megatron-LM's own scripts, whose kernels serve what ours does not."""
REASONS = re.compile(
    "mindspeed-optim|fused_ema_adamw|over groups of them|low-precision matrix products|"
    "hybrid and Mamba models|TikTokenizer|tokenizer's file decides|fill-in-the-middle|maximal update|"
    "distillation|DSA|"
    "indexer|Mamba|gated delta net|'gated_delta_net'|hyper-connections|errors are not injected|"
    "grow by equal steps|validation has the batch size|gives every depth|--use-torch-fsdp2|sqrtsoftplus|"
    "constants of yarn|which this host does not have|attention has biases|"
    "router of MindSpeed-LLM|deepseek4|Magistral|sparse attention|that nothing hides|"
    "layers of .* are not here|part of a model is not here|positions are not scaled as|"
    "ranks split a sequence of one length|instruction-data is not active|"
    "positions that are no tokens|no preferences|preferences are not trained|"
    "routed experts get no adapters|latent attention has no such linear|drawn from --seed|"
    "states of fewer bits have flags|after a training|further tokens are the model's own|"
    "no linear has this name|does not recompute them with"
)


@pytest.fixture(scope="module")
def found() -> Mapping[str, Mapping[str, tuple]]:
    return checked_lines.all_problems()


@pytest.fixture(scope="module")
def found_in_scripts() -> Mapping[str, Mapping[str, tuple]]:
    return checked_lines.all_problems_in_scripts()


@pytest.mark.parametrize("source", LEAST)
def test_as_many_scripts_are_accepted_as_ever(found, source):
    accepted = [name for name, problems in found[source].items() if not problems]
    assert len(accepted) >= LEAST[source]


@pytest.mark.parametrize("source", LEAST_IN_SCRIPTS)
def test_as_many_scripts_are_accepted_inside_of_megatron_lms(found_in_scripts, source):
    accepted = [name for name, problems in found_in_scripts[source].items() if not problems]
    assert len(accepted) >= LEAST_IN_SCRIPTS[source]


def test_no_script_is_refused_over_a_flag_that_does_nothing(found, found_in_scripts):
    unexplained = {
        (source, name, str(problem))
        for hosts in (found, found_in_scripts)
        for source, scripts in hosts.items()
        for name, problems in scripts.items()
        for problem in problems
        if not REASONS.search(f"{problem.reason} {problem.value} {problem.remedy}")
    }
    assert unexplained == set()


def test_every_refusal_has_a_way_out(found):
    lacking = [
        str(problem)
        for scripts in found.values()
        for problems in scripts.values()
        for problem in problems
        if not problem.remedy
    ]
    assert lacking == []


def test_the_record_behind_the_documentation_is_current(found, found_in_scripts):
    """``python tests/launch_scripts/checked_lines.py --write`` makes it."""
    assert json.loads(RECORD.read_text(encoding="utf-8")) == checked_lines.record(found, found_in_scripts)
