"""Sessions of mode ``inference``: any length, masks of a program, caches of keys."""

from __future__ import annotations

import pytest
import torch

from mindspeed_core import activate, check
from mindspeed_core.activation import prepare
from mindspeed_core.errors import UserError
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop

LENGTH = 7
TP2_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear")


def logits(*flags, mask=None, training=False):
    """Return the logits of a text whose length no rank count divides."""
    command, mode = training_flags(flags, 1), "train" if training else "inference"
    with prepare(command, host="standalone", mode=mode, platform="cpu") as session:
        run = loop.setup(session)
        try:
            model = run.model[0].train(training)
            ids = torch.arange(LENGTH)[None] % 16
            with torch.no_grad():
                return model(ids, torch.arange(LENGTH)[None], mask)
        finally:
            loop.teardown(session)


def with_and_without_sharded_sequences():
    """Compare models of a world whose flags shard sequences with one whose flags do not."""
    return [
        torch.equal(logits(*TP2_SP, *more), logits(*TP2_SP[:2], *more))
        for more in ((), ("--use-ascend-coc",))
    ] + [logits(*TP2_SP, *EXPERTS).isfinite().all().item(), library_configuration()]


def library_configuration():
    """Ask a session for somebody's own loop for its configuration."""
    from megatron.core.transformer import TransformerConfig

    theirs = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    with activate([], configs=[theirs], mode="inference", platform="cpu") as session:
        return session.config(theirs).sequence_parallel is False and theirs.sequence_parallel


def test_flags_that_shard_sequences_are_taken_for_a_text_of_any_length():
    assert run_world(with_and_without_sharded_sequences, 2) == [[True] * 4] * 2


LATER = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()


def test_triangle_attention_takes_a_mask_outside_of_training():
    plain = logits()

    torch.testing.assert_close(logits("--triangle-attn"), plain)
    torch.testing.assert_close(logits("--triangle-attn", mask=LATER), plain)


def test_flags_of_packed_documents_are_left_out_where_each_text_is_one():
    torch.testing.assert_close(logits("--reset-attention-mask", mask=LATER), logits())
    args, notes = planned("--reset-attention-mask", "--reset-position-ids", "--fix-sub-seq-length", "8")
    assert not args.reset_attention_mask
    assert not args.reset_position_ids
    assert args.fix_sub_seq_length == -1
    assert sum("each text of a generation is a document of its own" in note for note in notes) == 3


@pytest.mark.parametrize(
    ("flags", "mask", "words"),
    [
        (("--triangle-attn",), LATER, "got a mask tensor; drop one"),
        (("--reset-attention-mask",), None, "session.batch in a loop of your own"),
        (("--reset-attention-mask",), LATER, "pass None, or leave out --reset-attention-mask"),
    ],
)
def test_what_training_cannot_compute_is_one_sentence_with_the_way_out(flags, mask, words):
    with pytest.raises(UserError, match=words):
        logits(*flags, mask=mask, training=True)


def test_stages_of_an_interleaved_pipeline_need_no_multiple_of_micro_batches():
    flags = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")

    assert check(training_flags(flags, 1), world_size=2, mode="inference").ok


def test_a_sequence_that_nobody_would_split_is_refused():
    flags = training_flags(("--context-parallel-size", "2"), 1)
    (problem,) = check(flags, world_size=2, mode="inference", platform="cpu").problems

    assert problem.flag == "--context-parallel-size"
    assert "use 1" in problem.remedy


def planned(*flags):
    """Return the arguments of a generation, and what is said of its flags."""
    from mindspeed_core.activation import plan_for

    plan, parsed = plan_for(training_flags(flags, 1), host="standalone", platform="cpu", mode="inference")
    return parsed.args, [str(note) for note in plan.flag_notes]


def test_what_only_a_training_acts_on_is_left_out_and_said():
    args, notes = planned(
        *("--sequence-parallel", "--overlap-grad-reduce", "--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    )
    assert not args.sequence_parallel
    assert not args.overlap_grad_reduce
    assert args.recompute_granularity is None
    assert args.num_virtual_stages_per_pipeline_rank is None
    text = "\n".join(notes)
    for flag in ("--sequence-parallel", "--overlap-grad-reduce", "--recompute-granularity full"):
        assert f"{flag} changes nothing here: " in text
    assert "--num-virtual-stages-per-pipeline-rank 2 changes nothing here" in text


def test_an_interleaved_pipeline_is_built_with_one_chunk_a_rank():
    assert run_world(chunks_of_an_interleaved_pipeline, 2) == [1, 1]


def chunks_of_an_interleaved_pipeline():
    """Count the chunks of a rank."""
    flags = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
    with prepare(training_flags(flags, 1), host="standalone", mode="inference", platform="cpu") as session:
        run = loop.setup(session)
        loop.teardown(session)
        return len(run.model)


def test_a_length_that_is_not_given_is_that_of_the_positions():
    flags = training_flags(("--max-position-embeddings", "64"), 1)
    at = flags.index("--seq-length")
    del flags[at : at + 2]
    from mindspeed_core.activation import plan_for

    _, parsed = plan_for(flags, host="standalone", platform="cpu", mode="inference")
    assert parsed.args.seq_length == 64


def prepared(folder):
    """Write a tokenizer and the checkpoint of an untrained model."""
    from mindspeed_train.text.tokenizer import train_tokenizer

    train_tokenizer(["the cat saw a dog and it ran"] * 3, 300).save(folder / "tokenizer.json")
    command = training_flags(("--save", str(folder / "saved"), *of_text(folder)), 1)
    with prepare(command, host="standalone", platform="cpu") as session:
        run = loop.setup(session)
        session.call("save_checkpoint", run=run, reason="end")
        loop.teardown(session)


def of_text(folder):
    """Return the flags of a model of text."""
    return (
        *("--tokenizer-model", str(folder / "tokenizer.json"), "--vocab-size", "300"),
        *("--max-position-embeddings", "32", "--position-embedding-type", "rope"),
    )


def continuations(folder, ways):
    """Continue a prompt under each layout; return what rank 0 prints."""
    import contextlib
    import io
    from unittest import mock

    from mindspeed_train import sample

    if not ways[0][0]:
        prepared(folder)
    texts = []
    for layout, own in ways:
        flags = training_flags(("--load", str(folder / "saved"), *of_text(folder), *layout), 1)
        output = io.StringIO()
        plainly = mock.patch.object(sample, "continuation", return_value=None)
        with plainly if own else contextlib.nullcontext(), contextlib.redirect_stdout(output):
            sample.command.main(
                ["--prompt", "the cat", "--length", "12", *flags], "sample", standalone_mode=False
            )
        texts.append(output.getvalue())
    return texts


PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.mark.thorough
def test_sample_hands_over_to_a_package_that_generates(tmp_path):
    ((own, handed_over),) = run_world(continuations, 1, tmp_path, [((), True), ((), False)])
    assert own == handed_over != ""
    ((on_stages,), _) = run_world(continuations, 2, tmp_path, [(PP2, False)])
    assert on_stages == own
