"""torch_npu's real profiler takes what we pass, at every level."""

from __future__ import annotations

import gc

import pytest

from mindspeed_profile.backends import make_profiler
from mindspeed_profile.options import EXPORTS, METRICS, ProfileOptions


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_profiler_of_the_device_is_made(tmp_path, monkeypatch, level):
    # A profiler that was never started writes its settings to the working directory when it is collected.
    monkeypatch.chdir(tmp_path)
    options = ProfileOptions(10, 12, level, True, False, False, False, tmp_path, (2,))
    profiler = make_profiler(options, "npu", 2, 8, 1, 10, 12)
    assert type(profiler).__module__.startswith("torch_npu.profiler")
    del profiler
    gc.collect()


@pytest.mark.parametrize("metrics", METRICS)
def test_every_choice_of_metrics_and_forms_is_one_of_torch_npu(tmp_path, monkeypatch, metrics):
    monkeypatch.chdir(tmp_path)
    chosen = {"exports": EXPORTS, "metrics": metrics, "analysis": "off"}
    options = ProfileOptions(10, 12, 1, True, False, False, False, tmp_path, (2,), **chosen)
    profiler = make_profiler(options, "npu", 2, 8, 1, 10, 12)
    assert type(profiler).__module__.startswith("torch_npu.profiler")
    del profiler
    gc.collect()
