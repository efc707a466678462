"""Hostile files end in a value or in one message that names the file, in little time and memory."""

from __future__ import annotations

import random
import unicodedata
import warnings
from pathlib import Path

import pytest
import torch
from file_grammar import Good, case_of
from limited_process import begin_reading, run_cases

from mindspeed_core.errors import UserError
from mindspeed_train.checkpoint.reasons import unwrap_failure

_HIDDEN = {"Cc", "Cf", "Cs"}


def one_case(good):
    def run(number, folder):
        for file in folder.iterdir():
            file.unlink()
        read = case_of(good, random.Random(number), folder)
        begin_reading()
        try:
            read()
        except UserError as error:
            return complaint(str(error), folder)
        except BaseException as error:
            found = unwrap_failure(error)
            if isinstance(found, UserError):
                return complaint(str(found), folder)
            return f"{type(found).__name__}: {found}"
        return ""

    return run


def complaint(message, folder):
    if str(folder) not in message:
        return f"no file is named: {message!r}"
    if any(unicodedata.category(character) in _HIDDEN for character in message):
        return f"a message with control characters: {message!r}"
    return ""


def warm(good, folder):
    def run():
        for number in range(300):
            for file in folder.iterdir():
                file.unlink()
            read = case_of(good, random.Random(-number - 1), folder)
            try:
                read()
            except BaseException:
                continue

    return run


def fuzz(tmp_path, cases):
    torch.set_num_threads(1)
    good = Good(tmp_path / "good")
    folder = tmp_path / "case"
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_cases(cases, one_case(good), folder, warm(good, folder))


def test_two_thousand_hostile_files_end_in_a_value_or_a_message(tmp_path):
    assert fuzz(tmp_path, 2000) == []


@pytest.mark.thorough
def test_a_hundred_thousand_hostile_files_end_in_a_value_or_a_message(tmp_path):
    assert fuzz(tmp_path, 100_000) == []


def test_the_machine_notices_what_a_case_must_not_do(tmp_path):
    """Time, memory, crashes, and each kind of event."""
    import os
    import pickle
    import signal

    def does(number, folder):
        begin_reading()
        if number == 0:
            os.system("true")
        elif number == 1:
            Path("/etc/hostname").read_text()
        elif number == 2:
            (folder / "x").write_text("x")
        elif number == 3:
            pickle.loads(b"cos\nsystem\n.")
        elif number == 4:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif number == 5:
            bytearray(3 << 30)
        elif number == 6:
            __import__("this")
        elif number == 7:
            os.kill(os.getpid(), signal.SIGALRM)
        return ""

    def guarded(number, folder):
        try:
            return does(number, folder)
        except MemoryError:
            return "memory"
        except BaseException:
            return ""

    found = run_cases(9, guarded, tmp_path, lambda: None)
    wanted = ("os.system", "open", "open", "pickle.find_class", "os.kill", "memory", "import", "os.kill")
    assert len(found) == len(wanted)
    for number, (line, words) in enumerate(zip(found, wanted)):
        assert line.startswith(f"case {number}: ")
        assert words in line
