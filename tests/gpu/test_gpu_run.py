"""The GPU run without a GPU: its listing, its sections on CPU, and what becomes of sections that go wrong."""

import importlib
import json
import subprocess
import sys
import time
from importlib.metadata import Distribution, entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
ROWS = '[{"name": "a check", "passed": true}]'
FAILED_ROWS = '[{"name": "a check", "passed": false}]'
CHILD = (
    "import subprocess, sys, pathlib\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    "pathlib.Path(sys.argv[2]).with_suffix('.pid').write_text(str(child.pid))\n"
    "child.wait()\n"
)


def run_gpu(*arguments, timeout=400):
    return subprocess.run(
        [sys.executable, str(GPU / "run.py"), *arguments], capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module("run")


@pytest.fixture
def sections(run):
    return importlib.import_module("sections").SECTIONS


@pytest.fixture
def fake(run, monkeypatch, tmp_path):
    """Replaces the sections' program: writes its rows, then does what is given."""

    def replace(rows, body=""):
        program = tmp_path / "fake.py"
        content = f'{{"section": "x", "headline": "", "rows": {rows}}}'
        program.write_text(f"import sys\nopen(sys.argv[2], 'w').write({content!r})\n{body}")
        monkeypatch.setattr(run, "SECTION_PROGRAM", program)

    return replace


def section_result(run, sections, folder, seconds=60.0):
    path = folder / "section.json"
    found = run.run_section(sections[0], path, {}, seconds, smoke=True)
    assert json.loads(path.read_text()) == found
    return found


def test_without_a_gpu_the_sections_are_listed_and_the_status_is_0(sections, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_gpu()
    assert done.returncode == 0, done.stderr
    assert "no GPU: torch" in done.stdout
    for section in sections:
        assert f"{section.seconds} s  {section.shows}" in done.stdout


def test_the_budgets_of_all_sections_fit_25_minutes(sections):
    assert sum(section.seconds for section in sections) <= 25 * 60


def test_every_section_has_its_module(sections):
    assert [section.name for section in sections if not (GPU / f"{section.module}.py").is_file()] == []


def test_the_checkout_counts_as_installed_by_its_metadata_alone(run, tmp_path):
    checkout = importlib.import_module("checkout")
    for project in checkout.projects():
        checkout.write_metadata(project, tmp_path)
    made = list(Distribution.discover(path=[str(tmp_path)]))
    names = {distribution.metadata["Name"] for distribution in made}
    assert names >= {"mindspeed-core", "mindspeed-kernels", "mindspeed-profile", "mindspeed-cp"}
    found = {
        (entry.group, entry.name, entry.value)
        for distribution in made
        for entry in distribution.entry_points
        if entry.group.startswith("mindspeed.")
    }
    installed = {
        (entry.group, entry.name, entry.value)
        for group in {group for group, _, _ in found}
        for entry in entry_points(group=group)
        if entry.dist.name in names
    }
    assert found == installed


def test_the_environment_puts_the_checkout_before_everything_else(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    variables = importlib.import_module("checkout").environment(tmp_path, None, smoke=False)
    paths = variables["PYTHONPATH"].split(":")
    assert paths[0] == str(tmp_path / "metadata")
    assert str(ROOT) in paths
    assert paths[-1] == "elsewhere"


def test_a_folder_without_wheels_is_refused(tmp_path):
    done = run_gpu("--wheels", str(tmp_path))
    assert done.returncode != 0
    assert "no *.whl there" in done.stderr


def test_missing_packages_are_named(run, monkeypatch, capsys):
    monkeypatch.setattr(run, "probe", lambda variables: run.Machine(0, "", ("megatron.core", "pluggy")))
    assert run.main(["--smoke"]) == 2
    assert "missing: megatron.core, pluggy" in capsys.readouterr().err


def ended(pid):
    """Whether a killed process is gone, or only not reaped, after some time to die."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
    return False


def test_a_section_that_hangs_is_killed_with_its_children_and_keeps_its_rows(run, sections, fake, tmp_path):
    fake(ROWS, CHILD)
    found = section_result(run, sections, tmp_path, seconds=3.0)
    assert found["status"].startswith("timed out after 3 s")
    assert [row["name"] for row in found["rows"]] == ["a check"]
    assert ended(int((tmp_path / "section.pid").read_text()))


def test_a_section_that_crashes_keeps_its_rows_and_its_message(run, sections, fake, tmp_path):
    fake(ROWS, "print('the reason', file=sys.stderr)\nimport os\nos.abort()")
    found = section_result(run, sections, tmp_path)
    assert found["status"] == "failed with status -6"
    assert "the reason" in found["standard_error"]
    assert len(found["rows"]) == 1


def test_a_section_that_ends_by_an_exception_after_passed_rows_failed(run, sections, fake, tmp_path):
    fake(ROWS, "raise RuntimeError('late')")
    assert section_result(run, sections, tmp_path)["status"] == "failed with status 1"


def test_a_section_without_rows_failed(run, sections, fake, tmp_path):
    fake("[]")
    assert section_result(run, sections, tmp_path)["status"] == "failed with status 0"


def test_after_a_failed_section_the_others_still_run(run, fake, monkeypatch, tmp_path, capsys):
    fake(FAILED_ROWS, "sys.exit(1)")
    monkeypatch.setattr(run, "probe", lambda variables: run.Machine(1, "", ()))
    assert run.main(["--section", "platform", "--section", "nccl", "--results", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.count(" failed ") >= 2
    assert {path.name for path in tmp_path.glob("*.json")} == {"platform.json", "nccl.json"}


def test_sections_that_find_no_time_are_named(run, fake, monkeypatch, tmp_path, capsys):
    fake(ROWS)
    monkeypatch.setattr(run, "probe", lambda variables: run.Machine(1, "", ()))
    assert run.main(["--minutes", "0.1", "--results", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("left out") == len(run.SECTIONS)


def test_slices_of_a_section_run_side_by_side_and_their_rows_are_joined(run, sections, fake, tmp_path):
    fake(ROWS)
    features = next(section for section in sections if section.divides)
    path = tmp_path / "features.json"
    found = run.run_side_by_side(features, path, {}, 60.0, smoke=True, count=3)
    assert (found["status"], len(found["rows"])) == ("finished", 3)
    assert [file.name for file in tmp_path.glob("*.json")] == ["features.json"]


def test_a_failed_slice_fails_its_section(run, sections, fake, tmp_path):
    fake(ROWS, "sys.exit(3 if '2/2' in sys.argv else 0)")
    features = next(section for section in sections if section.divides)
    found = run.run_side_by_side(features, tmp_path / "features.json", {}, 60.0, smoke=True, count=2)
    assert found["status"] == "failed with status 3"
    assert len(found["rows"]) == 2


@pytest.mark.parametrize("text", ["0/2", "3/2", "x/2", "2", "1/0"])
def test_a_slice_that_is_none_is_refused(run, text, capsys):
    with pytest.raises(SystemExit):
        run.main(["--slice", text])
    assert "1 <= I <= N" in capsys.readouterr().err


@pytest.fixture
def timeline(run):
    return importlib.import_module("timeline")


def test_a_timeline_tells_kinds_of_work_and_gaps(timeline):
    names = {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
        "void multi_tensor_apply_kernel<FusedOptimizer>": "optimizer",
        "_swiglu_backward": "activation",
        "_cross_entropy_gradient": "cross entropy",
        "ncclDevKernel_AllReduce": "communication",
        "Memcpy HtoD": "copies",
        "something_new": "others",
    }
    assert {name: timeline.kind_of(name) for name in names} == names
    kernels = [
        timeline.Interval("nvjet", 0.0, 2e6),
        timeline.Interval("_swiglu_forward", 1e6, 3e6),
        timeline.Interval("nvjet", 5e6, 6e6),
    ]
    found = timeline.shares(reversed(kernels), 10.0)
    assert found["seconds"] == {"products": 3.0, "activation": 2.0, "gaps": 6.0}
    assert found["share"]["gaps"] == 0.6
    assert found["longest"][0] == {"kernel": "nvjet", "kind": "products", "times": 2, "seconds": 3.0}


def test_an_operator_is_held_against_the_fastest_other(run, monkeypatch):
    monkeypatch.syspath_prepend(str(GPU.parent))
    speed = importlib.import_module("operator_speed")
    rows = [
        {"name": "norm, theirs torch's", "ours": 2.0, "theirs": 4.0, "ratio": 0.5},
        {"name": "norm, theirs Liger's", "ours": 2.5, "theirs": 1.0, "ratio": 2.5},
        {"name": "a check", "passed": True},
    ]
    assert speed.fastest_of_others(rows) == {"norm": 2.0}


def test_every_feature_has_one_proof_before_any_has_two(run):
    proofs = importlib.import_module("feature_proofs")
    fitting, _ = proofs.scenarios("cuda", 1)
    names = [feature.name for feature, _ in fitting]
    assert len(set(names[: len(set(names))])) == len(set(names))


@pytest.mark.parametrize(
    "section",
    [
        "attention",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("platform", "training", "kernels", "plan", "features", "nccl")
        ),
    ],
)
def test_the_code_of_a_section_runs_on_cpu(section, tmp_path):
    done = run_gpu("--smoke", "--section", section, "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / f"{section}.json").read_text())
    assert (found["status"], found["smoke"]) == ("finished", True)
    assert found["machine"]["mindspeed-core"]
    assert found["rows"]
    assert not [row for row in found["rows"] if row["passed"] is False]


@pytest.mark.parametrize(
    "smoke", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["small", "with CUDA's kernels"]
)
def test_the_gpt_of_the_section_plan_is_planned_without_a_gpu(run, smoke):
    section = importlib.import_module("planned_memory")
    plain, fused = (section.planned_bytes(side, smoke=smoke) for side in (section.HOST, section.FUSED))
    assert 0 < fused < plain
