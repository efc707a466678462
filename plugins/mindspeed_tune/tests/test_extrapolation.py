import json

import pytest
from synthetic_ranks import every_stage, record

from mindspeed_tune.extrapolate import whole
from mindspeed_tune.layout import Layout
from mindspeed_tune.record import RankRecord
from mindspeed_tune.traffic import compare

LAYOUTS = [Layout(1), Layout(8, tp=2), Layout(16, tp=2, pp=4), Layout(8, pp=8)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "runs", [((2, 1), (1, 1), (1, 2)), ((2, 0), (1, 0))], ids=["layers", "micro-batches"]
)
def test_extrapolated_numbers_are_those_of_the_exact_step(layout, runs):
    for small, exact in zip(every_stage(layout, runs=runs), every_stage(layout, runs=((8, 0),))):
        found, expected = whole(small), whole(exact)
        assert expected.exact
        assert not found.exact
        assert found.peak == pytest.approx(expected.peak)
        assert found.modules == pytest.approx(expected.modules)
        assert found.traffic.keys() == expected.traffic.keys()
        for key, counted in expected.traffic.items():
            assert found.traffic[key] == pytest.approx(counted)
        for name, numbers in expected.work.items():
            assert found.work[name] == pytest.approx(numbers)


def test_a_later_stage_of_the_same_kind_holds_fewer_micro_batches():
    layout = Layout(16, tp=2, pp=4)
    one = record(layout, layout.rank({"pp": 1}))
    for stage in (1, 2):
        expected = whole(record(layout, layout.rank({"pp": stage}), runs=((8, 0),)))
        assert whole(one, stage).peak == pytest.approx(expected.peak)


def test_passes_that_do_not_determine_the_step_are_refused():
    layout = Layout(4, pp=4)
    with pytest.raises(ValueError, match="another layer of kind 'dense'"):
        whole(record(layout, runs=((1, 1), (2, 1))))
    with pytest.raises(ValueError, match="another number of micro-batches"):
        whole(record(layout, runs=((1, 0),)))


@pytest.mark.parametrize("layout", [*LAYOUTS[1:], Layout(8, tp=2, pp=2, vpp=2)], ids=str)
def test_closed_forms_of_traffic_are_what_is_counted(layout):
    runs = ((8, 0),) if layout.vpp > 1 else ((2, 1), (1, 1), (1, 2))
    for found in every_stage(layout, runs=runs):
        compared = compare(found, whole(found).traffic)
        assert compared
        assert [one.difference for one in compared] == [0.0] * len(compared)


def test_a_wrong_count_shows_as_a_difference():
    layout = Layout(8, tp=2, pp=2)
    found = record(layout)
    counted = {key: (calls + 1, size) for key, (calls, size) in whole(found).traffic.items()}
    assert max(one.difference for one in compare(found, counted)) > 0


def test_a_record_survives_json():
    found = record(Layout(16, tp=2, pp=4), 5)
    again = RankRecord.from_json(json.loads(json.dumps(found.as_json())))
    assert again == found
