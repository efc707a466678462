"""The summary of a run: what its pages say, and that the HTML needs nothing beside it."""

import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch

from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.resolver.plan import HeldBack, Plan
from mindspeed_megatron.partial_training import TrainedParts
from mindspeed_train.checkpoint.manifests import MANIFEST
from mindspeed_train.data.identity import TrainingData
from mindspeed_train.monitoring.curves import SWITCH, svg_curve, thinned
from mindspeed_train.monitoring.measures import Measures
from mindspeed_train.monitoring.summary import as_html, as_markdown, summarize, write_summary


def row(step, loss):
    return {
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_second": 64.0 * step,
        "step_ms": 10.0 * step,
        "peak_memory_bytes": 2**20,
    }


@pytest.fixture
def run(tmp_path):
    """A run that stopped at step 3 of 5, as far as a summary reads it."""
    published = tmp_path / "ckpt" / "iter_0000002"
    published.mkdir(parents=True)
    (published / MANIFEST).write_text("{}")
    (tmp_path / "ckpt" / "iter_0000003").mkdir()
    args = SimpleNamespace(
        train_iters=5,
        save=str(tmp_path / "ckpt"),
        seq_length=16,
        padded_vocab_size=32,
        global_batch_size=2,
        params_dtype=torch.float32,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=2,
    )
    config = SimpleNamespace(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=4,
        ffn_hidden_size=32,
        gated_linear_unit=False,
        num_moe_experts=None,
        recompute_granularity="selective",
        recompute_modules=["core_attn"],
    )
    measures = Measures()
    measures.throughput = SimpleNamespace(peak=1.0, source="--peak-tflops")
    data = TrainingData(record={"train": [{"prefix": "data/text", "digest": "12ab", "weight": 0.5}]})
    session = SimpleNamespace(
        plan=Plan(held_back=(HeldBack("fast-path", "needs <another> device"),), digest="abc"),
        registry=SimpleNamespace(distributions=lambda: {"some-plugin": "1.2"}),
        platform=CpuPlatform(),
        state={Measures: measures, TrainingData: data, TrainedParts: TrainedParts()}.__getitem__,
    )
    return SimpleNamespace(
        args=args,
        config=config,
        session=session,
        dist=SimpleNamespace(world_size=2, rank=0, local_rank=0),
        model=[torch.nn.Linear(3, 4)],
        iteration=3,
        run_dir=tmp_path,
        history=[row(1, 3.0), row(2, 1.0), row(3, 2.0), {"step": 3, "validation_loss": 2.5}],
    )


def test_the_page_says_how_far_the_run_came_and_how_it_went(run):
    text = as_markdown(summarize(run))
    assert "step 3 of 5" in text
    for fact in (
        "3.000000 at step 1",
        "1.000000 at step 2 (lowest)",
        "2.000000 at step 3 (last)",
        "2.500000",
    ):
        assert fact in text


def test_the_page_says_which_data_the_run_trained_on(run):
    assert summarize(run).sections["Training data"] == [("data/text", "12ab, weight 0.5")]


def test_the_page_says_throughput_with_recompute_and_share(run):
    rows = dict(summarize(run).sections["Throughput"])
    assert rows["tokens per second"].startswith("128 ")
    assert "of 1 (--peak-tflops)" in rows["share of peak"]
    counted = float(rows["TFLOP/s per device"].split()[0])
    assert float(rows["with recompute"]) > counted > 0


def test_only_published_checkpoints_are_named(run):
    assert summarize(run).sections["Checkpoints"] == [("iter_0000002", f"{run.args.save}/iter_0000002")]


def test_the_page_names_versions_and_what_was_held_back(run):
    text = as_markdown(summarize(run))
    for fact in (
        "| some-plugin | 1.2 |",
        "| torch |",
        "| megatron-core |",
        "held back: needs &lt;another> device",
    ):
        assert fact in text


def test_the_html_is_well_formed_escaped_and_refers_to_nothing(run, monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    page = as_html(summarize(run))
    assert "&lt;another&gt;" in page
    assert not re.search(r"""(src|href)\s*=|url\(|@import|<script""", page)
    body = page[page.index("<body>") : page.index("</html>")]
    charts = ElementTree.fromstring(body).findall("svg")
    assert [chart.get("aria-label") for chart in charts][:2] == ["loss (nats per token)", "gradient norm"]
    shown = {text.text for text in charts[0].iter("text")}
    assert {"training", "validation"} <= shown
    assert "test" not in shown


def test_a_variable_leaves_the_curves_out(run, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    assert "<svg" not in as_html(summarize(run))
    assert "loss_curve.png" not in as_markdown(summarize(run))


def test_both_pages_are_written(run):
    write_summary(run)
    assert (run.run_dir / "summary.html").read_text().startswith("<!doctype html>")
    assert (run.run_dir / "summary.md").read_text().startswith("# ")


def test_a_curve_leaves_out_what_is_not_finite():
    drawn = svg_curve("loss", {"a": [(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 1.0)]})
    assert drawn == svg_curve("loss", {"a": [(1, 2.0), (4, 1.0)]})
    assert svg_curve("loss", {"a": [(1, float("nan"))]}) == ""


def test_a_curve_goes_through_its_points():
    drawn = ElementTree.fromstring(svg_curve("loss", {"a": [(1, 2.0), (3, 5.0), (4, 1.0)]}))
    paths = [path for path in drawn.iter("path") if "stroke: #1f77b4" in path.get("style")]
    curve = max((re.findall(r"[-\d.]+", path.get("d")) for path in paths), key=len)
    (x1, x2, x3), (y1, y2, y3) = (list(map(float, curve[start::2])) for start in (0, 1))
    assert (x3 - x1) / (x2 - x1) == pytest.approx(1.5)
    assert (y1 - y2) / (y3 - y2) == pytest.approx(0.75)


def test_thinning_keeps_a_spike_and_both_ends():
    points = [(float(step), 1.0) for step in range(10_000)]
    points[5_001] = (5_001.0, 50.0)
    kept = thinned(points)
    assert len(kept) <= 700
    assert (5_001.0, 50.0) in kept
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(kept)
