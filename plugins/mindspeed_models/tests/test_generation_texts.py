"""Texts of answers: streamed, stopped, of conversations, and the command line that prints them."""

import json

import pytest
from corpora import write_tokenizer
from generation_runs import commands, generations
from test_generation import of_transformers
from tiny_models import make, oracle

from mindspeed_models.data.tokenizers import TokenizerChoice, load_encoder
from mindspeed_testing import run_world

TEXT = "the cat saw a dog"
CHAT = [{"role": "user", "content": "where is </s> it"}]
CALLS = {
    "streamed": ("streamed", (TEXT,), {"max_new_tokens": 40}),
    "with input": ("generate", (TEXT,), {"max_new_tokens": 6, "include_input": True}),
    "several": ("generate", ([TEXT, "a dog"],), {"max_new_tokens": 6}),
    "conversation": ("ids", (CHAT,), {"max_new_tokens": 2, "include_input": True}),
    "unknown role": ("ids", ([{"role": "robot", "content": "x"}],), {}),
    "streamed beams": ("generate", (TEXT,), {"num_beams": 2, "stream": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "llama"
    make("llama", root, vocab_size=400)
    write_tokenizer(root)
    return root


@pytest.fixture(scope="module")
def encoder(folder):
    return load_encoder(TokenizerChoice(path=str(folder)))


@pytest.fixture(scope="module")
def found(folder):
    ((results,),) = run_world(
        generations, 1, str(folder), [{"chat_template": "chatml"}], list(CALLS.values())
    )
    return dict(zip(CALLS, results))


def larger_tokenizer(root):
    from mindspeed_train.text.tokenizer import train_tokenizer

    texts = [" ".join(f"word{number}" for number in range(400))] * 3
    train_tokenizer(texts, 900).save(root / "larger.json")
    return root / "larger.json"


@pytest.fixture(scope="module")
def printed(folder, tmp_path_factory):
    """Output of command lines, and the file of answers that some of them write."""
    root = tmp_path_factory.mktemp("files")
    prompts, answers = root / "prompts.jsonl", root / "answers.jsonl"
    records = [
        {"id": "one", "prompt": TEXT},
        {"id": "two", "ids": [7, 8, 9], "settings": {"max_new_tokens": 3}},
        {"id": "three", "messages": CHAT},
    ]
    prompts.write_text("\n".join(map(json.dumps, records)) + "\n")
    common = ["generate", "--load", str(folder), "--max-new-tokens", "6", "--chat-template", "chatml"]
    files = [*common, "--prompt-file", str(prompts), "--output", str(answers)]
    broken = root / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    lines = {
        "plain": [*common, "--prompt", TEXT, "--greedy", "--ds-inference"],
        "streamed": [*common, "--prompt", TEXT, "--stream"],
        "ids": [*common, "--prompt", TEXT, "--no-detokenize"],
        "several": [*common, "--prompt", TEXT, "--prompt", "a dog"],
        "file": files,
        "again": files,
        "resumed": [*files, "--resume"],
        "broken line": [*common, "--prompt-file", str(broken)],
        "nothing": common,
        "both": [*common, "--prompt", "a", "--greedy", "--do-sample"],
        "beams": [*common, "--prompt", "a", "--num-beams", "0"],
        "no folder": ["generate", "--load", str(root / "none"), "--prompt", "a"],
        "split": [*common, "--prompt", "a", "--context-parallel-size", "2"],
        "other tokenizer": [*common, "--prompt", "a", "--tokenizer-model", str(larger_tokenizer(root))],
    }
    (found,) = run_world(commands, 1, list(lines.values()))
    return dict(zip(lines, found)), [json.loads(line) for line in answers.read_text().splitlines()]


def expected(encoder, ids, **settings):
    tokens = of_transformers(oracle("llama", vocab_size=400), ids, do_sample=False, **settings)
    encoder.library.encode_special_tokens = True
    return encoder.library.decode(tokens, skip_special_tokens=False)


def test_parts_of_a_stream_are_the_text(found, encoder):
    states, text = found["streamed"]
    assert states[-1] == text == expected(encoder, encoder.texts([TEXT])[0], max_new_tokens=40)
    assert all(text.startswith(state) for state in states)
    assert len(states) > 5
    assert not any(state.endswith("�") for state in states[:-1])


def test_results_begin_with_the_prompt_where_that_is_asked_for(found, encoder):
    assert found["with input"] == TEXT + expected(encoder, encoder.texts([TEXT])[0], max_new_tokens=6)


def test_several_texts_give_a_list(found, encoder):
    assert found["several"] == [
        expected(encoder, encoder.texts([text])[0], max_new_tokens=6) for text in (TEXT, "a dog")
    ]


def test_a_conversation_is_written_by_its_template_and_says_no_special_token(found, encoder):
    ids = found["conversation"][:-2]
    assert ids.count(encoder.special["<|im_start|>"]) == 2
    assert encoder.special["</s>"] not in ids
    assert "where is </s> it" in encoder.library.decode(ids, skip_special_tokens=False)


def test_what_cannot_be_said_is_refused(found):
    assert "message 1 has the role 'robot'" in found["unknown role"]
    assert "--stream: beam search knows its text at the end only" in found["streamed beams"]


def test_the_program_prints_the_answer(printed, found):
    results, _ = printed
    status, output, _ = results["plain"]
    assert (status, output) == (0, found["several"][0] + "\n")
    assert results["streamed"][:2] == (0, output)
    assert len(results["ids"][1].split()) == 6
    assert [json.loads(line)["text"] for line in results["several"][1].splitlines()] == found["several"]


def test_answers_are_written_one_a_line_and_never_twice(printed, found):
    results, answers = printed
    assert [each["id"] for each in answers] == ["one", "two", "three"]
    assert answers[0]["text"] == found["several"][0]
    assert [len(each["tokens"]) for each in answers] == [6, 3, 6]
    assert results["again"][0] == 1
    assert "is there already; add --resume" in results["again"][2]
    assert results["resumed"][0] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken line", "broken.jsonl:2': 'prompt' is empty or no str"),
        ("nothing", "--prompt: there is nothing to continue"),
        ("both", "--greedy: --do-sample draws tokens"),
        ("beams", "--num-beams 0: is no number of beams"),
        ("no folder", "is no folder; name a checkpoint or a Hugging Face folder"),
        ("split", "--context-parallel-size"),
        ("other tokenizer", "ids, the model has 512; leave it out"),
    ],
)
def test_a_command_line_that_cannot_work_is_one_sentence(printed, name, words):
    status, _, messages = printed[0][name]
    assert status == 1
    assert words in messages
    assert "Traceback" not in messages


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [["--do-sample", "--seed", "3"], ["--num-beams", "3", "--num-return-sequences", "2"]],
    ids=["drawn", "several answers"],
)
def test_an_interrupted_run_goes_on_to_the_same_file(folder, tmp_path, more):
    prompts, whole = tmp_path / "prompts.txt", tmp_path / "whole.jsonl"
    prompts.write_text("".join(f"{TEXT} {number}\n" for number in range(5)))
    line = ["generate", "--load", str(folder), "--max-new-tokens", "6", "--batch-size", "2", *more]
    line += ["--prompt-file", str(prompts), "--output"]
    ((status, *_),) = run_world(commands, 1, [[*line, str(whole)]])[0]
    assert status == 0
    written = whole.read_bytes()
    ends = [at + 1 for at, byte in enumerate(written) if byte == ord("\n")]
    # In the middle of a line, of its end, between two lines, and before the first one ended.
    cuts = [ends[2] + 17, ends[1] - 1, ends[0], 5, len(written) - 3]
    files = [tmp_path / f"{cut}.jsonl" for cut in cuts]
    for file, cut in zip(files, cuts):
        file.write_bytes(written[:cut])
    found = run_world(commands, 1, [[*line, str(file), "--resume"] for file in files])[0]
    assert [status for status, *_ in found] == [0] * len(files)
    assert [file.read_bytes() for file in files] == [written] * len(files)


@pytest.mark.thorough
def test_prompts_of_a_file_are_dealt_out_over_ranks(folder, printed, tmp_path):
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("".join(f"{TEXT}\n" if number % 2 else "a dog\n\n" for number in range(5)))
    line = ["generate", "--load", str(folder), "--max-new-tokens", "6", "--batch-size", "2"]
    line += ["--prompt-file", str(prompts), "--output", str(answers)]
    assert [status for ((status, *_),) in run_world(commands, 2, [line])] == [0, 0]
    found = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    several = [json.loads(line)["text"] for line in printed[0]["several"][1].splitlines()]
    assert found == [several[1 - number % 2] for number in range(5)]


@pytest.mark.thorough
def test_the_program_starts_as_many_processes_as_the_sizes_need(folder, printed):
    import subprocess
    import sys

    line = ["generate", "--load", str(folder), "--prompt", TEXT, "--max-new-tokens", "6", "--tp", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "mindspeed_models.program", *line], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == printed[0]["plain"][1]


def test_machines_need_not_share_the_file_of_answers(folder, tmp_path):
    """The first machine has one answer of three, the second has no file."""
    for name in ("machine0", "machine1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prompts.txt").write_text("it saw\u2028a dog\nthe cat\nand it ran\n")
    answers = tmp_path / "machine0" / "answers.jsonl"
    answers.write_text('{"id": "0", "text": "from before"}\n')
    line = ["--prompt-file", "prompts.txt", "--output", "answers.jsonl", "--resume", "--tp", "2"]
    line += ["--max-new-tokens", "3", "--batch-size", "1"]
    results = run_world("generation_runs:on_machines_of_their_own", 2, str(folder), str(tmp_path), line)
    assert [status for status, _ in results] == [0, 0], results
    found = [json.loads(each) for each in answers.read_text().splitlines()]
    assert [each["id"] for each in found] == ["0", "1", "2"]
    assert found[0]["text"] == "from before"
    assert not (tmp_path / "machine1" / "answers.jsonl").exists()


@pytest.mark.thorough
def test_ctrl_c_ends_all_ranks_in_the_middle_of_an_answer(folder):
    import os
    import signal
    import subprocess
    import sys

    line = ["generate", "--load", str(folder), "--prompt", TEXT, "--max-new-tokens", "100", "--tp", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mindspeed_models.program", *line, "--stream", "--eos-token-id", "399"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.read(1)
        os.killpg(process.pid, signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, messages
    assert "Traceback" not in messages
    # Nobody of the group is left.
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
