"""Losses between a script's function, stages and the schedule; additions to them, and their reduction."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.run import Loss, StepResult
from mindspeed_megatron.loss import is_mean, loss_of, schedule_loss
from mindspeed_megatron.loss_reduction import reduce_losses, with_same_names
from mindspeed_megatron.losses import Losses
from mindspeed_testing import run_world


def test_a_loss_of_two_values_is_a_mean_and_counts_as_one_token():
    loss = loss_of((torch.tensor(2.0), {"lm loss": torch.tensor([2.0, 1.0])}))
    assert (loss.averaged, int(loss.num_tokens)) == (True, 1)
    assert len(schedule_loss(loss, averaged=True)) == 2


def test_what_is_reported_survives_the_division_of_the_loss():
    total = torch.tensor(6.0)
    loss = loss_of((total, torch.tensor(3.0), {"lm loss": total}))
    given, num_tokens, report = schedule_loss(loss)
    given /= 3
    assert num_tokens.dtype == torch.int
    assert report["lm loss"].item() == 6.0


def test_a_mean_stays_one_in_a_record_of_its_own_and_a_sum_becomes_none():
    mean = loss_of((torch.tensor(2.0), {}))
    assert is_mean(Loss(mean.total * 2, mean.num_tokens, {}), mean)
    assert not is_mean(Loss(torch.tensor(8.0), torch.tensor(4), {}), mean)
    assert not is_mean(Loss(torch.tensor(8.0), torch.tensor(4), {}), None)


LM = {"lm loss": torch.tensor([8.0, 4.0])}
SUM = Loss(torch.tensor(8.0), torch.tensor(4.0), LM)
MEAN = loss_of((torch.tensor(2.0), LM))


@pytest.mark.parametrize("tokens", [4, torch.tensor(4.0), SUM.num_tokens], ids=["number", "count", "its own"])
def test_adding_to_a_sum_counts_like_its_tokens(tokens):
    more = SUM.plus("z", torch.tensor(20.0), tokens, weight=0.1)
    assert float(more.total) == 8.0 + 0.1 * 20.0
    assert more.num_tokens is SUM.num_tokens
    assert more.report["z"].tolist() == [20.0, 4.0]
    assert SUM.report.keys() == {"lm loss"}


def test_adding_to_a_mean_adds_a_mean():
    more = MEAN.plus("z", torch.tensor(20.0), torch.tensor(4), weight=0.1)
    assert float(more.total) == pytest.approx(2.0 + 0.1 * 20.0 / 4)
    assert more.report["z"].tolist() == [20.0, 4.0]
    assert is_mean(more, MEAN)


def test_an_addition_over_other_tokens_counts_as_its_mean():
    assert float(SUM.plus("z", torch.tensor(6.0), 2).total) == pytest.approx(4 * (2.0 + 3.0))
    assert float(MEAN.plus("z", torch.tensor(6.0), 2).total) == pytest.approx(2.0 + 3.0)


@pytest.mark.parametrize("loss", [SUM, MEAN], ids=["sum", "mean"])
def test_where_nothing_counts_nothing_is_added(loss):
    assert float(loss.plus("z", torch.tensor(0.0), 0).total) == float(loss.total)


@pytest.mark.parametrize(("loss", "more"), [(SUM, (2.0, torch.tensor(10.0))), (MEAN, (0.25,))])
def test_additions_before_and_after_scaling_are_the_same(loss, more):
    addition = ("z", torch.tensor(20.0), torch.tensor(4.0))
    before = loss.plus(*addition, weight=0.1).scaled(*more)
    after = loss.scaled(*more).plus(*addition, weight=0.1)
    assert (
        float(before.total)
        == pytest.approx(float(after.total))
        == pytest.approx(more[0] * (float(loss.total) + 2.0 / (1 if loss is SUM else 4)))
    )
    assert before.report["z"].tolist() == after.report["z"].tolist() == [20.0, 4.0]
    assert float(loss.scaled(*more).plus("z", addition[1], 4.0).total) == pytest.approx(
        more[0] * (float(loss.total) + 20.0 / (1 if loss is SUM else 4))
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lm loss", torch.tensor(1.0), 4), "reports 'lm loss' already"),
        (("z", torch.ones(2, 2), 4), r"shape \(2, 2\)"),
        (("z", torch.tensor(1.0), MEAN.num_tokens), "is a mean, its num_tokens is 1"),
    ],
)
def test_what_cannot_be_added_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        MEAN.plus(*arguments)


def session():
    records = {}
    return SimpleNamespace(platform=CpuPlatform(), state=lambda record: records.setdefault(record, record()))


def run_of(data=None, pipeline=None):
    sizes = {"dp_cp": data, "pp": pipeline}
    one = SimpleNamespace(size=lambda: 1)
    return SimpleNamespace(
        session=session(),
        pg=SimpleNamespace(**{name: group or one for name, group in sizes.items()}),
        dist=SimpleNamespace(device=torch.device("cpu")),
    )


def pair(total, count):
    return torch.tensor([float(total), float(count)])


def reduced(run, *reports, training=True):
    return reduce_losses(run.session, run, reports, training)


def test_numbers_are_read_when_somebody_looks():
    read = []
    losses = Losses(lambda: read.append(1) or {"a": 2.0}, {"a": 4.0})
    more = losses | {"b": 1.0}
    assert read == []
    assert dict(more) == {"a": 2.0, "b": 1.0}
    assert ({"b": 1.0} | losses) == more == {"a": 2.0, "b": 1.0}
    assert read == [1]
    assert pickle.loads(pickle.dumps(more)) == {"a": 2.0, "b": 1.0}
    assert more.counts == {"a": 4.0}


def test_names_may_differ_between_micro_batches():
    losses = reduced(
        run_of(), {"a": pair(6, 2)}, {"b": pair(1, 1)}, {"a": pair(2, 2), "c": torch.tensor(5.0)}
    )
    assert losses == {"a": 2.0, "b": 1.0, "c": 5.0}
    assert losses.counts == {"a": 4.0, "b": 1.0, "c": 1.0}


def test_a_step_knows_how_many_tokens_counted():
    losses = reduced(run_of(), {"lm loss": pair(6, 2)}, {"lm loss": pair(4, 3)})
    result = StepResult(losses, skipped=False, grad_norm=None, num_zeros=None, counts=losses.counts)
    assert result.loss_tokens == 5
    assert StepResult({}, skipped=False, grad_norm=None, num_zeros=None).loss_tokens is None


def different_names():
    import torch.distributed as dist

    from mindspeed_megatron.instruments.communication import count_communication

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = run_of(data=dist.group.WORLD)
    steps = (
        ({"lm loss": pair(4, 2), "a": pair(1, 1)}, {"lm loss": pair(6, 1), "b": pair(3, 1)}),
        ({"b": pair(5, 1), "lm loss": pair(2, 2)}, {"lm loss": pair(2, 2)}),
        ({"lm loss": pair(2, 2)}, {"new": pair(9, 3), "lm loss": pair(4, 2)}),
        ({"lm loss": pair(2, 2)}, {"new": pair(9, 3), "lm loss": pair(4, 2)}),
    )
    found = []
    for step in steps:
        with count_communication() as log:
            losses = dict(reduced(data, step[rank]))
        found.append((losses, len(log.calls)))
    evaluated = dict(reduced(data, {f"set {rank}": pair(rank, 1)}, training=False))
    padded = run_of(data=dist.group.WORLD)
    same = [with_same_names(padded, [step[rank]], training=True)[0] for step in steps]
    pipeline = run_of(pipeline=dist.group.WORLD)
    staged = reduced(pipeline, *([{"lm loss": pair(3, 2)}] if rank else []))
    dist.barrier()
    dist.destroy_process_group()
    names = [list(report) for report in same]
    return found, evaluated, names, same[1]["a"].tolist(), dict(staged), dict(staged.counts)


@pytest.fixture(scope="module")
def different():
    return run_world(different_names, 2)


def test_names_may_differ_between_ranks(different):
    for found, *_ in different:
        assert [losses for losses, _ in found] == [
            {"lm loss": 10 / 3, "a": 1.0, "b": 3.0},
            {"lm loss": 1.0, "b": 5.0},
            {"lm loss": 1.5},
            {"lm loss": 1.5, "new": 3.0},
        ]


def test_all_names_are_reduced_in_one_collective(different):
    for found, *_ in different:
        assert found[1][1] == found[2][1] == 1


def test_an_evaluation_has_every_name_at_once(different):
    for _, evaluated, *_ in different:
        assert evaluated == {"set 0": 0.0, "set 1": 1.0}


def test_reports_get_the_same_names_on_every_rank(different):
    for *_, names, _, _, _ in different:
        assert names == different[0][2]
        assert names[0] == ["lm loss", "a", "b"]
        assert names[3] == ["lm loss", "a", "b", "new"]
    assert different[1][3][0] == 0.0 < different[1][3][1] < 1e-30


def test_every_pipeline_stage_knows_the_losses(different):
    for *_, losses, counts in different:
        assert (losses, counts) == ({"lm loss": 1.5}, {"lm loss": 2.0})
