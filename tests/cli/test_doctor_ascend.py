"""The doctor on machines with Ascend software: versions, variables, packages that do not import."""

from dataclasses import replace

import pytest
from test_cli_doctor import SOUND

from mindspeed_megatron.devices import cann
from mindspeed_megatron.devices.npu import NpuPlatform
from mindspeed_megatron.doctor import ascend
from mindspeed_megatron.doctor.checks import examine

NPU = replace(SOUND, versions={**SOUND.versions, "torch_npu": "2.13.0"})
MISSING = "torch_npu 2.13.0 is installed, but CANN's library is not there; source set_env.sh"


def told(facts, subject):
    return [finding for finding in examine(facts) if finding.subject == subject]


@pytest.mark.parametrize(("devices", "severity"), [(0, "warning"), (8, "error")])
def test_a_torch_npu_without_cann_prevents_training_only_where_there_are_npus(devices, severity):
    [found] = [
        finding
        for finding in told(replace(NPU, cann_missing=MISSING, ascend_devices=devices), "torch_npu")
        if finding.severity != "ok"
    ]

    assert found.severity == severity
    assert found.remedy == "source set_env.sh"


def test_a_broken_extension_of_torch_does_not_call_for_another_torch():
    broken = "error: RuntimeError: Failed to load the backend extension: torch_npu."
    [found] = told(replace(SOUND, torch={"torch": broken, "backends": {}}), "torch import")

    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.remedy
    assert "force-reinstall" not in found.remedy


@pytest.mark.parametrize("name", ["flash_attn", "triton", "apex"])
def test_an_optional_package_that_does_not_import_is_named(name):
    facts = replace(SOUND, torch={**SOUND.torch, "optional": {name: "ImportError: libx.so"}})

    [found] = told(facts, name)
    assert found.severity == "warning"
    assert "libx.so" in found.observed


def test_transformer_engine_works_only_where_it_imports():
    facts = replace(SOUND, torch={**SOUND.torch, "optional": {"transformer_engine": "OSError: libcudnn"}})

    [found] = told(facts, "transformer-engine")
    assert "does not import" in found.observed


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HCCL_CONNECT_TIMEOUT": "3600", "HCCL_EXEC_TIMEOUT": "1800"}, "HCCL_EXEC_TIMEOUT"),
        ({"HCCL_EXEC_TIMEOUT": "0"}, "HCCL_EXEC_TIMEOUT"),
        ({"HCCL_EXEC_TIMEOUT": "1800", "ACL_DEVICE_SYNC_TIMEOUT": "60"}, "ACL_DEVICE_SYNC_TIMEOUT"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING"),
        ({"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "2"}, "TASK_QUEUE_ENABLE"),
        ({"TASK_QUEUE_ENABLE": "0"}, "TASK_QUEUE_ENABLE"),
        ({"HCCL_BUFFSIZE": "many"}, "HCCL_BUFFSIZE"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "sixty"}, "HCCL_HOST_SOCKET_PORT_RANGE"),
        ({"HCCL_IF_BASE_PORT": "50000", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, "HCCL_IF_BASE_PORT"),
        ({"HCCL_WHITELIST_DISABLE": "0"}, "HCCL_WHITELIST_DISABLE"),
        ({"HCCL_CONNECT_TIMEOUT": "60"}, "HCCL_CONNECT_TIMEOUT"),
        ({"HCCL_CONNECT_TIMEOUT": "ten minutes"}, "HCCL_CONNECT_TIMEOUT"),
        ({"HCCL_IF_BASE_PORT": "80"}, "HCCL_IF_BASE_PORT"),
        ({"HCCL_NPU_SOCKET_PORT_RANGE": "60050-60000"}, "HCCL_NPU_SOCKET_PORT_RANGE"),
        ({"HCCL_NPU_SOCKET_PORT_RANGE": "60000-60050,60040"}, "HCCL_NPU_SOCKET_PORT_RANGE"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "80,60000"}, "HCCL_HOST_SOCKET_PORT_RANGE"),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"},
            "PYTORCH_NPU_ALLOC_CONF",
        ),
        ({"CPU_AFFINITY_CONF": "on"}, "CPU_AFFINITY_CONF"),
    ],
)
def test_variables_that_contradict_each_other_are_named_with_the_way_out(variables, named):
    found = [finding for finding in ascend.check_variables(variables) if finding.subject == named]

    assert found
    assert all(finding.remedy for finding in found)


def test_usual_variables_are_not_worth_a_word():
    usual = {
        "HCCL_CONNECT_TIMEOUT": "1200",
        "HCCL_EXEC_TIMEOUT": "1800",
        "HCCL_BUFFSIZE": "400",
        "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050,60100",
        "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "CPU_AFFINITY_CONF": "1,npu0:0-1",
        "TASK_QUEUE_ENABLE": "2",
    }

    assert list(ascend.check_variables(usual)) == []


def test_versions_are_read_where_their_files_tell_them(tmp_path):
    driver = tmp_path / "usr/local/Ascend/driver/version.info"
    driver.parent.mkdir(parents=True)
    driver.write_text("Version=25.0.rc1\nascendhal_version=7.35\n")
    (tmp_path / "version.cfg").write_text("runtime_running_version=[8.3.RC1:8.3.RC1]\n")

    found = ascend.ascend_versions({"ASCEND_TOOLKIT_HOME": str(tmp_path)}, tmp_path)

    assert found == {"driver": "25.0.rc1", "CANN": "8.3.RC1"}


@pytest.mark.parametrize(("installed", "older"), [("8.2.RC1", True), ("8.5.0", False), ("9.0.0", False)])
def test_a_cann_older_than_the_build_was_made_for_is_named(installed, older):
    builds = {"8.5.0": ("2.9.0",), "8.2.RC1": ("2.6.0",)}
    found = [
        one
        for one in ascend.check_versions({"CANN": installed}, "2.9.0", builds)
        if one.severity == "warning"
    ]

    assert bool(found) == older


CALLS = [("npu_swiglu takes no dim (ops/swiglu.py:12)", False), ("npu_x is absent (ops/x.py:3)", True)]


@pytest.mark.parametrize(
    ("build", "calls", "severities"),
    [
        ("2.99.0", CALLS, ["warning", "note"]),
        ("2.99.0", [], ["note"]),
        ("2.9.0", CALLS[1:], ["note"]),
        ("2.9.0", [], []),
    ],
)
def test_calls_that_a_build_does_not_take_are_named(build, calls, severities):
    found = list(ascend.check_calls(build, calls, {"9.0.0": ("2.10.0", "2.9.0.post2")}))

    assert [one.severity for one in found] == severities
    text = " ".join(one.observed for one in found)
    assert all(call in text for call, _ in calls)
    assert ("newer than every build that was checked (up to 2.10.0)" in text) == (build == "2.99.0")


def test_the_doctor_reads_the_calls_of_the_build_that_is_imported():
    facts = replace(NPU, torch={**NPU.torch, "torch_npu": "ok", "unserved": [list(call) for call in CALLS]})

    assert any("npu_swiglu takes no dim" in one.observed for one in told(facts, "torch_npu"))


def test_a_generation_that_nobody_knows_is_named_with_the_rules_that_are_assumed():
    facts = replace(NPU, torch={**NPU.torch, "npu": ["Ascend910B1", "Ascend1100X1", "Ascend1100X1"]})

    [found] = told(facts, "npu")
    assert "Ascend1100X1" in found.observed
    assert "rules of 910B" in found.observed


@pytest.fixture
def without_cann(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cann, "installed_version", lambda name: "2.13.0")
    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setattr(cann, "sys", type("sys", (), {"modules": {}}))
    cann.libraries_missing.cache_clear()
    yield
    cann.libraries_missing.cache_clear()


def test_a_program_goes_on_without_a_torch_npu_that_cannot_be_imported(without_cann, monkeypatch):
    monkeypatch.delenv(cann.AUTOLOAD, raising=False)
    cann.hold_back_torch_npu()

    assert cann.os.environ[cann.AUTOLOAD] == "0"


def test_a_user_s_own_setting_stays(without_cann, monkeypatch):
    monkeypatch.setenv(cann.AUTOLOAD, "1")
    cann.hold_back_torch_npu()

    assert cann.os.environ[cann.AUTOLOAD] == "1"


def test_the_platform_says_which_file_to_source(without_cann, monkeypatch):
    monkeypatch.setattr("mindspeed_megatron.devices.npu.installed_version", lambda name: "2.13.0")

    verdict = NpuPlatform.probe()
    assert not verdict.available
    assert "set_env.sh" in verdict.reason


def test_ports_of_the_host_and_of_devices_do_not_contradict_each_other():
    both = {"HCCL_IF_BASE_PORT": "50000", "HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050"}

    assert list(ascend.check_variables(both)) == []


def test_a_build_that_was_compared_is_not_called_newer():
    facts = replace(NPU, torch={**NPU.torch, "torch_npu": "ok", "unserved": []})

    assert not any("newer than every build" in one.observed for one in told(facts, "torch_npu"))
