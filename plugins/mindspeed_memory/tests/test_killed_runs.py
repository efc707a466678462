"""Runs that are killed in the middle and go on: they train what an undisturbed run trains, to the bit."""

import pytest

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_megatron.tracker import TRACKER
from mindspeed_memory.features import DECLARATIONS
from mindspeed_testing.faults import records, start_job

MODEL = (
    *("--platform", "cpu", "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--vocab-size", "64", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--mock-data", "--num-workers", "0", "--lr", "1e-3", "--lr-decay-style", "constant"),
    *("--eval-iters", "0", "--attention-dropout", "0", "--hidden-dropout", "0.1"),
)
SHARDED = ("--use-distributed-optimizer", "--bf16")
HALF = (*SHARDED, "--grad-reduce-in-bf16")
INTERLEAVED = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
FLASH = ("--use-flash-attn", "--swap-min-bytes", "256")
SMALL = ("--bf16", "--compress-min-elements", "256")
CASES = {
    "swap-optimizer": (*SHARDED, "--swap-optimizer"),
    "swap-attention": ("--swap-attention", *FLASH),
    "reuse-fp32-param": (*SHARDED, "--reuse-fp32-param"),
    "release-fp32-grad": (*HALF, "--release-fp32-grad"),
    "virtual-optimizer": (*SHARDED, "--virtual-optimizer", "0.0001"),
    "compress-optimizer": (*SHARDED, "--compress-optimizer"),
    "swap-layer-input": (*BLOCK, "--swap-layer-input", "--swap-min-bytes", "256"),
    "compress-activation": (*SMALL, "--compress-activation", "0"),
    "compress-dense": (*SMALL, "--compress-dense", "level1"),
    "recompute-activation": ("--recompute-activation-function",),
    "recompute-norm": ("--recompute-norm",),
    "recompute-layers-per-pp-rank": (*INTERLEAVED, *BLOCK, "--enable-recompute-layers-per-pp-rank"),
    "recompute-dense-mlp": ("--recompute-granularity", "selective", "--recompute-modules", "mlp"),
    "recompute-in-advance": (*INTERLEAVED, *BLOCK, "--recompute-in-advance"),
    "recompute-in-bubble": (*INTERLEAVED, "--recompute-in-bubble"),
    "recompute-plan": ("--recompute-plan", "decoder.layers.{*}.mlp"),
    "swap-activation-plan": ("--swap-activation-plan", "decoder.layers.{*}", "--swap-min-bytes", "256"),
    "memory-fragmentation": ("--memory-fragmentation",),
    "memory-report": ("--memory-report",),
    "adaptive-recompute": ("--adaptive-recompute-device-swap", "--adaptive-recompute-device-size", "100"),
    "adaptive-memory": ("--adaptive-memory-optimization", "--swap-min-bytes", "256"),
    "smart-swap": ("--smart-swap", "--swap-min-bytes", "256"),
    "checkpoint-activations": ("--checkpoint-activations",),
    "block-optimizer": (*SHARDED, "--reuse-fp32-param", "--virtual-optimizer", "all"),
}
SHORT = (*CASES["swap-optimizer"], *CASES["swap-attention"])
RUNS = [
    pytest.param("swap-optimizer and swap-attention", SHORT, 10, id="short"),
    *(pytest.param(name, flags, 100, id=name, marks=pytest.mark.thorough) for name, flags in CASES.items()),
]


def test_every_feature_has_a_run():
    assert {feature.name for feature in declared_features(DECLARATIONS)} == set(CASES)


@pytest.mark.parametrize(("name", "features", "steps"), RUNS)
def test_a_killed_run_goes_on_as_if_nothing_had_been(name, features, steps, tmp_path):
    processes = "1" if steps < 100 else "2"
    flags = (*MODEL, *features, "--train-iters", str(steps), "--nproc", processes)
    if name == "memory-report":
        flags += ("--memory-report-path", str(tmp_path / "report"))
    save = tmp_path / "checkpoints"
    saving = ("--save", str(save), "--save-interval", str(steps // 5), "--max-restarts", "1")
    job = start_job((*flags, *saving, "--run-dir", str(tmp_path / "killed")), tmp_path / "killed.txt")
    try:
        # A checkpoint in the middle is there: what follows it is trained twice.
        job.wait_for(lambda: _saved(save) >= 2 * (steps // 5), seconds=300)
        job.workers()[0].kill()
        job.end_well(300)
        starts = job.starts()
    finally:
        job.close()
    whole = start_job((*flags, "--run-dir", str(tmp_path / "whole")), tmp_path / "whole.txt")
    try:
        whole.end_well(300)
    finally:
        whole.close()
    found, expected = records(tmp_path / "killed"), records(tmp_path / "whole")
    assert len(starts) == 2
    assert 0 < starts[1] < steps
    assert list(found) == list(range(1, steps + 1))
    assert found == expected


def _saved(folder):
    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0
