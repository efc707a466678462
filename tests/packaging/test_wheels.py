"""The core and every plugin as built wheels: installed without the checkout, they list, plan and train."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = (
    ROOT,
    *sorted(
        path.parent
        for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml"))
    ),
)
OURS = ("mindspeed", "_mindspeed", "__editable__", "_editable_impl", "acme_")


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project)
    return sorted(folder.glob("*.whl"))


def environment(root, wheels):
    """Make an environment with nothing of the checkout: wheels, and the libraries of this environment."""
    run(sys.executable, "-m", "venv", "--without-pip", root)
    python = root / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OURS):
            (site / entry.name).symlink_to(entry)
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"),
        *("--no-warn-script-location", *wheels),
    )
    return root


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("fresh"), wheels)


def clean():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }


def test_a_wheel_holds_the_package_with_types_and_license(wheels):
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        package = wheel.name.split("-")[0]
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
        assert not [name for name in names if name.startswith(("tests/", "docs/"))]


def test_features_of_installed_wheels_are_listed(installed, tmp_path):
    listed = run(installed / "bin" / "mindspeed-features", "list", cwd=tmp_path, env=clean())
    for name in ("flash-attn", "fused-rmsnorm", "fused-swiglu", "profile"):
        assert name in listed
    assert "broken" not in listed


def test_the_core_alone_lists_and_says_what_brings_the_rest(wheels, tmp_path):
    core = [wheel for wheel in wheels if wheel.name.startswith("mindspeed_core-")]
    root = environment(tmp_path / "alone", core)
    listing = (
        "import sys; from mindspeed_core.cli.features import main; assert main(['list']) == 0; "
        "assert not {'torch', 'megatron', 'numpy'} & {*sys.modules}"
    )
    run(root / "bin" / "python", "-c", listing, cwd=tmp_path, env=clean())
    command = [root / "bin" / "mindspeed-features", "verify", "flash-attn"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean())
    assert (done.returncode, "pip install mindspeed-testing" in done.stderr) == (1, True)


def test_a_training_runs_from_installed_wheels(installed, tmp_path):
    flags = (
        "--platform cpu --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size "
        "64 --micro-batch-size 1 --mock-data --num-workers 0 --eval-iters 0 --lr 1e-3 --train-iters 2 "
        "--swiglu --normalization RMSNorm --use-fused-rmsnorm --use-fused-swiglu --use-flash-attn "
        "--attention-dropout 0 --run-dir here"
    ).split()
    shown = run(installed / "bin" / "mindspeed-train", *flags, cwd=tmp_path, env=clean())
    assert "features: flash-attn, fused-rmsnorm, fused-swiglu" in shown
    assert (tmp_path / "here" / "metrics.jsonl").exists()


def test_a_scaffolded_plugin_starts_from_installed_wheels(installed, tmp_path):
    run(installed / "bin" / "mindspeed-features", "new", "my-first-plugin", cwd=tmp_path, env=clean())
    assert (tmp_path / "my-first-plugin" / "pyproject.toml").exists()
