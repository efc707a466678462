"""Generation under layouts, of families, with kernels, and dealt out: the tokens of one process."""

import pytest
import torch
from generation_runs import followed, generations, with_and_without_a_cache
from test_generation import BEAMS, LONG, NEW, PROMPTS, SAMPLING, of_transformers
from tiny_models import MODELS, built, make, oracle, reference

from mindspeed_core.registry import Registry
from mindspeed_testing import run_world

THOROUGH = pytest.mark.thorough
TP2, PP2, BOTH, EP2 = {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"ep": 2}
ROUTED = {"qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v3"}
CALLS = [
    ("ids", (PROMPTS,), {"max_new_tokens": NEW}),
    ("ids", (LONG,), BEAMS),
    ("ids", (PROMPTS,), {"max_new_tokens": NEW, **SAMPLING}),
    ("scored", ([(LONG[:4], LONG[4:]), (PROMPTS[0], [1, 2])],), {}),
    ("cancelled", (PROMPTS[:2], 3), {"max_new_tokens": 8}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def of(name):
        if not (root / name).exists():
            make(name, root / name)
        return str(root / name)

    return of


@pytest.fixture(scope="module")
def alone(folder):
    ((found,),) = run_world(generations, 1, folder("llama"), [{}], CALLS)
    return found


def same(found, expected):
    """Compare results; scores of other layouts differ by rounding."""
    *tokens, scores, cancelled = found
    assert [*tokens, cancelled] == [*expected[:3], expected[4]]
    for one, other in zip(scores, expected[3]):
        assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-4)


def test_two_ranks_give_the_tokens_of_one(folder, alone):
    """Tensor, pipeline and data parallelism; every rank has the results."""
    for results in run_world(generations, 2, folder("llama"), [TP2, PP2, {}], CALLS):
        for found in results:
            same(found, alone)


@pytest.mark.thorough
def test_four_ranks_give_the_tokens_of_one(folder, alone):
    for results in run_world(generations, 4, folder("llama"), [BOTH, TP2, PP2], CALLS):
        for found in results:
            same(found, alone)


@pytest.mark.thorough
def test_other_ranks_follow_the_one_that_is_asked(folder, alone):
    first, second = run_world(followed, 2, folder("llama"), TP2, CALLS)
    same(first, alone)
    assert second == "followed"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags",
    [
        ("--use-flash-attn",),
        ("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb"),
        ("--triangle-attn",),
        ("--use-fused-masked-softmax",),
        ("--sequence-parallel", "--recompute-granularity", "full", "--recompute-method", "uniform"),
    ],
)
def test_features_of_a_training_give_the_same_tokens(folder, alone, flags):
    ((found,),) = run_world(generations, 1, folder("llama"), [{"flags": flags}], CALLS)
    same(found, alone)


BAND = ("--use-flash-attn", "--pre-tockens", "3", "--sparse-mode")
CORES = {
    "flash-attn": [(*BAND, "4"), (*BAND, "0"), (*BAND, "7"), ("--use-flash-attn", "--window-size", "3,0")],
    "triangle-attn": [("--triangle-attn", "--triangle-block-size", "2")],
    "packed-documents": [("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")],
    "context-parallel": [],
    "acme-soft-cap": [("--acme-soft-cap", "2")],
}
"""Flags of attention whose tokens behind cached keys are those without a cache; none can be split."""


def test_every_core_attention_of_a_generation_is_known():
    """One that is not in the table has to decode with a cache, or to say in its modes that it does not."""
    installed = {
        name
        for name, record in Registry.discover().features.items()
        if record.dist.startswith("mindspeed-")
        and not name.startswith("toy-")
        and "core-attention" in record.cls.slots
        and "inference" in record.cls.modes
    }
    assert installed <= CORES.keys()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, marks=() if "4" in flags or "--reset-position-ids" in flags else THOROUGH)
        for name in CORES
        if name in Registry.discover().features
        for flags in CORES[name]
    ],
    ids=" ".join,
)
def test_tokens_behind_cached_keys_are_those_without_a_cache(folder, flags):
    ((found,),) = run_world(with_and_without_a_cache, 1, folder("llama"), {"flags": flags}, PROMPTS[:2])
    together, alone, plain = found
    assert together == alone == plain


@pytest.mark.thorough
def test_more_ranks_than_groups_of_keys_give_the_tokens_of_one(folder, alone):
    for results in run_world(generations, 4, folder("llama"), [{"tp": 4}], CALLS[:3]):
        assert results == [alone[:3]]


@pytest.mark.thorough
def test_a_grid_of_ranks_is_left_to_one_dimension(folder, alone):
    grid = {"tp": 4, "flags": ("--tp-2d", "--tp-x", "2", "--tp-y", "2")}
    for results in run_world(generations, 4, folder("llama"), [grid], CALLS[:1]):
        assert results == [alone[:1]]


@pytest.mark.thorough
@pytest.mark.parametrize("flag", ["--bf16", "--fp16"])
def test_half_precision_gives_nearly_the_same_log_probabilities(folder, flag):
    calls = [
        ("scored", ([(LONG[:4], LONG[4:])],), {}),
        ("generate", (PROMPTS,), {"max_new_tokens": 1, "return_output_log_probs": True, "detokenize": False}),
    ]
    ((exact, half),) = run_world(generations, 1, folder("llama"), [{}, {"flags": (flag,)}], calls)
    assert half[0][0]["token_logprobs"] == pytest.approx(exact[0][0]["token_logprobs"], abs=0.3)
    assert half[1][0] == exact[1][0]
    assert half[1][1] != exact[1][1]


BIASED = [name for name in MODELS if name.endswith("-13b")]
"""Families with linear biases that transformers has no class for."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", BIASED)
def test_linear_biases_give_the_tokens_of_whole_sequences(folder, name):
    calls = [("ids", (PROMPTS,), {"max_new_tokens": NEW})]
    ((found,),) = run_world(generations, 1, folder(name), [{}], calls)
    model = built(name)
    for prompt, tokens in zip(PROMPTS, found[0], strict=True):
        ids = list(prompt)
        for _ in range(NEW):
            ids.append(int(reference(name, model, torch.tensor([ids]))[0, -1].argmax()))
        assert tokens == ids[len(prompt) :]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in MODELS if name not in BIASED])
def test_every_family_gives_the_tokens_of_transformers(folder, name):
    calls = [("ids", (PROMPTS,), {"max_new_tokens": NEW}), ("ids", (LONG,), BEAMS)]
    ((found,),) = run_world(generations, 1, folder(name), [{}], calls)
    model = oracle(name)
    expected = [of_transformers(model, each, max_new_tokens=NEW, do_sample=False) for each in PROMPTS]
    assert found == [expected, of_transformers(model, LONG, do_sample=False, **BEAMS)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(ROUTED))
def test_experts_on_two_ranks_give_the_tokens_of_one(folder, name):
    calls = [("ids", (PROMPTS,), {"max_new_tokens": NEW})]
    ((alone,),) = run_world(generations, 1, folder(name), [{}], calls)
    alltoall = {"flags": ("--moe-token-dispatcher-type", "alltoall")}
    for found in run_world(generations, 2, folder(name), [EP2 | alltoall, TP2, PP2], calls):
        assert found == [alone] * 3


@pytest.mark.thorough
def test_the_calls_of_ascendspeeds_readme_run_as_they_are(tmp_path):
    from corpora import write_tokenizer

    make("llama", tmp_path / "model", vocab_size=400, max_position_embeddings=1024)
    write_tokenizer(tmp_path / "model")
    (texts,) = run_world("generation_runs:of_the_readme", 1, str(tmp_path / "model"), timeout=600)
    assert all(isinstance(text, str) and text for text in texts)
    greedy, sampled, beams, both = texts
    assert len({greedy, sampled, beams, both}) == 4
