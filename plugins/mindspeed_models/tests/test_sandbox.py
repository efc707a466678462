"""The sandbox: what programs try, and what comes of it."""

import os

import pytest

from mindspeed_core.errors import UserError
from mindspeed_models.sandbox.run import Limits, Sandbox, SandboxFailed


@pytest.fixture(scope="module")
def sandbox():
    """The strongest form that this system has; some, such as root in a plain container, have none."""
    try:
        return Sandbox(Limits(seconds=30.0, memory=512 << 20))
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def brief(sandbox):
    """For programs that never end."""
    return Sandbox(Limits(seconds=1.0), form=sandbox.form)


def test_a_program_that_ends_has_passed(sandbox):
    outcome = sandbox.run("import math, typing, collections\nassert math.sqrt(9) == 3\nprint('fine')")
    assert outcome.passed
    assert outcome.reason == "passed"


def test_a_failing_assertion_is_told_with_its_message(sandbox):
    outcome = sandbox.run("assert 1 == 2, 'seven'")
    assert not outcome.passed
    assert outcome.reason == "failed"
    assert "seven" in outcome.error


@pytest.mark.parametrize("program", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_an_early_end_has_not_passed(sandbox, program):
    outcome = sandbox.run(f"{program}\nassert False")
    assert not outcome.passed
    assert outcome.reason == "ended early"


def test_an_endless_loop_is_ended(brief):
    outcome = brief.run("while True: pass")
    assert outcome.reason == "timed out"
    assert outcome.seconds < 20


def test_a_program_that_stops_itself_is_ended(brief):
    outcome = brief.run("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
    assert outcome.reason == "timed out"


def test_no_processes_are_made(sandbox):
    outcome = sandbox.run("import os\nwhile True:\n    os.fork()")
    assert not outcome.passed
    assert "PermissionError" in outcome.error
    outcome = sandbox.run("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])")
    assert not outcome.passed
    assert "PermissionError" in outcome.error
    outcome = sandbox.run("import threading\nthreading.Thread(target=print).start()")
    assert not outcome.passed
    assert "can't start new thread" in outcome.error


def test_memory_ends_at_its_limit(sandbox):
    outcome = sandbox.run("held = []\nwhile True: held.append(bytearray(1 << 24))")
    assert not outcome.passed
    assert "MemoryError" in outcome.error


def test_a_file_ends_at_its_limit(sandbox):
    outcome = sandbox.run("open('large', 'wb').write(bytes(4 << 20))")
    assert not outcome.passed
    assert "File too large" in outcome.error


def test_many_files_end_at_the_size_of_its_file_system(sandbox):
    program = "at = 0\nwhile True:\n    open(f'f{at}', 'wb').write(bytes(1 << 19)); at += 1"
    outcome = sandbox.run(program)
    assert not outcome.passed
    assert "No space left" in outcome.error


def test_output_ends_at_its_limit(sandbox):
    outcome = sandbox.run("while True: print('x' * 65536)")
    assert not outcome.passed
    assert outcome.reason in ("failed", "ended by SIGXFSZ")


def test_no_sockets_are_opened(sandbox):
    for family in ("AF_INET", "AF_INET6", "AF_UNIX"):
        outcome = sandbox.run(f"import socket\nsocket.socket(socket.{family})")
        assert not outcome.passed
        assert "PermissionError" in outcome.error


def test_nobody_is_killed(sandbox):
    for target in ("os.getppid()", "-1", "0", "1", str(os.getpid())):
        outcome = sandbox.run(f"import os, signal\nos.kill({target}, signal.SIGKILL)")
        assert not outcome.passed
        assert "PermissionError" in outcome.error
    outcome = sandbox.run("import os, signal\nos.killpg(os.getpgid(0), signal.SIGKILL)")
    assert not outcome.passed
    assert sandbox.run("pass").passed


def test_the_environment_is_empty_and_that_of_others_unreadable(sandbox, monkeypatch):
    monkeypatch.setenv("MINDSPEED_SECRET", "do-not-tell")
    outcome = sandbox.run(
        "import os\nassert not [n for n in os.environ if n != 'LC_CTYPE'], dict(os.environ)"
    )
    assert outcome.passed, outcome.error
    for who in ("self", str(os.getpid()), "1"):
        outcome = sandbox.run(f"assert b'do-not-tell' not in open('/proc/{who}/environ', 'rb').read()")
        assert "FileNotFoundError" in outcome.error


def test_files_of_the_machine_are_neither_read_nor_written(sandbox, tmp_path):
    (tmp_path / "model").write_text("weights")
    for path in (tmp_path / "model", "/etc/passwd", "/proc/cpuinfo", "/sys/kernel", "/dev/null"):
        assert "FileNotFoundError" in sandbox.run(f"open({str(path)!r}).read()").error
    for path in ("/usr/bin/new", "/usr/lib/new"):
        assert "Read-only file system" in sandbox.run(f"open({path!r}, 'w')").error
    outcome = sandbox.run("import os\nassert sorted(os.listdir('/tmp')) == []")
    assert outcome.passed, outcome.error


def test_no_privileges_are_had_inside(sandbox):
    program = "import os\nassert os.getuid() != 0\n"
    assert sandbox.run(program).passed
    for attempt in ("os.chroot('/')", "os.setuid(0)", "os.sethostname(b'x')"):
        outcome = sandbox.run(f"import os, socket\nos.sethostname = socket.sethostname\n{attempt}")
        assert not outcome.passed
        assert "Error" in outcome.error


def test_a_crash_of_the_interpreter_is_a_failure(sandbox):
    outcome = sandbox.run("import ctypes\nctypes.string_at(0)")
    assert not outcome.passed
    assert outcome.reason == "ended by SIGSEGV"


def test_a_program_that_cannot_be_locked_in_is_not_run(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox, "limits", Limits(disk_bytes=-1))
    with pytest.raises(SandboxFailed, match="mount"):
        sandbox.run("pass")


def test_the_status_of_the_launcher_is_the_programs_own(sandbox):
    assert sandbox.run("import os; os._exit(125)").reason == "failed"


def test_nothing_is_left_behind(brief, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    brief.run("open('left', 'w').write('x')\nwhile True: pass")
    assert list(tmp_path.iterdir()) == []


def test_root_without_namespaces_is_refused(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(UserError, match="as root nothing else holds a program back"):
        Sandbox(form="plain")


def test_a_system_without_any_form_is_refused(monkeypatch):
    def run(self, program):
        raise SandboxFailed("unshare: Operation not permitted")

    monkeypatch.setattr(Sandbox, "run", run)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match=r"--allow-code-execution.*unshare: Operation not permitted"):
        Sandbox()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("assert 1 + 1 == 2", ""),
        ("import os; os.fork()", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("bytearray(1 << 30)", "MemoryError"),
        ("open('large', 'wb').write(bytes(4 << 20))", "File too large"),
        ("import os; assert not [name for name in os.environ if name != 'LC_CTYPE']", ""),
    ],
)
def test_without_namespaces_filter_and_limits_hold(plain, program, said):
    outcome = plain.run(program)
    assert outcome.passed == (said == ""), outcome.error
    assert said in outcome.error


@pytest.fixture(scope="module")
def plain():
    """The form of other users than root; what it forbids does not depend on the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 1000)
        return Sandbox(Limits(seconds=30.0, memory=512 << 20), form="plain")
