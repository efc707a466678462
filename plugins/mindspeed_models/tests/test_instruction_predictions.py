"""Predictions of further tokens of conversations: those of answers are trained, each by its own label."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.unwrap import unwrap
from mindspeed_models.features.instruction_proofs import write_samples
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import run_world
from mindspeed_train.interface import setup

AHEAD = 2


def of_one_sample(folder):
    """Losses of a step of one sample, and those of its predictions' logits by hand."""
    flags = (
        *("--data-path", f"{folder}/samples", "--split", "1,0,0", "--is-instruction-dataset"),
        *("--seq-length", "128", "--global-batch-size", "1", "--mtp-num-layers", str(AHEAD)),
        *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    )
    try:
        with activate(training_flags(flags, 4), platform="cpu", host="standalone") as session:
            run = setup(session)
            model = unwrap(run.model[0])
            hidden = []
            model.mtp.register_forward_hook(lambda module, inputs, output: hidden.append(output.detach()))
            sample = run.datasets.train[0]
            weight = model.output_layer.weight.detach().clone()
            result = session.call("train_step", run=run)
            states = hidden[0].chunk(1 + AHEAD)
            ids, labels, counts = (np.asarray(sample[name]) for name in ("tokens", "labels", "loss_mask"))
            found = []
            for ahead in range(1, AHEAD + 1):
                # The prediction at a position is of the label that stands so many positions further on.
                logits = states[ahead][: len(ids) - ahead, 0] @ weight.T
                wanted = torch.as_tensor(labels[ahead:])
                mask = torch.as_tensor(counts[ahead:] > 0)
                found.append(float(functional.cross_entropy(logits[mask], wanted[mask])))
            return dict(result.losses), found, int((counts > 0).sum()), len(ids)
    finally:
        destroy_megatron_state()


@pytest.fixture(scope="module")
def one_sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder)
    (found,) = run_world(of_one_sample, 1, str(folder))
    return found


def test_a_prediction_is_trained_where_its_own_label_is_an_answer(one_sample):
    losses, expected, answers, length = one_sample
    assert 0 < answers < length
    assert [losses[f"mtp_{ahead} loss"] for ahead in (1, 2)] == pytest.approx(expected, rel=1e-6)
