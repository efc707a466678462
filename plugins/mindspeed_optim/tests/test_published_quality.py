"""The pages say what the committed comparison of losses found."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "optimizer_quality.json"
PAGES = {
    "opt-cadam": ("adam", "cadam, rate / 3", "cadam, rate / 5", "cadam, rate / 10"),
    "opt-quant-states": ("adam", "moments of 8 bits", "moments of bfloat16"),
}


@pytest.mark.parametrize("page", PAGES)
def test_losses_and_their_distance_from_adams_are_those_that_were_measured(page):
    text = files("mindspeed_optim").joinpath(f"docs/{page}.md").read_text(encoding="utf-8")
    rules = json.loads(RESULTS.read_text(encoding="utf-8"))["rules"]
    for name in PAGES[page]:
        more = 100 * (rules[name]["over_adam"] - 1)
        shown = "" if name == "adam" else f"{more:+.1f} % ".replace("-", "−")
        assert f"| {rules[name]['loss']:.3f} | {shown}|" in text
