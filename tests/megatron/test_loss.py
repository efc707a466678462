"""Losses between a script's function, stages and the schedule."""

import torch

from mindspeed_core.megatron.loss import loss_of, schedule_loss


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
