"""Generations of worlds: models opened under layouts, and what calls of them return."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def generations(folder: str, opened: list[dict[str, Any]], calls: list[Call]) -> list[list[Any]]:
    """Open a model with each set of options; return the results of all calls, or the message of a refusal."""
    from mindspeed_core.errors import UserError
    from mindspeed_models import load

    found = []
    for options in opened:
        given = dict(options)
        with load(given.pop("folder", folder), **given) as model:
            results = []
            for name, positional, named in calls:
                try:
                    results.append(CALLS[name](model, *positional, **named))
                except UserError as error:
                    results.append(str(error))
            found.append(results)
    return found


def ids(model: Any, prompts: Any, **settings: Any) -> Any:
    """Return the ids of answers."""
    return model.generate(prompts, detokenize=False, **settings)


def streamed(model: Any, prompt: Any, **settings: Any) -> tuple[list[str], str]:
    """Return every state of a growing text, and the text at once."""
    return list(model.generate(prompt, stream=True, **settings)), model.generate(prompt, **settings)


def answers(model: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of requests, each with settings of its own."""
    from mindspeed_models.inference.requests import GenerationRequest, GenerationSettings

    made = [
        GenerationRequest(each["prompt"], GenerationSettings(**each["settings"]), each["request_id"])
        for each in requests
    ]
    return [asdict(answer) for answer in model.generate_requests(made)]


def cancelled(model: Any, prompts: list[list[int]], after: int, **settings: Any) -> list[list[int]]:
    """Return the ids of answers of which the first is cancelled at its so manieth text."""
    from mindspeed_models.inference.requests import GenerationRequest, GenerationSettings

    seen: list[str] = []

    def on_text(number: int, new: str) -> bool:
        if number == 0:
            seen.append(new)
        return number != 0 or len(seen) < after

    requests = [
        GenerationRequest(prompt, GenerationSettings(**settings), number)
        for number, prompt in enumerate(prompts)
    ]
    return [answer.tokens for answer in model.generate_requests(requests, on_text)]


def scored(model: Any, pairs: list[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
    """Return the scores of continuations."""
    return [asdict(each) for each in model.score(pairs)]


def generated(model: Any, *positional: Any, **named: Any) -> Any:
    """Call `generate`."""
    return model.generate(*positional, **named)


def cached(model: Any, prompts: list[list[int]], capacity: int) -> tuple[int, int]:
    """Return the bytes of a cache by formula, and those that are allocated."""
    from mindspeed_models.inference.cache import Cache, cache_bytes
    from mindspeed_models.inference.decoding import prefill

    passes = model._engine.passes
    longest = max(map(len, prompts))
    cache = Cache([longest - len(prompt) for prompt in prompts], capacity, passes.device)
    prefill(passes, cache, prompts, 0)
    held = [each for pair in cache.context.key_value_memory_dict.values() for each in pair]
    formula = cache_bytes(passes.bare, len(prompts), capacity, 4)
    return formula, sum(each.numel() * each.element_size() for each in held)


def without_memory(model: Any, prompt: list[int]) -> Any:
    """Ask for tokens where the machine has no memory left."""
    from unittest import mock

    with mock.patch.object(model.run.session.platform, "total_memory", return_value=0):
        return model.generate(prompt, max_new_tokens=64)


CALLS = {
    "cached": cached,
    "without memory": without_memory,
    "ids": ids,
    "generate": generated,
    "streamed": streamed,
    "answers": answers,
    "cancelled": cancelled,
    "scored": scored,
}


def followed(folder: str, options: dict[str, Any], calls: list[Call]) -> list[Any] | str:
    """Let rank 0 ask and all others follow."""
    from mindspeed_models import load

    model = load(folder, **options)
    if not model.leader:
        model.follow()
        return "followed"
    with model:
        return [CALLS[name](model, *positional, **named) for name, positional, named in calls]


def commands(lines: list[list[str]]) -> list[tuple[int, str, str]]:
    """Run command lines of ``mindspeed-models``; return status, output and messages of each."""
    import contextlib
    import io

    from mindspeed_models.program import main

    found = []
    for line in lines:
        output, messages = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
            status = main(line)
        found.append((status, output.getvalue(), messages.getvalue()))
    return found


def between_steps(
    folder: str, flags: list[str], save: str | None, prompts: list[list[int]]
) -> dict[str, Any]:
    """Train, generate between two steps, train on and save; return losses, tokens and what was left."""
    import torch

    from mindspeed_core.activation import prepare
    from mindspeed_models.inference.model import generating
    from mindspeed_train.loop import setup, teardown

    training = [
        *("--load", folder, "--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4"),
        *("--train-iters", "4", "--lr", "1e-2", "--lr-decay-style", "constant", "--mock-data"),
        *("--num-workers", "0", "--eval-iters", "0", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
        *flags,
        *(() if save is None else ("--save", save, "--save-interval", "100")),
    ]
    found: dict[str, Any] = {"losses": [], "tokens": []}
    with prepare(training, host="standalone", platform="cpu") as session:
        run = setup(session)
        for number in range(3):
            found["losses"].append(float(session.call("train_step", run=run).losses["lm loss"]))
            run.iteration += 1
            run.consumed_train_samples += 4
            if number != 1 and prompts:
                before = torch.get_rng_state()
                with generating(run, end_tokens=()) as model:
                    found["tokens"].append(model.generate(prompts, detokenize=False, max_new_tokens=12))
                found["same state"] = torch.equal(before, torch.get_rng_state())
                found["trains"] = all(module.training for module in run.model[0].modules())
                found["replaced"] = [
                    name for name, module in run.model[0].named_modules() if "forward" in vars(module)
                ]
        if save is not None:
            session.call("save_checkpoint", run=run, reason="end")
        teardown(session)
    return found


def as_megatron_lm(folder: str, target: str, prompts: list[list[int]]) -> list[list[int]]:
    """Write a model as Megatron-LM's program saves it, at step 7; return what it continues prompts with."""
    from argparse import Namespace
    from pathlib import Path

    from megatron.core import dist_checkpointing
    from megatron.core.transformer.enums import AttnBackend

    from mindspeed_models import load

    of_the_model = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups "
        "kv_channels max_position_embeddings seq_length position_embedding_type rotary_base rotary_percent "
        "swiglu normalization norm_epsilon add_bias_linear add_qkv_bias untie_embeddings_and_output_weights "
        "padded_vocab_size make_vocab_size_divisible_by"
    ).split()
    directory = Path(target) / "iter_0000007"
    directory.mkdir(parents=True)
    with load(folder) as model:
        found: list[list[int]] = model.generate(prompts, detokenize=False, max_new_tokens=12, eos_token_id=[])
        described = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        sizes = dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1)
        state = {
            "args": Namespace(
                **{name: getattr(model.run.args, name) for name in of_the_model},
                **sizes,
                consumed_train_samples=28,
                consumed_valid_samples=0,
                attention_backend=AttnBackend.auto,
                tokenizer_type="NullTokenizer",
            ),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": unwrapped(model).sharded_state_dict(metadata=dict(described)),
        }
        dist_checkpointing.save(state, str(directory), content_metadata=described)
    (Path(target) / "latest_checkpointed_iteration.txt").write_text("7")
    return found


def unwrapped(model: Any) -> Any:
    """Return the module of a loaded model of one stage."""
    from mindspeed_megatron.unwrap import unwrap

    return unwrap(model.run.model[0])


def of_the_readme(folder: str) -> list[str]:
    """Call what AscendSpeed's README calls."""
    from mindspeed_models import from_pretrained

    found = []
    with from_pretrained(
        model_provider=None,
        pretrained_model_name_or_path=folder,
    ) as model:
        responses = model.generate("Write quick sort code in python", max_new_tokens=512)
        found.append(responses)
        responses = model.generate(
            "Write quick sort code in python",
            do_sample=True,
            temperature=1.0,
            top_k=50,
            top_p=0.95,
            max_new_tokens=512,
        )
        found.append(responses)
        responses = model.generate(
            "Write quick sort code in python", num_beams=4, top_k=50, top_p=0.95, max_new_tokens=512
        )
        found.append(responses)
        responses = model.generate(
            "Write quick sort code in python",
            do_sample=True,
            temperature=0.6,
            num_beams=4,
            top_k=50,
            top_p=0.95,
            max_new_tokens=512,
        )
        found.append(responses)
    return found


def with_learned_positions(prompts: list[list[int]]) -> tuple[Any, Any, Any]:
    """Continue texts of a model with learned positions: in one batch, each alone, and without a cache."""
    from mindspeed_core.activation import prepare
    from mindspeed_models.inference.model import generating
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train.loop import setup, teardown

    flags = training_flags(("--init-method-std", "0.3"), 1)
    settings = {"detokenize": False, "max_new_tokens": 8}
    with prepare(flags, host="standalone", platform="cpu", mode="inference") as session:
        run = setup(session)
        with generating(run) as model:
            together = model.generate(prompts, **settings)
            alone = [model.generate(prompt, **settings) for prompt in prompts]
        plain = [recomputed(run.model[0], prompt, 8, model.vocab_size) for prompt in prompts]
        teardown(session)
    return together, alone, plain


def with_and_without_a_cache(
    folder: str, options: dict[str, Any], prompts: list[list[int]]
) -> list[tuple[Any, Any, Any]]:
    """Continue texts in one batch, each alone, and computing every token anew."""
    from mindspeed_models import load

    settings = {"detokenize": False, "max_new_tokens": 10, "eos_token_id": []}
    with load(folder, **options) as model:
        together = model.generate(prompts, **settings)
        alone = [model.generate(prompt, **settings) for prompt in prompts]
        plain = [recomputed(model.run.model[0], prompt, 10, model.vocab_size) for prompt in prompts]
    return [(together, alone, plain)]


def recomputed(chunk: Any, prompt: list[int], count: int, vocabulary: int) -> list[int]:
    """Return the likeliest tokens, each from a pass over the whole text."""
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([tokens])
            logits = chunk(ids, torch.arange(len(tokens))[None], None, runtime_gather_output=True)
            tokens.append(int(logits[0, -1, :vocabulary].argmax()))
    return tokens[len(prompt) :]


def on_machines_of_their_own(folder: str, root: str, line: list[str]) -> tuple[int, str]:
    """Run a line in a folder that the other rank does not see; return its status and its messages."""
    import os
    from pathlib import Path

    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    here = Path(root) / f"machine{rank}"
    os.chdir(here)
    ((status, _, messages),) = commands([["generate", "--load", folder, *line]])
    assert not dist.is_initialized()
    return status, messages
