"""The search leads to the page that explains a word, not to those that list it."""

from __future__ import annotations

import pytest
from search_ranking import Search
from search_words import WORDS

MEMORY = "features/mindspeed-memory"
WANTED = {
    "install": "quick-start.html",
    "resume": "checkpoints.html",
    "checkpoint": "checkpoints.html",
    "save": "checkpoints.html",
    "nan": "fault-tolerance.html",
    "crash": "fault-tolerance.html",
    "hang": "fault-tolerance.html",
    "restart": "fault-tolerance.html",
    "dataset": "data.html",
    "tokenizer": "data.html",
    "slurm": "clusters.html",
    "kubernetes": "clusters.html",
    "throughput": "monitoring.html",
    "mfu": "monitoring.html",
    "tensorboard": "monitoring.html",
    "oom": "planning.html",
    "fsdp": "fully-sharded.html",
    "llama": "models.html",
    "offload": f"{MEMORY}/swap-attention.html",
    "recompute": f"{MEMORY}/recompute-activation.html",
    "ulysses": "features/mindspeed-cp/context-parallel.html",
    "ring attention": "features/mindspeed-cp/context-parallel.html",
    "zero bubble": "features/mindspeed-pp/pp-engine.html",
    "--use-flash-attn": "features/mindspeed-kernels/flash-attn.html",
    "moe": "packages/mindspeed-moe.html",
    "lora": "features/mindspeed-models/lora.html",
    "hugging face": "packages/mindspeed-models.html",
    "muon": "features/mindspeed-optim/opt-muon.html",
    "profile": "features/mindspeed-profile/profile.html",
    "migrate": "migration.html",
    "pretrain_gpt": "megatron-lm.html",
    "write a plugin": "writing-a-plugin.html",
    "hook": "architecture.html",
    "npu": "npu-first-run.html",
    "doctor": "programs.html",
    "恢复训练": "checkpoints.zh-CN.html",
    "故障": "fault-tolerance.zh-CN.html",
}
"""What users type: the page that answers it."""


@pytest.fixture(scope="module")
def search(index) -> Search:
    return Search(index)


@pytest.mark.parametrize("query", WANTED)
def test_the_page_that_answers_a_word_is_among_the_first_three(search, query):
    assert WANTED[query] in search.pages(query)[:3]


def test_proofs_and_shown_files_are_not_searched_and_lists_come_last(index, search):
    heads = {entry["location"].partition("#")[0] for entry in index["docs"]}
    found = search.pages("checkpoint")
    lists = [page for page in found if page.startswith("reference/")]

    assert [page for page in heads if page.startswith(("proofs/", "source/"))] == []
    assert lists
    assert found.index("checkpoints.html") < 3
    assert [page for page in found[:20] if page in lists] == []


def test_the_words_of_the_search_belong_to_pages(pages):
    assert [page for page in WORDS if page.replace(".md", ".html") not in pages] == []
