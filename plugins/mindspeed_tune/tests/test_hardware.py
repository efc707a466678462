import pytest

from mindspeed_core.errors import UserError
from mindspeed_tune.hardware import read_hardware, shipped
from mindspeed_tune.rank_lists import RankList
from mindspeed_tune.record import Group
from mindspeed_tune.roofline import communication_seconds

GOOD = """
[device]
name = "test chip"
memory = "64 GiB"
bf16 = "100 TFLOP/s"
memory_bandwidth = "1 TB/s"
[links]
within_node = "100 GB/s"
between_nodes = "200 Gbit/s"
latency_between_nodes = "30 us"
"""


def _file(tmp_path, text):
    path = tmp_path / "chip.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", shipped())
def test_files_that_come_along_say_sources_and_what_is_assumed(name):
    found = read_hardware(name)
    assert found.memory >= 60e9
    assert found.sources
    assert "efficiency.matrix" in found.unverified
    assert found.bandwidth(True) <= found.bandwidth(False)


def test_units_become_bytes_operations_and_seconds(tmp_path):
    found = read_hardware(_file(tmp_path, GOOD))
    assert found.memory == 64 * 2**30
    assert found.flops["bfloat16"] == 1e14
    assert found.flops["float16"] == 1e14
    assert found.between_nodes == 25e9
    assert found.latency(True) == pytest.approx(30e-6)
    assert found.devices == 8


def test_a_collective_has_its_own_speed_where_the_file_names_it(tmp_path):
    halved = GOOD.replace("[links]", "[collectives]\nreduce_scatter = 0.5\n[links]")
    found = read_hardware(_file(tmp_path, halved))
    group = Group("data", RankList(0, ((2, 1),)))
    # Of an all-reduce a rank sends as much as it has, of the others half of it.
    taken = {
        name: communication_seconds(name, group, 0, size, found)
        for name, size in (
            ("all_reduce", 1e9),
            ("reduce_scatter_tensor", 1e9),
            ("all_gather_into_tensor", 0.5e9),
        )
    }
    assert taken["reduce_scatter_tensor"] == pytest.approx(taken["all_reduce"])
    assert taken["all_gather_into_tensor"] == pytest.approx(taken["all_reduce"] / 2)
    assert found.bandwidth(False) == pytest.approx(70e9)


def test_an_update_in_place_has_its_own_speed_where_the_file_names_it(tmp_path):
    usual = read_hardware(_file(tmp_path, GOOD))
    assert usual.update_seconds(7e11) == pytest.approx(1.0)
    fast = GOOD.replace('bandwidth = "1 TB/s"', 'bandwidth = "1 TB/s"\nupdate_bandwidth = "3.5 TB/s"')
    assert read_hardware(_file(tmp_path, fast)).update_seconds(7e11) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('memory = "64 GiB"', "memory = 64", r"device\.memory is 64; give a number with a unit of bytes"),
        ('memory = "64 GiB"', 'memory = "64 Gib"', r"device\.memory has the unit 'Gib'"),
        ('memory = "64 GiB"', 'memory = "-64 GiB"', r"device\.memory is '-64 GiB', which is not above 0"),
        ('memory = "64 GiB"', 'memory = "64 TFLOP/s"', r"the unit 'TFLOP/s', which is none of bytes"),
        ('memory = "64 GiB"', 'mem = "64 GiB"', r"device\.mem is unknown; there are name, memory"),
        ('memory = "64 GiB"', "", r"device\.memory is missing"),
        ("[links]", "[wires]", "wires is no section; there are device, node, links"),
        ("[links]", "[efficiency]\nmatrix = 1.5\n[links]", r"efficiency\.matrix is 1\.5; it is a part"),
        (
            "[links]",
            "[efficiency]\nmatrix = -0.5\n[links]",
            r"efficiency\.matrix is -0\.5, which is not above",
        ),
        ("[links]", "[node]\ndevices = 2.5\n[links]", r"node\.devices is 2\.5; give a whole number"),
        ("[links]", "[collectives]\nbroadcast = 1.0\n[links]", "collectives.broadcast is unknown; there are"),
        ("[links]", "[collectives]\nall_to_all = 0\n[links]", r"collectives\.all_to_all is 0, which is not"),
        ("[device]", "[device", "no TOML"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_key(tmp_path, old, new, message):
    with pytest.raises(UserError, match=message) as caught:
        read_hardware(_file(tmp_path, GOOD.replace(old, new)))
    assert str(caught.value).startswith("--plan-hardware ")
    assert "\n" not in str(caught.value)


def test_an_absent_file_lists_those_that_come_along():
    with pytest.raises(UserError, match=r"nowhere\.toml: cannot be read.*ascend-910b"):
        read_hardware("nowhere.toml")
