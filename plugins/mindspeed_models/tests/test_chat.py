"""The chat in a terminal, driven through a pseudo-terminal, and its conversation."""

import contextlib
import json
import os
import pty
import select
import signal
import sys
import time

import pytest
from fake_model import FakeModel

from mindspeed_core.errors import UserError
from mindspeed_models.data.conversation import Message
from mindspeed_models.inference.requests import GenerationSettings
from mindspeed_models.serving.chat import Chat, in_foreground, reader
from mindspeed_models.serving.conversation import Conversation
from mindspeed_models.serving.prompts import load_prompts

SETTINGS = GenerationSettings(do_sample=True, max_new_tokens=40, seed=3)
SLOW = "slowly it ran on and on " * 20


def chat_of(model, settings=SETTINGS, **more):
    return Chat(model, load_prompts(model, model.folder, None), settings, **more)


class Terminal:
    """A chat in a child process behind a pseudo-terminal."""

    def __init__(self, folder, say, settings=SETTINGS, step_seconds=0.0, *, launched=False):
        # What follows must not be imported after the fork.
        model = FakeModel(folder, say)
        chat = chat_of(model, settings)
        self.seen = ""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            status = 1
            try:
                if launched and (worker := os.fork()):
                    os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
                if launched:
                    os.setpgid(0, 0)
                # Those of pytest are not the terminal.
                for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
                    setattr(sys, name, os.fdopen(number, "w" if number else "r"))
                signal.signal(signal.SIGINT, signal.default_int_handler)
                model.on_step = lambda number: time.sleep(step_seconds)
                with in_foreground():
                    chat.run(reader("> "))
                status = 0
            finally:
                os._exit(status)

    def wait_for(self, text, seconds=20.0):
        """Read until a text appears; what came before it is forgotten."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            readable, _, _ = select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                raise AssertionError(f"{text!r} did not appear in {self.seen!r}")
            try:
                self.seen += os.read(self.terminal, 4096).decode("utf-8", "replace")
            except OSError as error:
                raise AssertionError(f"the chat ended with {self.seen!r}") from error
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text):
        os.write(self.terminal, text.encode())

    def interrupt(self, answer):
        """Type Ctrl-C until it is answered: one right behind the prompt is seen with the next key alone."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.wait_for(answer, seconds=1.0)
                return
        raise AssertionError(f"{answer!r} did not appear in {self.seen!r}")

    def end(self):
        """Return the exit status."""
        with contextlib.suppress(OSError):
            while os.read(self.terminal, 4096):
                pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_conversation_is_held_and_saved(tmp_path):
    terminal = Terminal(tmp_path / "m", lambda prompt: f"answer {prompt.count('user')} 房子")
    terminal.wait_for("> ")
    terminal.type("/system Be brief.\n")
    terminal.wait_for("(the system message is set)")
    terminal.type("hello\n")
    terminal.wait_for("answer 1 房子")
    terminal.type("and more\n")
    terminal.wait_for("answer 2 房子")
    file = tmp_path / "saved.jsonl"
    terminal.type(f"/save {file}\n")
    terminal.wait_for("(written to")
    terminal.type(f"/save {file}\n")
    terminal.wait_for("exists; name a new file")
    terminal.type("/reset\n")
    terminal.wait_for("forgotten")
    terminal.type("again\n")
    terminal.wait_for("answer 1 房子")
    terminal.type("/rest\n")
    terminal.wait_for("did you mean '/reset'")
    terminal.type("/exit\n")
    assert terminal.end() == 0
    saved = json.loads(file.read_text())
    turn = ["user", "assistant"]
    assert [each["role"] for each in saved["messages"]] == ["system", *turn, *turn]
    assert saved["messages"][4]["content"] == "answer 2 房子"


def test_ctrl_c_interrupts_one_answer_and_ctrl_d_ends(tmp_path):
    settings = GenerationSettings(max_new_tokens=400)
    say = lambda prompt: SLOW if prompt.count("user") == 1 else "done"  # noqa: E731
    terminal = Terminal(tmp_path / "m", say, settings, step_seconds=0.02)
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("slowly it ran")
    terminal.type("\x03")
    before = terminal.wait_for("(interrupted)")
    assert len(before) < len(SLOW) / 2
    terminal.wait_for("> ")
    terminal.interrupt("Ctrl-D or /exit ends")
    # The begun answer is part of the conversation.
    terminal.type("more\n")
    terminal.wait_for("done")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_a_process_that_a_launcher_started_reads_the_terminal(tmp_path):
    """Its process group is not that of the terminal's foreground."""
    say = lambda prompt: SLOW if prompt.count("user") == 1 else "done"  # noqa: E731
    settings = GenerationSettings(max_new_tokens=400)
    terminal = Terminal(tmp_path / "m", say, settings, step_seconds=0.02, launched=True)
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("slowly it ran")
    terminal.type("\x03")
    terminal.wait_for("(interrupted)")
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_the_answer_appears_while_it_grows(tmp_path, capsys):
    model = FakeModel(tmp_path / "m", lambda prompt: "one two three")
    states = []
    model.on_step = lambda number: states.append(capsys.readouterr().out)
    chat = chat_of(model)
    lines = iter(["hello\n"])
    chat.run(lambda: next(lines, None) or _end())
    shown = [state for state in states if state]
    assert len(shown) > 3
    assert ("".join(states) + capsys.readouterr().out).startswith("one two three")


def _end():
    raise EOFError


def test_escape_sequences_of_a_model_are_shown_and_not_obeyed(tmp_path, capsys):
    chat = chat_of(FakeModel(tmp_path / "m", lambda prompt: "a\x1b[2Jb"))
    lines = iter(["hello"])
    chat.run(lambda: next(lines, None) or _end())
    assert "a\\x1b[2Jb" in capsys.readouterr().out


def test_old_turns_make_room(tmp_path, capsys):
    model = FakeModel(tmp_path / "m", lambda prompt: "it saw the cat", max_positions=160)
    chat = chat_of(model, system="Be brief.")
    lines = iter([f"question {number} about the house" for number in range(8)])
    chat.run(lambda: next(lines, None) or _end())
    assert "oldest turns are left out" in capsys.readouterr().out
    assert all(len(each.prompt) + 40 <= 160 for each in model.asked)
    last = model.tokenizer.detokenize(model.asked[-1].prompt)
    assert "Be brief." in last
    assert "question 7" in last
    assert "question 0" not in last


def test_a_message_that_never_fits_is_refused_and_forgotten(tmp_path, capsys):
    model = FakeModel(tmp_path / "m", max_positions=80)
    chat = chat_of(model)
    lines = iter(["house " * 200, "short"])
    chat.run(lambda: next(lines, None) or _end())
    assert "shorten it, or lower --max-new-tokens" in capsys.readouterr().err
    assert [message.role for message in chat.conversation.turns] == ["user", "assistant"]
    assert chat.conversation.turns[0].content == "short"


def test_a_model_that_refuses_leaves_the_conversation_as_it_was(tmp_path, capsys):
    model = FakeModel(tmp_path / "m")
    model.failure = lambda requests: UserError("the cache does not fit")
    chat = chat_of(model)
    lines = iter(["hello"])
    chat.run(lambda: next(lines, None) or _end())
    assert "the cache does not fit" in capsys.readouterr().err
    assert chat.conversation.turns == []


def test_answers_draw_anew_unless_a_seed_is_given(tmp_path):
    for seeded, count in ((False, 2), (True, 1)):
        model = FakeModel(tmp_path / f"m{seeded}")
        chat = chat_of(model, seeded=seeded)
        lines = iter(["hello", "hello"])
        chat.run(lambda lines=lines: next(lines, None) or _end())
        assert len({each.settings.seed for each in model.asked}) == count


def test_a_model_without_a_template_is_refused_at_once(tmp_path):
    model = FakeModel(tmp_path / "m", chat_template="")
    with pytest.raises(UserError, match="--chat-template: the tokenizer has no template"):
        chat_of(model).check()


def test_a_conversation_that_cannot_be_saved_says_why(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        Conversation().save(tmp_path / "missing" / "file")
    conversation = Conversation(turns=[Message("user", "a")])
    conversation.answered("  ")
    assert conversation.turns == []
