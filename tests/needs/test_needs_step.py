"""Needs of a training step: batches, losses, boundaries, schedules, gradients, updates, numbers."""

import pytest
import torch
import torch.distributed as dist
from toy_training import (
    PP2,
    TP2,
    distance,
    gradients,
    logged,
    losses,
    opened,
    parameters,
    same_on_all_ranks,
    step,
    training,
)

from mindspeed_core.feature import hookimpl
from mindspeed_testing import run_world
from mindspeed_toy_needs.documents import describe, visible

SEPARATOR = "7"


class DenseMask:
    """Return what toy-documents describes as a dense mask for megatron-core's own attention."""

    @hookimpl(wrapper=True)
    def get_batch(self):
        batch = yield
        boundaries = describe(batch.tokens, int(SEPARATOR)).cu_seqlens_q
        self.documents = len(boundaries) - 1
        return batch.with_(attention_mask=~visible(boundaries)[None, None])


def documents():
    # The made-up samples count up through the vocabulary: a small one has the separator in every window.
    three = ("--num-layers", "3", "--global-batch-size", "6", "--vocab-size", "16")
    probe = DenseMask()
    with training(*three, probes=(probe,)) as run:
        initial = parameters(run)
        step(run)
        expected = gradients(run)
        dense = losses(run)
    with training(*three, initial=initial) as run:
        step(run)
        causal = losses(run)
    with training(
        *three, "--pipeline-model-parallel-size", "3", "--toy-documents", SEPARATOR, initial=initial
    ) as run:
        step(run)
        difference = distance(expected, gradients(run))
        return probe.documents, dense, causal, losses(run), difference


def test_the_description_of_the_batch_reaches_attention_on_a_middle_stage():
    for count, dense, causal, piped, difference in run_world(documents, 3):
        assert count > 1
        assert piped == pytest.approx(dense, rel=1e-5)
        assert causal != pytest.approx(dense, rel=1e-5)
        assert difference < 1e-5


class BatchProbe:
    def __init__(self):
        self.batches = []

    @hookimpl(wrapper=True)
    def get_batch(self):
        batch = yield
        self.batches.append(batch)
        return batch


def exact_loss():
    flags = ("--global-batch-size", "1", "--toy-token-weights", "late", "--toy-weight-factor", "3.0")
    probe = BatchProbe()
    with training(*flags, probes=(probe, NoUpdate())) as run:
        result = step(run)
        (batch,) = probe.batches
        model = run.model[0].module
        found = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
        token_losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
        weights = 3.0 * torch.linspace(0, 1, 32)
        expected = (token_losses[0] * weights * batch.loss_mask[0]).sum() / batch.loss_mask.sum()
        by_hand = torch.autograd.grad(expected, list(model.parameters()))
    error = max(
        float((found[name] - gradient).abs().max())
        for (name, _), gradient in zip(model.named_parameters(), by_hand)
    )
    return result.losses, float(expected), error


class NoUpdate:
    """Keeps the parameters, so that a step's gradients can be computed again."""

    @hookimpl
    def optimizer_step(self):
        from mindspeed_core.run import OptimizerStep

        return OptimizerStep(True, None, None)


def test_loss_and_gradients_of_a_feature_equal_hand_computation():
    ((reported, expected, error),) = run_world(exact_loss, 1)
    assert reported["weighted loss"] == pytest.approx(expected, rel=1e-6)
    assert reported["lm loss"] != pytest.approx(expected, rel=1e-2)
    assert error < 1e-6


def boundary():
    with training(*PP2) as run:
        initial = parameters(run)
        plain_shape = run.boundary.tensors[0].shape
        plain = losses(run)
        expected = parameters(run)
    with training(*PP2, "--toy-double-boundary", initial=initial) as run:
        from mindspeed_megatron.instruments.communication import count_communication

        shape = run.boundary.tensors[0].shape
        with count_communication() as log:
            doubled = losses(run)
        group = [call.input_bytes for call in log.calls if call.operation in ("send", "isend")]
        return plain_shape, shape, plain, doubled, distance(expected, parameters(run)), max(group)


def test_tensors_of_another_shape_cross_a_stage_boundary():
    for plain_shape, shape, plain, doubled, difference, sent in run_world(boundary, 2):
        assert plain_shape == (32, 1, 64)
        assert shape == (32, 1, 128)
        assert doubled == plain
        assert difference == 0.0
        assert sent == 32 * 128 * 4


class ContextProbe:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def forward_step(self, run):
        self.seen.append((run.context.vp_stage, run.context.microbatch))
        return (yield)


def schedule():
    with training(*PP2) as run:
        initial = parameters(run)
        plain = losses(run)
        trained = parameters(run)
    probe = ContextProbe()
    with training(*PP2, "--toy-sequential-schedule", initial=initial, probes=(probe,)) as run:
        same = losses(run)
        after = run.context.microbatch
        return plain, same, distance(trained, parameters(run)), probe.seen, after


def test_a_schedule_is_replaced_and_wrapped_code_knows_its_microbatch():
    for plain, same, difference, seen, after in run_world(schedule, 2):
        # Gradients of micro-batches are added in another order: the losses after a step round differently.
        assert same == pytest.approx(plain, rel=1e-6)
        assert difference < 1e-6
        assert seen == [(None, index) for index in range(4)] * 2
        assert after == -1


def interleaved_context():
    probe = ContextProbe()
    virtual = ("--num-layers-per-virtual-pipeline-stage", "1")
    with training(*PP2, *virtual, probes=(probe,)) as run:
        step(run)
        return sorted(probe.seen)


def test_wrapped_code_knows_chunk_and_microbatch_in_an_interleaved_schedule():
    for seen in run_world(interleaved_context, 2):
        assert seen == [(chunk, index) for chunk in range(2) for index in range(4)]


def norm_gradients():
    with training(*TP2, "--clip-grad", "0") as run:
        initial = parameters(run)
        step(run)
        plain = gradients(run)
    with training(*TP2, "--clip-grad", "0", "--toy-norm-gradients", initial=initial) as run:
        step(run)
        changed = gradients(run)
    keys = [
        key
        for key in plain.tensors
        if not torch.allclose(plain.tensors[key], changed.tensors[key], atol=1e-7)
    ]
    ratio = changed.tensors[keys[0]] / plain.tensors[keys[0]]
    return keys, float(ratio.min()), float(ratio.max())


def test_gradients_are_reduced_over_another_group():
    for keys, low, high in run_world(norm_gradients, 2):
        assert sorted(keys) == ["decoder.final_layernorm.bias", "decoder.final_layernorm.weight"]
        assert low == pytest.approx(2.0, rel=1e-4)
        assert high == pytest.approx(2.0, rel=1e-4)


def exchange():
    with training(*TP2) as run:
        initial = parameters(run)
        plain = losses(run, 4)
        expected = parameters(run)
    with training(*TP2, "--toy-exchange-mlp", initial=initial) as run:
        weight = run.model[0].module.decoder.layers[0].mlp.linear_fc1.weight
        moved = losses(run, 3)
        here = weight.detach().clone()
        other = torch.empty_like(here)
        found = parameters(run)
        unchanged = torch.equal(here, weight)
        rank = dist.get_rank()
        full = found.tensors["decoder.layers.0.mlp.linear_fc1.weight"]
        other = full.reshape(-1, full.shape[-1]).chunk(2)[1 - rank]
        swapped = torch.equal(other, here)
        moved += losses(run, 1)
        return plain, moved, distance(expected, parameters(run)), unchanged, swapped


def test_parameters_and_optimizer_state_move_between_ranks_after_a_step():
    for plain, moved, difference, unchanged, swapped in run_world(exchange, 2):
        assert moved == pytest.approx(plain, rel=1e-6)
        assert difference < 1e-5
        assert unchanged
        assert swapped


def numbers():
    with training(*PP2, "--toy-numbers") as run:
        first = logged(run)
        second = logged(run)
        return first, second, same_on_all_ranks(second["toy largest token loss"])


def test_numbers_come_from_the_rank_that_owns_the_loss():
    for first, second, same in run_world(numbers, 2):
        assert first["toy largest token loss"] > first["loss"] > 0
        assert first["toy last microbatch"] == 3.0
        assert first["toy steps"] == second["toy steps"] == 1.0
        assert second["toy perplexity"] == 2.0 ** second["loss"]
        assert same


def snapshot():
    with training("--hidden-dropout", "0.1") as run:
        initial = parameters(run)
        plain = losses(run)
    with training("--hidden-dropout", "0.1", "--toy-snapshot", initial=initial) as run:
        same = losses(run)
        run.metrics.clear()
        numbers = logged(run)
        found = float(next(run.model[0].parameters()).main_grad.norm())
        return plain, same, found, numbers


def test_the_platform_object_serves_streams_buffers_generators_and_memory():
    ((plain, same, norm, numbers),) = run_world(snapshot, 1)
    assert same == plain
    # The update clips the gradient after the copy was taken.
    assert numbers["toy snapshot norm"] >= norm * 0.999
    assert 0 < numbers["toy memory share"] < 1
    assert numbers["toy asynchronous"] == 0.0
    assert numbers["toy dtypes"] >= 2


def bytes_by_kind():
    from mindspeed_megatron.instruments.communication import count_communication
    from mindspeed_megatron.instruments.kept_state import state_bytes
    from mindspeed_megatron.instruments.memory import TensorBytes

    with training("--toy-norm-gradients") as run:
        with count_communication() as log, TensorBytes() as tracker:
            step(run)
        size = sum(parameter.numel() for parameter in run.model[0].parameters())
        return (
            state_bytes(run),
            size,
            tracker.peak,
            log.sent_bytes(group="toy.norms"),
            log.count(group="toy.norms"),
        )


def test_bytes_are_counted_by_kind_and_by_group():
    for state, size, peak, sent, calls in run_world(bytes_by_kind, 2):
        assert state["parameter_bytes"] == 4 * size
        assert state["gradient_bytes"] >= 4 * size
        assert 8 * size <= state["optimizer_bytes"] < 9 * size
        assert peak > 0
        assert calls == 2
        assert sent == 2 * 64 * 4


def published_stage():
    with opened("--toy-token-weights", "late", "--toy-weight-factor", "2.0") as session:
        return session.implementations("toy_token_weights"), sorted(
            session.registry.extensions("toy.weight-rules")
        )


def test_another_plugin_extends_a_published_stage_and_extension_point():
    ((implementations, rules),) = run_world(published_stage, 1)
    assert implementations == ["toy-weight-factor", "toy-token-weights"]
    assert rules == ["late", "uniform"]
