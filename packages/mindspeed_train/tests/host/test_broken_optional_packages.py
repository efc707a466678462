"""Optional packages that are installed and raise when they are imported: what needs none of them goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mindspeed_testing.model_flags import training_flags

PACKAGES = {
    "torch_npu": "torch_npu",
    "transformer_engine": "transformer-engine",
    "flash_attn": "flash-attn",
    "triton": "triton",
    "apex": "apex",
}
REASON = "libbroken.so.1: cannot open shared object file"
LATENT = (
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *("--v-head-dim", "12", "--position-embedding-type", "rope", "--num-layers", "1"),
)
KERNELS = (
    *("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu", "--swiglu", "--disable-bias-linear"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--num-layers", "1"),
)


@pytest.fixture(scope="module", params=["OSError", pytest.param("ImportError", marks=pytest.mark.thorough)])
def environment(request, tmp_path_factory):
    """Return an environment in which every optional package is there and raises."""
    folder = tmp_path_factory.mktemp("broken")
    for module, dist in PACKAGES.items():
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(f"raise {request.param}({REASON!r})\n")
        info = folder / f"{dist.replace('-', '_')}-2.13.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 2.13.0\n")
        (info / "RECORD").write_text("")
    entry = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    (folder / "torch_npu-2.13.0.dist-info" / "entry_points.txt").write_text(entry)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def run(environment, *command):
    return subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=False
    )


def train(environment, *flags):
    return run(environment, "mindspeed_core.train", "--platform", "cpu", *training_flags(flags, 1))


def test_training_goes_on_with_what_works(environment):
    done = train(environment, *KERNELS, "--transformer-impl", "local")

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_latent_attention_trains_on_megatron_s_own_layers(environment):
    done = train(environment, *LATENT)

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_layers_of_a_broken_package_are_refused_in_one_sentence(environment):
    done = train(environment, *KERNELS, "--transformer-impl", "transformer_engine")

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "--transformer-impl" in done.stderr
    assert REASON in done.stderr
    assert "uninstall transformer-engine" in done.stderr


def test_the_doctor_names_each_with_its_reason(environment):
    done = run(environment, "mindspeed_core.cli.features", "doctor", "--json")

    findings = json.loads(done.stdout)["findings"]
    told = {
        finding["subject"]
        for finding in findings
        if "not import" in finding["found"] and finding["severity"] != "ok"
    }
    assert told >= {"torch_npu", "transformer-engine", "flash_attn", "triton", "apex"}
    assert not any(finding["subject"].startswith("torch import") for finding in findings)
    assert all(
        finding["remedy"] for finding in findings if finding["subject"] in told and REASON in finding["found"]
    )
