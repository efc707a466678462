"""Supported versions of this release, as a table.

``mindspeed-features doctor`` compares it with what is installed, and the documentation prints it; nothing
else in the project decides by version numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = ">=3.10"
"""Versions of Python, PEP 440."""

MEGATRON_CORE = ">=0.15.3,<0.20"
"""Versions of megatron-core, PEP 440."""


@dataclass(frozen=True)
class Supported:
    """One row of the compatibility table.

    Attributes:
        distribution: the name on the package index.
        versions: PEP 440 specifier that works.
        tested: the versions the test suite runs with.
        required: training is impossible without it; otherwise it is looked at only where it is installed.
        platform: the platform that needs it, empty for all.
        remedy: the command that puts it right.
    """

    distribution: str
    versions: str
    tested: tuple[str, ...] = ()
    required: bool = True
    platform: str = ""
    remedy: str = ""


TABLE = (
    Supported("torch", ">=2.6", ("2.13.0",), remedy="pip install 'torch>=2.6'"),
    Supported(
        "megatron-core",
        MEGATRON_CORE,
        ("0.15.3", "0.16.1"),
        remedy=f"pip install 'megatron-core{MEGATRON_CORE}'",
    ),
    Supported("pluggy", ">=1.5", remedy="pip install 'pluggy>=1.5'"),
    Supported("numpy", ">=1.26", remedy="pip install 'numpy>=1.26'"),
    Supported(
        "torch_npu",
        ">=2.6",
        required=False,
        platform="npu",
        remedy="pip install the torch_npu whose version equals torch's (torch_npu 2.7.1 for torch 2.7.1)",
    ),
)

NPU_PYTHON = {
    "2.13.0": "3.10 to 3.14",
    "2.12.0": "3.10 to 3.14",
    "2.11.0": "3.10 to 3.14",
    "2.10.0": "3.10 to 3.13",
    "2.9.0": "3.10 to 3.13",
    "2.8.0": "3.9 to 3.13",
    "2.7.1": "3.9 to 3.13",
    "2.6.0": "3.9 to 3.11",
}
"""torch releases that have a torch_npu, and the Pythons of both, as torch_npu's authors publish them."""

NPU_CANN = {
    "9.1.0": ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
    "9.0.0": ("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "8.5.0": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "8.3.RC1": ("2.8.0", "2.7.1", "2.6.0.post3"),
    "8.2.RC1": ("2.6.0",),
}
"""CANN release: the torch_npu builds made for it. A build belongs to the torch of its first three numbers."""

NPU_WITHOUT_CANN = ("2.14.0", "2.13.0", "2.7.1.post11")
"""Further builds that every call was compared with; their authors do not say for which CANN."""


@dataclass(frozen=True)
class Trial:
    """A combination of versions (or of a Megatron-LM tag, for its scripts) that was run, and how far.

    Attributes:
        platform: the platform it ran on.
        megatron_core: versions of megatron-core, separated by commas.
        torch: versions of torch and its backend.
        python: the minor version of Python.
        extent: which part of the tests ran.
        suite: the extent is the test suite: this pair of Python and megatron-core is proven.
    """

    platform: str
    megatron_core: str
    torch: str
    python: str
    extent: str
    suite: bool = False


TRIALS = (
    Trial("cpu", "0.16.1", "2.13.0", "3.11", "the whole suite, worlds of one, two and four processes", True),
    Trial("cpu", "0.15.3", "2.13.0", "3.11", "the suite without what 0.15 lacks or does otherwise", True),
    Trial(
        "cpu",
        "0.17.1, 0.18.0, 0.19.2",
        "2.13.0",
        "3.11",
        "three steps of eleven small models on one process: losses equal to 0.16.1's, not the suite",
    ),
    Trial(
        "cpu",
        "0.19.2",
        "2.13.0",
        "3.11",
        "three steps in six layouts of two processes: losses equal to 0.16.1's, not the suite",
    ),
    Trial(
        "cpu",
        "0.19.2",
        "2.13.0",
        "3.12",
        "losses and norms of ten kinds of models on two processes equal to 0.16.1's "
        "(`test_losses_of_cores.py`), and to those of Megatron-LM core_v0.16.1's own script "
        "(`test_recorded_losses.py`); bytes and calls of dry runs equal to those of runs (`test_dry_run.py`)",
    ),
    Trial(
        "cpu",
        "0.19.2",
        "2.13.0",
        "3.12",
        "the suite but for its left-out tests, once: 8,383 tests passed; of what failed, not all ran again "
        "after it was mended",
    ),
    Trial(
        "cpu",
        "0.19.2",
        "2.13.0",
        "3.13",
        "`bootstrap.py demo` on a Python with nothing installed: tokenizer, training, resume, samples",
    ),
    Trial("cpu", "Megatron-LM core_v0.16.1", "2.13.0", "3.11", "losses of its own scripts, step by step"),
    Trial(
        "cpu",
        "Megatron-LM core_v0.17.1, core_v0.18.2, core_v0.19.0",
        "2.13.0",
        "3.12",
        "losses of pretrain_gpt.py with the adaptor, step by step, equal to the untouched script's",
    ),
    Trial(
        "npu",
        "0.16.1",
        "2.13.0, torch_npu 2.13.0",
        "3.11",
        "every use of torch_npu: arguments, shapes, gradients, with a stand-in for CANN; no kernel",
    ),
)
"""Combinations that were run; none on a CUDA device or an NPU."""


def proven_pairs() -> tuple[tuple[str, str], ...]:
    """Return the pairs of Python's minor version and megatron-core that the test suite was run on."""
    return tuple((one.python, one.megatron_core) for one in TRIALS if one.suite)


def is_proven(python: str, megatron_core: str) -> bool:
    """Return whether the suite was run on a megatron-core and on a Python of the same minor version."""
    minor = ".".join(python.split(".")[:2])
    return any(one == minor and matches(megatron_core, f"=={core}") for one, core in proven_pairs())


def matches(version: str, versions: str) -> bool:
    """Test a version against a PEP 440 specifier; local parts (``+cu126``) do not count."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        public = Version(version).public
    except InvalidVersion:
        return False
    return SpecifierSet(versions).contains(public, prereleases=True)


def same_release(left: str, right: str) -> bool:
    """Test that two versions share major, minor and micro (torch 2.7.1+cpu, torch_npu 2.7.1.post2)."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(left).release[:3] == Version(right).release[:3]
    except InvalidVersion:
        return False
