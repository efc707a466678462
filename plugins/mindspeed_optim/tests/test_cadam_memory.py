"""The memory that CAdam saves: planned at the shapes of the published launches, as its page says."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from mindspeed_tune.driver import Ranks
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.launch_plan import make_plan

PAGE = files("mindspeed_optim").joinpath("docs/opt-cadam.md").read_text(encoding="utf-8")
LAUNCH = (
    "mindspeed-train --fake-world-size 8 --mock-data --tensor-model-parallel-size 8 --sequence-parallel "
    "--bf16 --micro-batch-size 4 --global-batch-size 16 --train-iters 2 --lr 1e-4 --attention-dropout 0 "
    "--hidden-dropout 0 --hidden-size 4096 --num-attention-heads 32"
)
LLAMA = (
    "--num-layers 32 --ffn-hidden-size 11008 --vocab-size 32000 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--use-flash-attn"
)
MODELS = {
    "LLaMA-7B": f"{LLAMA} --seq-length 2048 --max-position-embeddings 2048",
    "LLaMA2-7B": f"{LLAMA} --seq-length 4096 --max-position-embeddings 4096",
    "Bloom-7B": "--num-layers 30 --vocab-size 250880 --position-embedding-type alibi "
    "--seq-length 2048 --max-position-embeddings 2048",
}
GIB = 2**30

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def runner():
    with Ranks(read_command(LAUNCH.split(), {})) as runner:
        yield runner


def planned(runner, model, *optimizer):
    """Return the planned memory of a rank."""
    runner.command = read_command([*f"{LAUNCH} {MODELS[model]}".split(), *optimizer], {})
    [record] = runner.run([0])
    return make_plan(("train",), [record]).kinds[0].memory[0]


def table():
    """Return the rows of the page's table of planned memory, by model."""
    number = r"([\d.]+)"
    row = rf"^\| ([\w-]+B) \| {number} GiB \| {number} GiB \| {number} % \| {number} % \| {number} GiB \|$"
    return {name: cells for name, *cells in re.findall(row, PAGE, re.MULTILINE)}


@pytest.mark.parametrize("model", MODELS)
def test_the_page_says_what_is_planned(runner, model):
    adam, cadam = planned(runner, model), planned(runner, model, "--optimizer", "cadam")
    saved = adam.exact - cadam.exact
    # Two float32 moments against one of 16 bits, with a byte for every block of 128; parameters have 2 bytes.
    assert saved == pytest.approx(adam.categories["parameters"] / 2 * (6 - 1 / 128), rel=1e-3)
    *shown, published, implied = table()[model]
    share = 100 * saved / adam.exact
    assert shown == [f"{adam.exact / GIB:.1f}", f"{cadam.exact / GIB:.1f}", f"{share:.1f}"]
    assert f"−{published} %" in PAGE
    assert implied == f"{100 * saved / float(published) / GIB:.1f}"
