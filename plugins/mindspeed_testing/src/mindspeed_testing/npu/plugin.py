"""The pytest plugin of ``python -m mindspeed_testing.npu``: it watches what tests use of torch_npu.

A run without failures still fails when a call was never run, or when a name does not exist. The process ends
without the interpreter's usual clean-up, in which torch_npu would ask the device for things that the
stand-ins refuse.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_core.errors import UserError
from mindspeed_megatron.devices.torch_npu_uses import ApiUse, api_uses, package_folders
from mindspeed_testing.npu import contracts, schemas
from mindspeed_testing.npu.reached import ReachedUses
from mindspeed_testing.npu.stubs import check_stubbed

_USES = pytest.StashKey[list[ApiUse]]()
_REACHED = pytest.StashKey[ReachedUses]()
_PROBLEMS = pytest.StashKey[list[str]]()
_OUTPUT = "npu"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Return the options of the command."""
    group = parser.getgroup("npu", "NPU conformance")
    group.addoption(
        "--source", action="append", default=[], help="Import package whose calls must all be run."
    )
    group.addoption("--schemas", type=Path, default=None, help="Compare used names with this record.")
    group.addoption("--write-schemas", type=Path, default=None, help="Write that record.")
    group.addoption("--contracts", type=Path, default=None, help="Compare tests of kernels with this record.")
    group.addoption("--write-contracts", type=Path, default=None, help="Write that record.")


def pytest_configure(config: pytest.Config) -> None:
    """Read the sources and begin to watch, before anything of theirs is imported.

    Where several processes run the tests, each of them watches, and the one that has started them joins what
    they reached.
    """
    try:
        check_stubbed()
        uses = api_uses(package_folders(config.getoption("--source")))
    except UserError as error:
        # Not a usage error of pytest: it would be reported after this process has ended.
        pytest.exit(str(error), returncode=int(pytest.ExitCode.USAGE_ERROR))
    config.stash[_USES] = uses
    config.stash[_PROBLEMS] = []
    config.stash[_REACHED] = ReachedUses(uses)
    if not _is_joining(config):
        config.stash[_REACHED].start()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> object:
    """Turn what was not reached into a failure."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput[_OUTPUT] = _found(config)
    result = yield
    reached = config.stash[_REACHED]
    reached.stop()
    if hasattr(config, "workeroutput"):
        return result
    # A run of chosen tests, or one that failed anyway, says nothing about the calls of the rest.
    if session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED) and not _is_partial(config):
        config.stash[_PROBLEMS] = problems(config.stash[_USES], reached, config)
        if config.stash[_PROBLEMS]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Join what a process that has ended reached; one that crashed reached nothing."""
    from mindspeed_testing.npu.device import COMPUTED
    from mindspeed_testing.npu.fake import DISPATCHED

    found = getattr(node, "workeroutput", {}).get(_OUTPUT, {"reached": [], "computed": {}, "dispatched": {}})
    watched = node.config.stash[_REACHED]
    watched.reached.update(watched.uses[place] for place in found["reached"])
    DISPATCHED.update(found["dispatched"])
    for operation, test in found["computed"].items():
        COMPUTED.setdefault(operation, test)


def _is_joining(config: pytest.Config) -> bool:
    """Return whether other processes run the tests for this one."""
    return bool(getattr(config.option, "tx", None)) and not hasattr(config, "workerinput")


def _found(config: pytest.Config) -> dict[str, Any]:
    """Return what this process reached, for the one that joins."""
    from mindspeed_testing.npu.device import COMPUTED
    from mindspeed_testing.npu.fake import DISPATCHED

    watched = config.stash[_REACHED]
    reached = [place for place, use in enumerate(watched.uses) if use in watched.reached]
    return {"reached": reached, "computed": dict(COMPUTED), "dispatched": dict(DISPATCHED)}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how much was reached, and what was not."""
    calls = config.stash[_REACHED].uses
    reached = config.stash[_REACHED].reached
    terminalreporter.write_line(f"uses of torch_npu: {len(reached)} of {len(calls)} calls run")
    for use in calls:
        if use.excuse and use not in reached:
            terminalreporter.write_line(f"  not run, needs an NPU: {use} ({use.excuse})")
    for line in config.stash[_PROBLEMS]:
        terminalreporter.write_line(f"  {line}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process; see the module."""
    session = config.pluginmanager.get_plugin("session")
    status = int(getattr(session, "exitstatus", pytest.ExitCode.INTERNAL_ERROR))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def problems(uses: list[ApiUse], reached: ReachedUses, config: pytest.Config) -> list[str]:
    """Return what is wrong although every test passed, one line each."""
    names = sorted({use.name for use in uses})
    found = [
        f"{use}: there is no such name in torch_npu {schemas.installed_version()}"
        for use in uses
        if not schemas.describe(use.name)
    ]
    found += [f"{use} was never run by a test" for use in reached.missed()]
    found += [f"{use} is handed on, and never ran in a test" for use in uses if never_ran(use)]
    written, compared = config.getoption("--write-schemas"), config.getoption("--schemas")
    if written is not None:
        schemas.write_snapshot(written, schemas.schema_snapshot(names))
    elif compared is not None:
        found += schemas.compare_snapshot(schemas.read_snapshot(compared), names)
    written, compared = config.getoption("--write-contracts"), config.getoption("--contracts")
    if written is not None or compared is not None:
        found += contracts.untested()
    if written is not None:
        contracts.write_record(written)
    elif compared is not None:
        found += contracts.compare_record(compared)
    return found


def never_ran(use: ApiUse) -> bool:
    """Return whether a mention is an operation that no test made the device run."""
    operation = None if use.is_call or use.excuse else schemas.operation_of(use.name)
    if operation is None:
        return False
    from mindspeed_testing.npu.fake import DISPATCHED

    return not any(name.startswith(operation.replace("::", ".") + ".") for name in DISPATCHED)


def _is_partial(config: pytest.Config) -> bool:
    # A marker expression of the project's own configuration leaves out what is run elsewhere.
    by_marker = any(str(argument).startswith("-m") for argument in config.invocation_params.args)
    return bool(config.getoption("keyword") or by_marker or config.getoption("collectonly"))
