"""A program with a loop of its own generates with the model that it has built."""

import pytest
import torch
from own_loop import OwnLoop, described, of_the_batches, recorded
from test_pretrained_weights import MODEL

from mindspeed_core.activation import activate
from mindspeed_testing import run_world

PROMPT = [5, 9, 33, 71]
NEW = 8


def recomputed(model):
    """Return the likeliest tokens, each from the whole text before it."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW):
            ids = torch.tensor([tokens])
            logits = model(ids, torch.arange(len(tokens))[None], None)
            tokens.append(int(logits[0, -1, :250].argmax()))
    return tokens[len(PROMPT) :]


def generated(mode):
    """Generate after a step of training, or without any; return both sides and what was left behind."""
    from mindspeed_models.inference.model import generating

    with recorded(*MODEL) as (memory, run):
        args = run.args
    flags, configs = of_the_batches(args), described(*MODEL)[1]
    with activate(flags, platform="cpu", configs=configs, mode=mode) as session:
        if mode == "train":
            own = OwnLoop(session, configs, memory, args, False)
            own.step([memory.batches[0][:4]], args)
            model = own.chunks[0]
        else:
            model = built(session, configs[0], args)
        with generating(session.run, model=model, vocab_size=250, end_tokens=()) as asked:
            tokens = asked.generate(PROMPT, detokenize=False, max_new_tokens=NEW)
        training = model.training
        left = [name for module in model.modules() for name in vars(module) if name.startswith("_adjust")]
        return tokens, recomputed(model.eval()), training, left


def built(session, config, args):
    """Build a model as a program without a training does."""
    from megatron.core.models.gpt import GPTModel

    config = session.config(config)
    model = GPTModel(
        config,
        session.layer_spec(config),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
    )
    return session.model(model)


@pytest.mark.thorough
def test_it_generates_after_a_step_of_training_and_without_any():
    for mode in ("train", "inference"):
        ((tokens, expected, training, left),) = run_world(generated, 1, mode)
        assert tokens == expected
        assert training
        assert left == []
