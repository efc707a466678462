"""A made-up megatron-core that is newer than every known one: what a run and the doctor make of it."""

from __future__ import annotations

import logging
import shutil

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_megatron.doctor.checks import check_touch_points
from mindspeed_megatron.doctor.facts import Facts
from mindspeed_megatron.touch_points import startup, survey

NEWER = "0.99.0"
SINKHORN = ("core/transformer/moe/moe_utils.py", "def sinkhorn(", "def balanced(")
"""Used by one family alone."""
ROTARY = (
    "core/models/common/embeddings/rope_utils.py",
    "global fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd",
    "global fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd; t = 1 * t",
)
PARAMETERS = (
    "core/models/common/embeddings/rope_utils.py",
    "    config: TransformerConfig,\n    cu_seqlens: Optional[Tensor] = None,",
    "    config: TransformerConfig,\n    cu_seqlens: Optional[Tensor] = None,\n    sign: int = 1,",
)
LOGITS = (
    "core/tensor_parallel/cross_entropy.py",
    "        # In-place subtraction reduces memory pressure.\n",
    "        vocab_parallel_logits = 1 * vocab_parallel_logits\n",
)
WRAPPER = (
    "core/distributed/__init__.py",
    "import DistributedDataParallel\n",
    "import DistributedDataParallel as Wrapper\n",
)
ROUTED = ("--num-experts", "4", "--fix-router", "--moe-token-dispatcher-type", "alltoall")
SESSION = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--platform", "cpu"]


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """``newer(*edits)``: the installed megatron-core with some texts replaced, under an unknown version."""
    original, compared = survey.sources_place(), installed_version("megatron-core")

    def make(*edits):
        place = tmp_path / f"site{len(list(tmp_path.iterdir()))}"
        shutil.copytree(
            original / "megatron",
            place / "megatron",
            ignore=lambda folder, names: [n for n in names if "." in n and not n.endswith(".py")],
        )
        for path, before, after in edits:
            file = place / "megatron" / path
            text = file.read_text()
            assert before in text, before
            file.write_text(text.replace(before, after, 1))
        monkeypatch.setattr(survey, "sources_place", lambda: place)
        monkeypatch.setattr(survey, "nearest", lambda version: compared)
        monkeypatch.setattr(startup, "installed_version", lambda name: NEWER)
        return survey.survey(NEWER)

    return make


def opened(*flags, host="library"):
    return prepare([*SESSION, *flags], host=host)


def test_the_doctor_counts_and_names_what_changed(newer):
    found = newer(SINKHORN)
    (finding,) = check_touch_points(Facts(survey=found))

    assert finding.severity == "warning"
    assert finding.observed == (
        f"{NEWER} is unknown: 1 of {found.points} touch points changed since {found.compared}: "
        "transformer.moe.moe_utils.sinkhorn is gone"
    )
    assert finding.remedy == f"pip install megatron-core=={found.compared}"


def test_the_doctor_notes_an_unknown_version_in_which_nothing_changed(newer):
    (finding,) = check_touch_points(Facts(survey=newer()))

    assert finding.severity == "note"
    assert ": 0 of " in finding.observed


def test_a_run_that_uses_nothing_of_it_warns_and_goes_on(newer, caplog, monkeypatch):
    newer(SINKHORN)
    monkeypatch.delenv("RANK", raising=False)
    with caplog.at_level(logging.WARNING, "mindspeed_core"):
        opened()

    assert f"megatron-core {NEWER} is unknown: 1 of " in caplog.text
    assert "sinkhorn is gone; none is in use" in caplog.text


def test_one_rank_warns_for_all(newer, caplog, monkeypatch):
    newer(SINKHORN)
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.WARNING, "mindspeed_core"):
        opened()

    assert caplog.text == ""


def test_a_feature_that_uses_it_is_refused_by_name(newer):
    newer(SINKHORN)
    with pytest.raises(UserError, match=r"sinkhorn is gone, in use by feature moe-") as failure:
        opened(*ROUTED)

    assert "pip install megatron-core==" in str(failure.value)


def test_a_replaced_function_with_another_source_is_refused(newer):
    newer(LOGITS)
    with pytest.raises(
        UserError, match="calculate_predicted_logits has another source, in use by feature aff"
    ):
        opened("--affinity-cross-entropy")


def test_a_wrapped_function_with_another_source_is_named(newer, caplog, monkeypatch):
    newer(ROTARY)
    monkeypatch.delenv("RANK", raising=False)
    with caplog.at_level(logging.WARNING, "mindspeed_core"):
        opened("--position-embedding-type", "rope", "--use-fused-rotary-pos-emb")

    assert "apply_rotary_pos_emb has another source; none is in use" in caplog.text


def test_a_wrapped_function_with_other_parameters_is_refused(newer):
    newer(PARAMETERS)
    with pytest.raises(UserError, match="apply_rotary_pos_emb takes sign too, in use by feature fused-rope"):
        opened("--position-embedding-type", "rope", "--use-fused-rotary-pos-emb")


def test_a_function_that_the_host_imports_at_once_is_refused(newer):
    newer(WRAPPER)
    with pytest.raises(UserError, match="in use by host library"):
        opened()


def test_strict_versions_refuses_what_was_not_tested(newer):
    newer()
    with pytest.raises(ArgumentError, match=rf"--strict-versions: megatron-core {NEWER} is installed, and"):
        opened("--strict-versions")


def test_strict_versions_takes_the_tested_one(monkeypatch):
    """Also where the suite runs with another one."""
    monkeypatch.setattr(startup, "installed_version", lambda name: "0.16.1")
    assert not opened("--strict-versions").is_open


def test_a_known_version_is_not_compared(monkeypatch):
    monkeypatch.setattr(survey, "survey", lambda *args: pytest.fail("compared"))
    opened()


def test_a_plugin_of_others_is_read_too(newer, tmp_path, monkeypatch):
    package = tmp_path / "acme_parts"
    package.mkdir()
    (package / "__init__.py").write_text("from megatron.core.utils import divide, no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    newer()
    found = survey.survey(NEWER, ["acme_parts"])

    assert [(str(change), change.modules) for change in found.changes] == [
        ("utils.no_such_name is gone", ("acme_parts",))
    ]
