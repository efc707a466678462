"""The estimate is the one of the paper, and what it is made from is what a training really has."""

import pytest

from acme_noise_scale.estimator import NoiseScale
from mindspeed_core.testing.contract import contract_checks


def test_exact_norms_give_exact_signal_and_noise():
    scale = NoiseScale(0.0)
    signal, noise = 4.0, 24.0
    scale.update(signal + noise / 2, signal + noise / 16, small_batch=2, big_batch=16)

    assert scale.signal == pytest.approx(signal)
    assert scale.noise == pytest.approx(noise)


def test_many_noisy_steps_find_the_noise_scale_of_a_known_distribution():
    import torch

    generator = torch.Generator().manual_seed(1)
    gradient = torch.full((64,), 0.25)  # |G|^2 = 4
    scale = NoiseScale(0.999)
    for _ in range(4000):
        samples = gradient + 0.5 * torch.randn(16, 64, generator=generator)  # S = 64 * 0.25 = 16
        small, big = samples[0].square().sum(), samples.mean(dim=0).square().sum()
        scale.update(float(small), float(big), small_batch=1, big_batch=16)

    assert scale.noise / scale.signal == pytest.approx(4.0, rel=0.1)


def test_the_averages_keep_their_share_of_the_past():
    scale = NoiseScale(0.75, signal=8.0, noise=8.0)
    scale.update(4.0, 4.0, small_batch=1, big_batch=2)

    assert (scale.signal, scale.noise) == pytest.approx((0.75 * 8 + 0.25 * 4, 0.75 * 8))


FLAGS = ("--acme-noise-scale", "0.5", "--clip-grad", "0")


def one_step(*flags):
    """Train one step; its gradient norm, and what was recorded."""
    from mindspeed_core import activate
    from mindspeed_core.hosts.standalone import loop
    from mindspeed_core.testing.model_flags import training_flags

    with activate(training_flags(flags, 1), host="standalone", platform="cpu") as session:
        run = loop.setup(session)
        result = session.call("train_step", run=run)
        recorded = {name: value for name, (_, value, _) in run.metrics.local().items()}
        state = session.collect("checkpoint_state", run=run)
        loop.teardown(session)
    return result.grad_norm, recorded, state


def one_and_four_samples():
    return one_step("--global-batch-size", "1", "--clip-grad", "0"), one_step(*FLAGS)


def test_the_small_norm_is_that_of_a_training_on_the_first_sample_alone(mindspeed_world):
    (((norm_of_one, _, _), (norm_of_four, recorded, state)),) = mindspeed_world(one_and_four_samples, 1)

    assert recorded["micro-batch gradient norm"] == pytest.approx(norm_of_one, rel=1e-5)
    noise = (norm_of_one**2 - norm_of_four**2) / (1 - 1 / 4)
    assert recorded["gradient noise"] == pytest.approx(noise / 2, rel=1e-4)
    assert state == [
        {"acme-noise-scale": {"signal": recorded["gradient signal"], "noise": recorded["gradient noise"]}}
    ]


def on_two_ranks(*layout):
    return one_step(*FLAGS, *layout)


def test_tensor_parallelism_sees_the_same_norm_and_every_rank_the_same_number(mindspeed_world):
    one = mindspeed_world(on_two_ranks, 1)[0][1]
    first, second = mindspeed_world(on_two_ranks, 2, "--tensor-model-parallel-size", "2")

    assert first[1] == second[1]
    assert first[1]["micro-batch gradient norm"] == pytest.approx(one["micro-batch gradient norm"], rel=1e-4)


def test_a_step_of_one_micro_batch_is_refused_with_the_way_out(mindspeed_world):
    from mindspeed_core.testing import WorldError

    with pytest.raises(WorldError, match="use --global-batch-size 4 or more"):
        mindspeed_world(on_two_ranks, 2, "--global-batch-size", "2")


@pytest.mark.parametrize("check", contract_checks("acme-noise-scale", platform="cpu"), ids=str)
def test_the_contract_is_kept(check):
    check()
