"""A schedule of the learning rate that a feature brings, in a loop of one's own."""

import pytest

from mindspeed_core import activate
from mindspeed_testing.worlds import run_world


def own_schedule():
    from types import SimpleNamespace

    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    session = activate({"lr_decay_style": "toy-polynomial", "toy_power": 3.0}, platform="cpu")
    group = {"max_lr": 1.0, "min_lr": 0.0}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=2,
        lr_decay_steps=6,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=6,
        wd_incr_style="constant",
    )
    assert session.wrap_scheduler(scheduler) is scheduler
    rates = []
    for _ in range(6):
        scheduler.step(1)
        rates.append(group["lr"])
    session.close()
    try:
        scheduler.num_steps = 4
        scheduler.step(0)
    except Exception as error:
        return rates, str(error)


def test_a_schedule_of_ones_own_follows_a_feature_while_the_session_is_open():
    rates, error = run_world(own_schedule, 1)[0]
    assert rates == pytest.approx([0.5, 1.0, 0.75**3, 0.5**3, 0.25**3, 0.0])
    assert "toy-polynomial decay style is not supported" in error
